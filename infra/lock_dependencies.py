"""Pin all dependencies in `requirements/constraints.txt`, those of the documentation in `docs.txt`.

Run as `make lock`: installs the requirements of the two `pyproject.toml` files into a new virtual
environment and writes the versions that pip chose. `make lock KEEP=1` starts from the current pins,
so that adding one dependency does not change the others.

`image.txt` and `image-build.txt` list the wheels of the image without torch and of its build, with
hashes. `make lock-check` asks the package index again and reports each hash that is missing, wrong
or left over.

No file names a package index: indexes belong to the machine's pip settings. The first two files
hold no hashes: `pip --require-hashes` rejects editable packages, they serve every platform, and
indexes differ in files (`torch` for CPUs is not the `torch` of PyPI).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
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

IMAGE_HEADER = """\
# Wheels of the image that infra/images/Dockerfile builds, for CPython 3.11 on Linux, x86_64 and
# aarch64. Written by `make lock`; do not edit by hand.
"""
IMAGE_LOCK = ROOT / "requirements" / "image.txt"
IMAGE_BUILD_LOCK = ROOT / "requirements" / "image-build.txt"
IMAGE_PYTHON = "3.11"
# redis needs it before Python 3.11.3, and Debian 12 has 3.11.2. pip asks only this Python.
IMAGE_PYTHON_NEEDS = ["async-timeout>=4.0.3"]
LINUX = {  # of Debian 12, Ubuntu 22.04 and later
    arch: [f"manylinux_2_{minor}_{arch}" for minor in range(35, 4, -1)]
    + [f"manylinux2014_{arch}", f"manylinux2010_{arch}", f"manylinux1_{arch}"]
    for arch in ("x86_64", "aarch64")
}
Hashes = Mapping[str, frozenset[str]]  # SHA-256 of the wheels of each `name==version`


def image_requirements() -> dict[Path, list[str]]:
    """Return what the image without torch installs, and what its build does, by lock file."""
    weir = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = weir["project"]["optional-dependencies"]
    needed = [*weir["project"]["dependencies"], *extras["otel"], *extras["remote"]]
    return {
        IMAGE_LOCK: [
            *(each for each in needed if not each.startswith(("torch", "weir-client"))),
            *IMAGE_PYTHON_NEEDS,
        ],
        IMAGE_BUILD_LOCK: [*weir["build-system"]["requires"], *weir["dependency-groups"]["image"]],
    }


def wheels(venv: Path, constraints: Sequence[str], requirements: Sequence[str]) -> Hashes:
    """Return the wheels that pip chooses for each machine, without installing them.

    Raises: SystemExit with pip's output if it finds no wheels for the constraints.
    """
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory(prefix="weir-lock-") as scratch:
        pinned = Path(scratch) / "constraints.txt"
        pinned.write_text("\n".join(constraints))
        for tags in LINUX.values():
            done = subprocess.run(
                [
                    *(str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"),
                    *("--dry-run", "--ignore-installed", "--report", "-", "--target", scratch),
                    *("--only-binary", ":all:", "--python-version", IMAGE_PYTHON),
                    *(f"--platform={tag}" for tag in tags),
                    *("-c", str(pinned), *requirements),
                ],
                text=True,
                capture_output=True,
            )
            if done.returncode != 0:
                raise SystemExit(f"{done.stderr}pip failed with status {done.returncode}")
            for each in json.loads(done.stdout)["install"]:
                pin = "{name}=={version}".format_map(each["metadata"])
                digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
                found.setdefault(pin, set()).add(digest)
    return {pin: frozenset(found[pin]) for pin in sorted(found, key=str.lower)}


def write_hashes(locked: Hashes) -> str:
    """Return the text of a lock file with hashes, which `pip --require-hashes` reads."""
    lines = (
        " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(digests))])
        for pin, digests in locked.items()
    )
    return IMAGE_HEADER + "\n".join(lines) + "\n"


def read_hashes(text: str) -> Hashes:
    """Return the hashes of a lock file. Raises: ValueError for a line of another form."""
    locked: dict[str, frozenset[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        pin, *options = line.split()
        digests = [re.fullmatch(r"--hash=sha256:([0-9a-f]{64})", option) for option in options]
        if not re.fullmatch(r"[\w.-]+==\S+", pin) or not all(digests):
            raise ValueError(f"not a pinned package with SHA-256 hashes: {line}")
        locked[pin] = frozenset(digest[1] for digest in digests if digest)
    return locked


def differences(locked: Hashes, offered: Hashes) -> list[str]:
    """Return one line for each package and hash in which a lock differs from the index."""
    lines = [f"{pin} is not locked" for pin in offered.keys() - locked.keys()]
    lines += [f"{pin} is locked, but not needed" for pin in locked.keys() - offered.keys()]
    for pin in locked.keys() & offered.keys():
        lines += [f"{pin} lacks sha256:{each}" for each in offered[pin] - locked[pin]]
        lines += [f"{pin} has no wheel with sha256:{each}" for each in locked[pin] - offered[pin]]
    return sorted(lines)


def check(venv: Path) -> list[str]:
    """Ask the index for the locked versions; return the differences from the lock files."""
    found: list[str] = []
    for lock, requirements in image_requirements().items():
        locked = read_hashes(lock.read_text())
        constraints = [*locked, *(lock_pins() if lock == IMAGE_LOCK else [])]
        offered = wheels(venv, constraints, requirements)
        found += [f"{lock.relative_to(ROOT)}: {each}" for each in differences(locked, offered)]
    return found


def lock_images(venv: Path, keep: bool) -> None:
    """Write the lock files of the image, whose versions are those of `constraints.txt`."""
    for lock, requirements in image_requirements().items():
        constraints = lock_pins() if lock == IMAGE_LOCK else []
        if keep and lock.exists():
            names = {pin.partition("==")[0] for pin in constraints}
            kept = read_hashes(lock.read_text())
            constraints += [pin for pin in kept if pin.partition("==")[0] not in names]
        locked = wheels(venv, constraints, requirements)
        lock.write_text(write_hashes(locked))
        print(f"{lock.relative_to(ROOT)}: {len(locked)} packages with hashes", file=sys.stderr)


def lock_pins() -> list[str]:
    """Return the pins of `constraints.txt`."""
    return [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]


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


def resolve(venv: Path, keep: bool) -> tuple[list[str], list[str]]:
    """Install the requirements; return the pins for run time and development, then for docs."""
    kept = ["-c", str(LOCK)] if keep else []
    install(venv, "part 2 of 3, Weir and its tools", *kept, *RUN_TIME, *DEVELOPMENT)
    development = pins(freeze(venv))
    chosen = venv / "chosen.txt"
    chosen.write_text("\n".join(development))
    kept = ["-c", str(DOCS_LOCK)] if keep else []
    install(venv, "part 3 of 3, the documentation", "-c", str(chosen), *kept, *DOCUMENTATION)
    return development, [pin for pin in pins(freeze(venv)) if pin not in development]


def freeze(venv: Path) -> str:
    """Run `pip freeze` and return its output."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "freeze", "--exclude-editable"]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def main() -> int:
    """Write or check the lock files and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pip", required=True, metavar="VERSION", help="the pip to install with")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keep", action="store_true", help="keep the current pins where possible")
    what.add_argument("--check", action="store_true", help="compare the hashes with the index")
    options = parser.parse_args()
    if options.check:
        found = check(Path(sys.prefix))
        if found:
            print(*found, "run: make lock KEEP=1", sep="\n", file=sys.stderr)
        return 1 if found else 0
    with tempfile.TemporaryDirectory(prefix="weir-lock-") as scratch:
        venv = Path(scratch)
        create(venv)
        # A bundled pip may be too old to report its progress.
        install(venv, "part 1 of 3, pip", f"pip=={options.pip}", bar="off")
        for lock, lines in zip((LOCK, DOCS_LOCK), resolve(venv, options.keep), strict=True):
            lock.write_text(HEADER + "\n".join(lines) + "\n")
            print(f"{lock.relative_to(ROOT)}: {len(lines)} packages pinned", file=sys.stderr)
        lock_images(venv, options.keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
