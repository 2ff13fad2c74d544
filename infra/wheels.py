"""Find which pinned packages of the server have no wheel for a platform: `python -m infra.wheels`.

Asks pip about each interpreter and platform, by a dry run that installs nothing and builds nothing,
and prints the table of docs/how-to/install.md. Needs the package index that pip is configured for.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from infra.install import LOCK
from infra.lock_dependencies import LINUX

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = {
    "Linux x86-64": LINUX["x86_64"],
    "Linux Arm": LINUX["aarch64"],
    "macOS Arm": ["macosx_14_0_arm64"],
    "macOS Intel": ["macosx_14_0_x86_64"],
}
MISSING = re.compile(r"(?:No matching distribution found for|Cannot install) ([\w.-]+)==")
TIMEOUT_S = 600.0


def pins() -> list[str]:
    """Return the pins of the packages that the server needs to run, with those that they need."""
    locked = {
        name(line): line for line in LOCK.read_text().splitlines() if re.match(r"[\w.-]+==", line)
    }
    found: dict[tuple[str, str], None] = {}
    wanted = [(each, "") for each in distribution("weir-server").requires or ()]
    while wanted:
        line, of_extra = wanted.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for extra in ("", *requirement.extras):
            if (key := (name(requirement.name), extra)) not in found:
                found[key] = None
                wanted += [(each, extra) for each in distribution(key[0]).requires or ()]
    return sorted({locked[each] for each, _ in found if each in locked})


def name(requirement: str) -> str:
    """Return the normal name of a package."""
    return re.sub(r"[-_.]+", "-", requirement.split("==")[0]).lower()


def missing(python: str, platforms: list[str], wanted: list[str]) -> Iterator[str]:
    """Yield the packages that have no wheel for an interpreter on a platform."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--only-binary=:all:", f"--python-version={python}"]
    command += ["--implementation=cp", *(f"--platform={each}" for each in platforms)]
    left = list(wanted)
    with tempfile.TemporaryDirectory(prefix="weir-wheels-") as target:
        while left:
            done = subprocess.run(
                [*command, f"--target={target}", *left],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                cwd=Path(target),
            )
            if done.returncode == 0:
                return
            found = MISSING.search(done.stderr)
            if found is None:
                raise SystemExit(done.stderr)
            yield found[1]
            left = [each for each in left if name(each) != name(found[1])]


def main() -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", choices=PYTHONS, action="append")
    options = parser.parse_args()
    wanted = pins()
    pythons = options.python or PYTHONS
    print(f"| {len(wanted)} packages | " + " | ".join(f"Python {each}" for each in pythons) + " |")
    print("|---|" + "---|" * len(pythons), flush=True)
    for platform, tags in PLATFORMS.items():
        cells = [", ".join(missing(each, tags, wanted)) or "all" for each in pythons]
        print(f"| {platform} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
