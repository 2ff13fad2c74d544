"""Install Weir, editable and from pinned versions only, into a virtual environment of its own.

Run by `make setup` and `make setup-dev` with any installed Python, so it imports only the standard
library, and reports a Python that is too old. Package indexes are left to pip's settings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
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


def install(venv: Path, *what: str) -> None:
    """Run `pip install` in `venv`, with a progress line on a terminal and no output elsewhere.

    Raises: SystemExit with pip's output if it fails.
    """
    command = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
    ]
    output: list[str] = []
    count = 0
    with subprocess.Popen(
        [*command, "--progress-bar=off", *what],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            words = line.split()
            if words[:1] == ["Collecting"]:
                count += 1
                show(f"{count} packages, {words[1]}")
            elif line.startswith("Installing collected packages") and count:
                show(f"unpacking {count} packages")
    show("")
    if pip.returncode != 0:
        raise SystemExit("".join(output) + f"pip failed with status {pip.returncode}")


def show(doing: str) -> None:
    """Write `doing` over the progress line, if stdout is a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K  {doing[:70]}" if doing else "\r\033[K", end="", flush=True)


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
    started = time.monotonic()
    if options.docs:
        print(f"Installing what builds the documentation into {options.venv}.", flush=True)
        install(options.venv, "-c", str(LOCK), "-c", str(DOCS_LOCK), *DOCUMENTATION)
    elif options.dev:
        print(f"Installing the test and check tools into {options.venv}.", flush=True)
        install(options.venv, "-c", str(LOCK), *DEVELOPMENT)
    else:
        print(
            f"Installing Weir into {options.venv}, once; about a minute on a fast line.", flush=True
        )
        create(options.venv)
        install(options.venv, f"pip=={options.pip}")
        install(options.venv, "-c", str(LOCK), *RUN_TIME)
        # An upgrade from a server that owned it removes it.
        if not (options.venv / "bin" / "weir").exists():
            install(options.venv, "--force-reinstall", "--no-deps", "-e", "sdk/python")
    print(f"Installed in {time.monotonic() - started:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
