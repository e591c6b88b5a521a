"""Install llama-cpp-python into the Python that runs this: a prebuilt wheel where one can be had, else a
build.

    python edgeserve/install_runtime.py --backend cpu|metal|cuda|vulkan|rocm|native

Runs before anything is installed, so it needs the standard library only. Owns the compiler flags: a plain
native build on a processor that reports AMX dies with SIGILL where the kernel or hypervisor does not let it
be used, so AMX is left out, and AVX-512 and VNNI stay in. `native` skips the prebuilt wheel, whose code is
made for older CPUs.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

INDEX = "https://abetlen.github.io/llama-cpp-python/whl"
CUDA_WHEELS = ("121", "122", "123", "124", "125", "130", "132")
BUILD_ARGS = {
    "cuda": "-DGGML_CUDA=on",
    "vulkan": "-DGGML_VULKAN=on",
    "rocm": "-DGGML_HIP=on",
    "metal": "-DGGML_METAL=on",
}
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")


def requirement() -> str:
    """The supported range, from the one place that states it: the checkout's or the package's metadata."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    stated: list[str]
    if project.is_file():
        stated = re.findall(r'"(llama-cpp-python[^"]+)"', project.read_text(encoding="utf-8"))
    else:
        stated = [
            name for name in metadata.requires("edgeserve") or () if name.startswith("llama-cpp-python")
        ]
    return stated[0]


def installed() -> bool:
    """Whether a release within the range is there already."""
    code = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        return False
    low, high = re.findall(r"[\d.]+", requirement())
    version = _numbers(result.stdout.strip())
    return _numbers(low) <= version < _numbers(high)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def wheel_index(backend: str) -> str | None:
    """Address of the prebuilt wheels for a backend; None when it has none for this machine."""
    if backend == "native":
        return None
    if backend == "cpu":
        is_apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        return f"{INDEX}/{'metal' if is_apple else 'cpu'}"
    if backend == "cuda":
        version = cuda_version()
        return f"{INDEX}/cu{version}" if version else None
    return f"{INDEX}/{'rocm72' if backend == 'rocm' else backend}"


def cuda_version() -> str | None:
    """The newest wheel that the NVIDIA driver supports, such as "124"; None without a driver."""
    try:
        text = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    if not found:
        return None
    supported = [wheel for wheel in CUDA_WHEELS if int(wheel) <= int(found.group(1) + found.group(2))]
    return supported[-1] if supported else None


def build_environment(backend: str) -> dict[str, str]:
    """Environment for a build from source."""
    env = dict(os.environ)
    if platform.machine().lower() in ("x86_64", "amd64") and os.name != "nt":
        for name in ("CFLAGS", "CXXFLAGS"):
            env[name] = f"{env.get(name, '')} {NO_AMX}".strip()
    if backend in BUILD_ARGS:
        env["CMAKE_ARGS"] = f"{env.get('CMAKE_ARGS', '')} {BUILD_ARGS[backend]}".strip()
    return env


def install_wheel(index: str) -> bool:
    """Try the prebuilt wheel; a machine that does not reach the index finds out within seconds."""
    say(f"Looking for a prebuilt llama-cpp-python at {index}.")
    command = [
        *pip("install", "--quiet", "--timeout", "10", "--retries", "0"),
        *("--only-binary", "llama-cpp-python", "--extra-index-url", index, requirement()),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode == 0


def build(backend: str) -> int:
    """Compile from source (or take the wheel that an earlier build left in pip's cache)."""
    say("No prebuilt wheel here: building llama-cpp-python from source, once (8 minutes on two cores).")
    command = [*pip("install", "--verbose"), requirement()]
    with subprocess.Popen(
        command, env=build_environment(backend), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        tail = show_progress(process.stdout)
    if process.returncode:
        sys.stderr.write("".join(tail))
        say(
            "The build failed: it needs a C and C++ compiler. Debian, Ubuntu: apt-get install build-essential"
        )
    return process.returncode


def show_progress(lines: Iterable[str]) -> list[str]:
    """Turn the compiler's step counts into one line of progress; returns the last lines for an error."""
    tail: list[str] = []
    start, shown = time.monotonic(), -1
    for line in lines:
        tail = [*tail[-40:], line]
        found = _NINJA_STEP.search(line)
        if not found:
            continue
        done, total = int(found.group(1)), int(found.group(2))
        percent = 100 * done // total
        if percent == shown or (not sys.stderr.isatty() and percent % 20):
            continue
        shown = percent
        left_s = (time.monotonic() - start) * (total - done) / max(done, 1)
        say(f"compiling {done} of {total} files, {left_s / 60:.0f} min left", live=True)
    if sys.stderr.isatty() and shown >= 0:
        sys.stderr.write("\n")
    return tail


def say(text: str, live: bool = False) -> None:
    """Progress goes to standard error; on a terminal a live line replaces the one before."""
    if live and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
    else:
        sys.stderr.write(text + "\n")
    sys.stderr.flush()


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *arguments]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "native", *BUILD_ARGS))
    parser.add_argument(
        "--force", action="store_true", help="reinstall although a supported release is there"
    )
    options = parser.parse_args()
    if installed() and not options.force:
        return 0
    index = wheel_index(options.backend)
    if index and install_wheel(index):
        return 0
    return build(options.backend)


if __name__ == "__main__":
    sys.exit(main())
