"""Install Weir, editable and from pinned versions only, into a virtual environment of its own.

Run by `make setup` and `make setup-dev` with any installed Python, so it imports only the standard
library, and reports a Python that is too old. Package indexes are left to pip's settings, but for
one: without an NVIDIA GPU, PyTorch's own index has the build without CUDA, a tenth of the size.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - older ones do run this file, and get the message
    sys.exit(
        "Weir needs Python 3.11 or later; {} is {}.{}.\nName another one, for example: make"
        " PYTHON=python3.12 demo".format(sys.executable, *sys.version_info[:2])
    )

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "constraints.txt"
DOCS_LOCK = ROOT / "requirements" / "docs.txt"  # pins of the documentation
RUN_TIME = ("-e", "sdk/python", "-e", ".")
DEVELOPMENT = ("--group", "dev")
DOCUMENTATION = ("--group", "docs")
# PyTorch's documented index of builds without CUDA. Only torch itself is taken from there.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_CPU_TIMEOUT_S = 10  # seconds: without a route there, set-up goes on soon
STARTED_S = time.monotonic()  # all parts count from here, so that none looks like a restart
PROGRESS_S = 5.0  # seconds between two lines of progress; on a terminal it is one line, each second
MB = 1_000_000
WHEEL = re.compile(r"(?:Downloading|Using cached|Processing) (?:\S*/)?([\w.]+-\d[\w.+]*)-\S+\.whl")
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def create(venv: Path) -> None:
    """Create a virtual environment at `venv` unless a working one exists; replace a broken one.

    Raises: SystemExit if the path is something else, or if this Python cannot create one.
    """
    python = venv / "bin" / "python"
    if (
        python.exists()
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    ):
        return
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise SystemExit(
            f"{venv} is not a virtual environment: move it away, or choose another path with make"
            " VENV=..."
        )
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)]).returncode != 0:
        raise SystemExit(
            "This Python cannot create virtual environments. On Debian and Ubuntu: apt install"
            " python3-venv"
        )


class Progress:
    """Progress of an installation, read from the lines that pip prints."""

    def __init__(self, packages: Path, what: str) -> None:
        """`what` names the part of the set-up, since each part counts its own packages."""
        self._packages = packages  # the directory that the packages are unpacked into
        self._what = what
        self._found_before = self._unpacked()
        self._collected = 0
        self._wanted = 0
        self._file = ""
        self._file_bytes = (0, 0)
        self._earlier_bytes = 0

    def read(self, line: str) -> None:
        """Take account of a line that pip has printed."""
        if found := RAW_PROGRESS.match(line):
            self._file_bytes = (int(found[1]), int(found[2]))
        elif found := WHEEL.match(line):
            self._earlier_bytes, self._file_bytes = self.downloaded_bytes, (0, 0)
            self._file = found[1]
        elif line.startswith("Collecting"):
            self._collected += 1
            self._file = ""
        elif line.startswith("Installing collected packages: "):
            self._wanted = line.count(",") + 1

    @property
    def downloaded_bytes(self) -> int:
        return self._earlier_bytes + self._file_bytes[0]

    def count_earlier(self, byte_count: int) -> None:
        """Add what was downloaded before this installation."""
        self._earlier_bytes += byte_count

    @property
    def installed_count(self) -> int:
        return self._wanted

    def __str__(self) -> str:
        return f"{self._what}: {self._state()}"

    def _state(self) -> str:
        if self._wanted:
            done = min(self._unpacked() - self._found_before, self._wanted)
            return f"unpacking {max(done, 0)} of {self._wanted} packages"
        if self._file:
            received, size = (count / MB for count in self._file_bytes)
            part = f" {received:.0f} of {size:.0f} MB" if size >= 1 else ""
            total = self.downloaded_bytes / MB
            return f"downloading {self._file}{part}; {total:.0f} MB so far"
        found = f", {self._collected} found" if self._collected else ""
        return f"looking for packages{found}"

    def _unpacked(self) -> int:
        return sum(1 for _ in self._packages.glob("lib/python*/site-packages/*.dist-info"))


def pip(
    venv: Path,
    *arguments: str,
    progress: Progress,
    settings: Mapping[str, str] | None = None,
    bar: str = "raw",
) -> tuple[int, str]:
    """Run `pip install` in `venv`, reporting to `progress`. Return its status and output."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    output: list[str] = []
    with subprocess.Popen(
        # Compiling all modules takes longer than the rest; Python compiles those it imports.
        [*command, "--no-input", "install", "--no-compile", f"--progress-bar={bar}", *arguments],
        cwd=ROOT,
        env={**os.environ, **(settings or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            progress.read(line.strip())
            if not RAW_PROGRESS.match(line):
                output.append(line)
    return process.returncode, "".join(output)


def install(venv: Path, part: str, *what: str, bar: str = "raw") -> Progress:
    """Run `pip install` in `venv`, and say every few seconds what it is doing in this part.

    Raises: SystemExit with pip's output if it fails.
    """
    progress = Progress(venv, part)
    with reported(progress):
        status, output = pip(venv, *what, progress=progress, bar=bar)
    if status != 0:
        raise SystemExit(f"{output}pip failed with status {status}")
    return progress


def install_torch_for_cpus(venv: Path) -> int:
    """Without an NVIDIA GPU, install torch without CUDA if pip finds it; return its bytes.

    Asks the indexes of pip's settings first. PyTorch's index is asked only if the settings name no
    index of their own: that is then where packages come from.
    """
    if sys.platform != "linux" or has_nvidia_gpu():
        return 0
    (pin,) = re.findall(r"^torch==\S+$", LOCK.read_text(), re.MULTILINE)
    sources: list[dict[str, str]] = [{}]
    if not names_an_index(venv):
        seconds = str(TORCH_CPU_TIMEOUT_S)
        index = {"PIP_INDEX_URL": TORCH_CPU_INDEX, "PIP_RETRIES": "0"}
        sources.append(index | {"PIP_DEFAULT_TIMEOUT": seconds, "PIP_TIMEOUT": seconds})
    for settings in sources:
        progress = Progress(venv, "part 2 of 3, PyTorch")
        with reported(progress):
            status, _ = pip(venv, "--no-deps", f"{pin}+cpu", progress=progress, settings=settings)
        if status == 0:
            return progress.downloaded_bytes
    print(
        "No build of torch for CPUs was found, so pip takes the one of its index: on Linux, that is"
        " CUDA's too, several GB.\nTo avoid it, stop now and set PIP_EXTRA_INDEX_URL to an index"
        " that has PyTorch's CPU builds.",
        flush=True,
    )
    return 0


def has_nvidia_gpu() -> bool:
    """Return whether this machine seems to have a GPU of NVIDIA, or WSL passes one on."""
    signs = ("/dev/nvidiactl", "/dev/dxg")
    return shutil.which("nvidia-smi") is not None or any(map(os.path.exists, signs))


def names_an_index(venv: Path) -> bool:
    """Return whether pip's settings replace or switch off the default index of packages."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return re.search(r"\.(index-url|no-index)=", listed.stdout) is not None


@contextmanager
def reported(doing: object) -> Iterator[None]:
    """Print `str(doing)` every few seconds until the block ends, with the time since the start.

    On a terminal it is one line that changes; elsewhere a line is added every few seconds.
    """
    is_terminal = sys.stdout.isatty()
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(1.0 if is_terminal else PROGRESS_S):
            line = f"{time.monotonic() - STARTED_S:5.0f} s  {doing}"
            print(f"\r\033[K{line[:79]}" if is_terminal else line, end="", flush=True)
            if not is_terminal:
                print(flush=True)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
        if is_terminal:
            print("\r\033[K", end="", flush=True)


def main() -> int:
    """Install Weir and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--pip", required=True, metavar="VERSION", help="the pip to install with")
    parser.add_argument(
        "--dev", action="store_true", help="the test and check tools instead of Weir itself"
    )
    parser.add_argument(
        "--docs", action="store_true", help="what builds the documentation instead of Weir itself"
    )
    options = parser.parse_args()
    if options.docs:
        print(f"Installing what builds the documentation into {options.venv}.", flush=True)
        done = install(options.venv, "tools", "-c", str(LOCK), "-c", str(DOCS_LOCK), *DOCUMENTATION)
    elif options.dev:
        print(f"Installing the test and check tools into {options.venv}.", flush=True)
        done = install(options.venv, "tools", "-c", str(LOCK), *DEVELOPMENT)
    else:
        print(f"Installing Weir into {options.venv}. It downloads packages only once.", flush=True)
        done = install_weir(options.venv, options.pip)
    print(
        f"Installed {done.installed_count} packages, {done.downloaded_bytes / MB:.0f} MB of"
        f" downloads, in {time.monotonic() - STARTED_S:.0f} s.",
        flush=True,
    )
    return 0


def install_weir(venv: Path, pip_version: str) -> Progress:
    """Install Weir and its dependencies, and compile the native decoder at the same time."""
    build = [sys.executable, "-m", "inference.native.build", "--if-possible"]
    with subprocess.Popen(build, cwd=ROOT, stdout=subprocess.PIPE, text=True) as compiling:
        with reported("creating the virtual environment"):
            create(venv)
        # The pip that comes with an older Python does not know `raw`.
        install(venv, "part 1 of 3, pip", f"pip=={pip_version}", bar="off")
        torch_bytes = install_torch_for_cpus(venv)
        done = install(venv, "part 3 of 3, the rest", "-c", str(LOCK), *RUN_TIME)
        done.count_earlier(torch_bytes)
        # An upgrade from a server that owned it removes it.
        if not (venv / "bin" / "weir").exists():
            install(venv, "the command weir", "--force-reinstall", "--no-deps", "-e", "sdk/python")
        with reported("compiling the native decoder"):
            built, _ = compiling.communicate()
    if compiling.returncode != 0:
        raise SystemExit(f"{built}The native decoder cannot be compiled.")
    print(built, end="", flush=True)
    return done


if __name__ == "__main__":
    raise SystemExit(main())
