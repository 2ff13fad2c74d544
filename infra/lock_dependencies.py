"""Pin all dependencies in `requirements/constraints.txt`, those of the documentation in `docs.txt`.

Run as `make lock`: installs the requirements of the two `pyproject.toml` files into a new virtual
environment and writes the versions that pip chose. `make lock KEEP=1` starts from the current pins,
so that adding one dependency does not change the others.

The files hold names and versions, no package indexes: those belong to the machine's pip settings.
They hold no hashes: `pip --require-hashes` rejects editable packages and needs the hash of every
file of every platform, and indexes differ in files (`torch` for CPUs is other than `torch` of
PyPI). See docs/how-to/deploy.md for hashes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.install import (
    DEVELOPMENT,
    DOCS_LOCK,
    DOCUMENTATION,
    LOCK,
    ROOT,
    RUN_TIME,
    create,
    install,
)

HEADER = """\
# Dependencies of Weir, of its tools, and of its documentation, pinned. Written by `make lock`; do
# not edit by hand. Made on CPython 3.11 for Linux. Packages that only another platform needs, such
# as the CUDA parts of torch, are pinned by torch itself.
"""


def pins(freeze: str) -> list[str]:
    """Extract the `name==version` lines of `pip freeze` that hold on every machine.

    Skips editable packages, removes local versions such as `+cpu`: `==2.13.0` matches every build
    of 2.13.0. Raises: ValueError for packages from files or URLs, which have no version to pin.
    """
    kept: list[str] = []
    for line in freeze.splitlines():
        if not line.strip() or line.startswith(("#", "-e ")):
            continue
        if not re.fullmatch(r"[\w.-]+==[^\s@]+", line):
            raise ValueError(f"not a plain version: {line}")
        kept.append(re.sub(r"\+[\w.]+$", "", line))
    return sorted(kept, key=str.lower)


def resolve(pip_version: str, keep: bool) -> tuple[list[str], list[str]]:
    """Install the requirements; return the pins for run time and development, then for docs."""
    with tempfile.TemporaryDirectory(prefix="weir-lock-") as scratch:
        venv, chosen = Path(scratch), Path(scratch) / "chosen.txt"
        create(venv)
        # A bundled pip may be too old to report its progress.
        install(venv, "part 1 of 3, pip", f"pip=={pip_version}", bar="off")
        kept = ["-c", str(LOCK)] if keep else []
        install(venv, "part 2 of 3, Weir and its tools", *kept, *RUN_TIME, *DEVELOPMENT)
        development = pins(freeze(venv))
        chosen.write_text("\n".join(development))
        kept = ["-c", str(DOCS_LOCK)] if keep else []
        install(venv, "part 3 of 3, the documentation", "-c", str(chosen), *kept, *DOCUMENTATION)
        return development, [pin for pin in pins(freeze(venv)) if pin not in development]


def freeze(venv: Path) -> str:
    """Run `pip freeze` and return its output."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "freeze", "--exclude-editable"]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def main() -> int:
    """Write the lock files and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pip", required=True, metavar="VERSION", help="the pip to install with")
    parser.add_argument("--keep", action="store_true", help="keep the current pins where possible")
    options = parser.parse_args()
    for lock, lines in zip((LOCK, DOCS_LOCK), resolve(options.pip, options.keep), strict=True):
        lock.write_text(HEADER + "\n".join(lines) + "\n")
        print(f"{lock.relative_to(ROOT)}: {len(lines)} packages pinned", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
