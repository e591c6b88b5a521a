"""The Hugging Face hub: which files a repository has, which of them a tag means, and fetching them.

Owns the rules for picking a file (those of llama.cpp's -hf) and the hub's cache on disk, which is shared with
other programs. Knows nothing of model lists. The hub's own library is imported only when the network is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from edgeserve.download import Meter, Report, check_space, file_sha256, inside, no_report
from edgeserve.errors import DownloadError, ModelNotFoundError
from edgeserve.gguf import SPLIT_NAME
from edgeserve.gguf_checks import is_model_file_name
from edgeserve.http_fetch import check_url

if TYPE_CHECKING:
    import httpx2

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
PREFERRED_TAGS: Final = ("Q4_K_M", "Q8_0")
API_TIMEOUT_S: Final = 20.0
_REPO: Final = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True)
class HubFile:
    """One file of a repository; size and SHA-256 as the hub states them, None where it does not."""

    name: str
    n_bytes: int | None = None
    sha256: str | None = None


def is_repo_name(text: str) -> bool:
    """Whether `text` has the form ORG/REPO; ".." and "--" would mean something else in a folder's name."""
    return _REPO.fullmatch(text) is not None and ".." not in text and "--" not in text


def endpoint(environ: Mapping[str, str] = os.environ) -> str:
    return (environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The hub's cache: the first variable that is set decides, in llama.cpp's order (common/hf-cache.cpp)."""
    for variable, below in (
        ("LLAMA_CACHE", ""),
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if environ.get(variable):
            return Path(environ[variable]).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def file_url(repo: str, name: str) -> str:
    return f"{endpoint()}/{repo}/resolve/main/{quote(name)}"


def choose(names: Collection[str], tag: str | None = None) -> list[str]:
    """The file that `tag` means and, if it is split, all its parts in order; [] if there is none.

    Without a tag Q4_K_M, then Q8_0, then the first model file. A tag matches, in any case, where "." or "-"
    follows; projectors, importance matrices and draft heads are never meant.
    """
    models = choose_models(names)
    for wanted in (tag,) if tag else PREFERRED_TAGS:
        # A whole word first: "F16" is also the end of "BF16".
        for before in (r"(?<![a-z0-9])", ""):
            pattern = re.compile(before + re.escape(wanted) + "[.-]", re.IGNORECASE)
            for name in models:
                if pattern.search(name):
                    return _with_siblings(name, names)
    return _with_siblings(models[0], names) if models and not tag else []


def choose_models(names: Collection[str]) -> list[str]:
    """Names that can be models, sorted, split ones by their first part."""
    return sorted(name for name in names if is_model_file_name(name) and _part_of(name)[1] == 1)


def choose_named(names: Collection[str], tag: str | None, file: str | None) -> list[str]:
    """All parts of `file` if one is named and there, else as `choose`."""
    if file is None:
        return choose(names, tag)
    return _with_siblings(file, names) if file in names else []


def is_complete(chosen: Sequence[str]) -> bool:
    return len(chosen) == _part_of(chosen[0])[2]


def _part_of(name: str) -> tuple[str, int, int]:
    """Prefix, number and count; (name, 1, 1) for a file that is whole."""
    match = SPLIT_NAME.match(name)
    return (match["prefix"], int(match["index"]), int(match["count"])) if match else (name, 1, 1)


def _with_siblings(name: str, names: Collection[str]) -> list[str]:
    prefix, _, count = _part_of(name)
    if count == 1:
        return [name]
    return sorted(other for other in names if _part_of(other)[0] == prefix and _part_of(other)[2] == count)


def cached_files(repo: str, environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """GGUF files of `repo` that are in the cache, by their name in the repository."""
    return cached_files_in(cache_dir(environ) / f"models--{repo.replace('/', '--')}")


def cached_files_in(repo_folder: Path) -> dict[str, Path]:
    """The same for one repository's folder; where snapshots differ, the newest counts."""
    found: dict[str, Path] = {}
    try:
        snapshots = sorted(
            (repo_folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for snapshot in snapshots:
            for path in sorted(snapshot.rglob("*.gguf")):
                # A pointer whose blob is gone, or still being written, is no model.
                if path.is_file():
                    found.setdefault(path.relative_to(snapshot).as_posix(), path)
    except OSError:
        return found
    return found


def cached_model(repo: str, tag: str | None, file: str | None = None) -> Path | None:
    """The model in the cache that this reference means, if all its parts are there and in one snapshot."""
    files = cached_files(repo)
    chosen = choose_named(files, tag, file)
    if not chosen or not is_complete(chosen):
        return None
    first = files[chosen[0]]
    return first if all(files[other].parent == first.parent for other in chosen) else None


def token() -> str | None:
    """The user's access token: HF_TOKEN, or what the hub's own login has stored; None if there is none."""
    from huggingface_hub import get_token

    return get_token()


def list_files(repo: str) -> tuple[HubFile, ...]:
    """All files of a repository. ModelNotFoundError if there is none, DownloadError if the hub is away."""
    info = _api_info(repo)
    return tuple(
        HubFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or []
    )


def _api_info(repo: str) -> Any:
    check_url(endpoint(), first=endpoint())
    import httpx2
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    hooks = get_session().event_hooks["request"]
    if _guard not in hooks:
        hooks.append(_guard)
    try:
        return HfApi(endpoint=endpoint()).model_info(repo, files_metadata=True, timeout=API_TIMEOUT_S)
    except GatedRepoError as error:
        raise _gated(repo) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"There is no repository {repo} on {endpoint()}, or it is private.",
            "Check the spelling; for a private one set HF_TOKEN.",
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        raise DownloadError(
            f"The hub at {endpoint()} cannot be reached: {_first_line(error)}.",
            "Check the connection. Models that are here already also work with --offline.",
        ) from error


def _guard(request: httpx2.Request) -> None:
    """Run before each request of the hub's client, redirects too: none may lead into a private network."""
    check_url(str(request.url), first=endpoint())


def _gated(repo: str) -> DownloadError:
    return DownloadError(
        f"{repo} is gated: its licence must be accepted first.",
        f"Accept it at {endpoint()}/{repo}, then set HF_TOKEN to a token of that account.",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def fetch(repo: str, files: Sequence[HubFile], report: Report = no_report) -> Path:
    """Download `files` into the hub's cache, sizes and hashes checked; the path of the first.

    DownloadError if that fails. What another program has downloaded already is not fetched again.
    """
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if file.name not in cached_files(repo)]
    check_space(folder, sum(file.n_bytes or 0 for file in missing))
    paths = [_fetch_one(repo, file, folder, report) for file in files]
    return paths[0]


def _fetch_one(repo: str, file: HubFile, folder: Path, report: Report) -> Path:
    inside(folder, file.name)
    meter = Meter(file.name.rsplit("/", 1)[-1], report)
    meter.begin("connect", file.n_bytes)
    import httpx2
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, XetDownloadError

    try:
        got = hf_hub_download(
            repo, file.name, cache_dir=folder, endpoint=endpoint(), tqdm_class=_bar_class(meter)
        )
    except GatedRepoError as error:
        raise _gated(repo) from error
    except EntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo} has no file {file.name}.", "Its publisher may have renamed it."
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, XetDownloadError, OSError, ValueError) as error:
        raise DownloadError(
            f"The download of {file.name} broke off: {_first_line(error)}.",
            "Pull again: it goes on where it stopped.",
        ) from error
    path = Path(got)
    _verify(path, file, meter)
    return path


def _verify(path: Path, file: HubFile, meter: Meter) -> None:
    found_bytes = path.stat().st_size
    good = file.n_bytes in (None, found_bytes)
    if good and file.sha256 is not None:
        meter.begin("verify", found_bytes)
        good = file_sha256(path, meter) == file.sha256
    if not good:
        remove_cached(path)
        raise DownloadError(
            f"{file.name} came damaged: size or hash is wrong.", "It was deleted: pull it again."
        )


def remove_cached(path: Path) -> None:
    """Delete a file of the cache: the pointer, and the blob behind it if nothing else points there."""
    blob = path.resolve()
    path.unlink(missing_ok=True)
    repo = next((parent for parent in path.parents if parent.name.startswith("models--")), None)
    if repo is None or not blob.is_relative_to(repo.resolve()):
        return
    pointers = (other for other in (repo / "snapshots").rglob("*") if other.is_symlink())
    if not any(other.resolve() == blob for other in pointers):
        blob.unlink(missing_ok=True)


def _bar_class(meter: Meter) -> Any:
    """What the hub's library takes for a progress bar: it feeds the meter and draws nothing."""

    class Bar:
        def __init__(self, *args: Any, total: int | None = None, initial: int = 0, **kwargs: Any) -> None:
            self.total = total
            self.n = initial
            meter.begin("download", total, initial)

        def update(self, n: float | None = 1) -> None:
            meter.add(int(n or 0))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *exc: object) -> None:
            self.close()

        def update_transfer(self, n: float | None = 1) -> None:
            # Its mere presence keeps the library from opening a second bar for the same bytes.
            return

        def close(self) -> None:
            return

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    return Bar
