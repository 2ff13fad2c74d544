"""Build the packages of a release from the last commit: `make dist`.

    python -m infra.release                       build into dist
    python -m infra.release --out DIR             build into another directory
    python -m infra.release --version             print the version only

The tags are the only source of the version: `v0.2.0` on the commit is 0.2.0. The fifth commit after
it is 0.2.1.dev5, and before the first tag the version is 0.1.0.devN. The files of the repository
have the version 0.0.0; it is replaced in a copy of the commit, from which everything is built. So
packages have no file that is not committed, and the same commit gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.tags import platform_tags
from weir_cli.checkout import git, output, version

from inference.native.loader import PREBUILT, library_file

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
SDK = Path("sdk") / "typescript"
UNRELEASED = "0.0.0"  # the version in the repository's files
# Pattern of the version in each file of the repository that has one.
VERSIONED = {
    "pyproject.toml": r'(?:^version = "|"weir-client==)()"',
    "sdk/python/pyproject.toml": r'^version = "()"',
    "sdk/typescript/package.json": r'^  "version": "()"',
    "sdk/typescript/package-lock.json": r'^(?:  |      )"version": "()"',
    "sdk/typescript/src/connection.ts": r"weir-client-node/()\"",
}


def npm_version(python_version: str) -> str:
    """Return a version as npm writes it: 0.2.1-dev.5."""
    return python_version.replace(".dev", "-dev.")


def export(root: Path, directory: Path) -> None:
    """Write the files of the last commit into a directory, with its version and its time."""
    archive = subprocess.run(git(root, "archive", "HEAD"), check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="tar")
    directory.chmod(0o755)
    for path in directory.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    stamp(directory, version(root))


def stamp(directory: Path, version: str) -> None:
    """Replace the version in the files that have it. Raises: SystemExit if one does not."""
    for name, pattern in VERSIONED.items():
        path = directory / name
        new = npm_version(version) if name.startswith("sdk/typescript") else version
        found = re.compile(pattern.replace("()", f"({re.escape(UNRELEASED)})"), re.MULTILINE)
        text = path.read_text()
        matches = list(found.finditer(text))
        if not matches:
            raise SystemExit(f"{name} must have the version {UNRELEASED}: tags have the others")
        for match in reversed(matches):
            text = text[: match.start(1)] + new + text[match.end(1) :]
        path.write_text(text)


def build(root: Path, out: Path, *, native: Path = PREBUILT) -> list[Path]:
    """Build all packages of the last commit into `out`. Return their paths.

    The native decoder is copied from `native` if it is there, and compiled otherwise.
    """
    out.mkdir(parents=True, exist_ok=True)
    seconds = int(output(root, "log", "-1", "--format=%ct"))
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(seconds), "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory(prefix="weir-release-") as scratch:
        source = Path(scratch) / f"weir-{version(root)}"
        source.mkdir()
        export(root, source)
        pack(source, out / f"{source.name}.tar.gz", seconds)
        (source / SDK / "node_modules").symlink_to(ROOT / SDK / "node_modules")

        def run(*command: str | Path, cwd: Path = source) -> None:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                umask=0o022,  # modes of files are in the packages
            )
            if done.returncode != 0:
                raise SystemExit(f"{done.stdout}\n{command[0]} failed: {done.returncode}")

        wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out)
        if (library := native / library_file()).exists():
            (source / "inference" / "native" / "prebuilt").mkdir()
            shutil.copy2(library, source / "inference" / "native" / "prebuilt")
        run(sys.executable, "-m", "inference.native.build")  # returns at once if it is built
        run(*wheel, "sdk/python")
        # The server's wheel has machine code for this system, but for any Python.
        platform = next(each for each in platform_tags() if not each.startswith("linux_"))
        run(*wheel, f"--config-settings=--build-option=--plat-name={platform}", ".")
        run(sys.executable, "-c", "from infra.typescript_sdk import rebuild; rebuild()")
        run("npm", "pack", "--silent", "--pack-destination", out, cwd=source / SDK)
    packages = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in packages)
    (out / "SHA256SUMS").write_text("".join(sums))
    return packages


def pack(source: Path, archive: Path, seconds: int) -> None:
    """Write a directory as a compressed archive that depends on its content only."""

    def neutral(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
        return member

    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as files,
    ):
        files.add(source, source.name, filter=neutral)


def main() -> int:
    """Build the packages and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DIST)
    parser.add_argument("--version", action="store_true")
    options = parser.parse_args()
    if options.version:
        print(version(ROOT))
        return 0
    if output(ROOT, "status", "--porcelain"):
        print("Changes that are not committed are not in the packages.", file=sys.stderr)
    shutil.rmtree(options.out, ignore_errors=True)
    for package in build(ROOT, options.out.resolve()):
        print(package.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
