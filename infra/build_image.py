"""Build the image without torch from its Dockerfile with Buildah, as root and without a registry.

Run as `python3 -m infra.build_image DIRECTORY`; it needs no virtual environment. The base is
Debian's own Python in a file system that debootstrap makes, where the Dockerfile names an image of
the same Debian. pip's configuration of this machine applies in the build. Exits with status 75 if
packages could not be downloaded.

Debian's packages are compared with `infra/images/debian-ARCHITECTURE.txt` before one is installed.
`python3 -m infra.build_image --record` writes that file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "infra" / "images" / "Dockerfile"
RELEASE = "bookworm"  # of the base image that the Dockerfile names
DEBOOTSTRAP = (
    *("debootstrap", "--variant=minbase"),
    "--include=python3,python3-venv,python3-pip,ca-certificates",
)
RECORD_HEADER = (
    "# SHA-256 of the packages of the base that infra/build_image.py makes. Do not edit by hand;"
    " run:\n# python3 -m infra.build_image --record\n"
)
BASE, IMAGE = "localhost/base", "localhost/weir-api"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
PROGRAMS = ("debootstrap", "buildah")
BUILD_MAX_S = 800
TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h
# Of debootstrap, apt, pip and npm, when a server is slow or cannot be reached.
NETWORK = re.compile(
    r"Couldn't download|Failed getting release|Failed to fetch|Temporary failure|Connection failed"
    r"|Could not connect|timed out|ReadTimeout|ConnectTimeout|ConnectionError|ConnectionReset"
    r"|Max retries exceeded|NewConnectionError|IncompleteRead|Retrying \(Retry|ETIMEDOUT|ECONNRESET"
)


class BuildFailed(Exception):
    """A step of the build failed. The message has the end of its output."""


class DownloadFailed(BuildFailed):
    """Packages could not be downloaded, or not in time."""


@dataclass(frozen=True)
class Images:
    """Buildah with its own directory."""

    directory: Path

    def command(self, *arguments: str) -> list[str]:
        """Return a command of Buildah."""
        root, running = self.directory / "root", self.directory / "run"
        locations = ("--root", str(root), "--runroot", str(running))
        return ["buildah", *locations, "--storage-driver", "vfs", *arguments]

    def run(self, *arguments: str) -> str:
        """Run a command of Buildah and return its output. Raises: BuildFailed."""
        return run(self.command(*arguments)).strip()


def run(command: Sequence[str]) -> str:
    """Run a command and return its standard output. Raises: BuildFailed, DownloadFailed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_MAX_S)
    except subprocess.TimeoutExpired:
        raise DownloadFailed(f"{command[0]} took longer than {BUILD_MAX_S} s") from None
    if done.returncode:
        output = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        kind = DownloadFailed if NETWORK.search(output) else BuildFailed
        raise kind(f"{' '.join(command)}: status {done.returncode}\n{output}")
    return done.stdout


def build(directory: Path) -> Images:
    """Build the image in a new directory; print how long each part took. Raises: BuildFailed."""
    images = Images(directory)
    began_at = time.monotonic()
    make_base(images)
    made_at = time.monotonic()
    mounts = [part for path in local_paths() for part in ("--volume", f"{path}:{path}:ro")]
    images.run(
        *("bud", "--pull-never", "--layers=false", "--isolation", "chroot", *mounts),
        *("--build-arg", f"PYTHON_IMAGE={BASE}", "--target", "api", "--tag", IMAGE),
        *("--file", str(DOCKERFILE), str(ROOT)),
    )
    print(
        f"base: {made_at - began_at:.0f} s; image: {time.monotonic() - made_at:.0f} s",
        images.run("images", "--format", "{{.Name}} {{.Size}}").replace("\n", ", "),
        sep="; ",
    )
    return images


def make_base(images: Images) -> None:
    """Make the base image: Debian with its Python, named as in the image that it stands for."""
    tree = images.directory / "base"
    compare(record(), downloaded(tree))
    run([*DEBOOTSTRAP, RELEASE, str(tree)])
    (tree / "usr/bin/python").symlink_to("python3")
    next(tree.glob("usr/lib/python3*/EXTERNALLY-MANAGED")).unlink()
    shutil.copy(AUTHORITIES, tree / AUTHORITIES.relative_to("/"))
    lines = "".join(f"{name} = {value}\n" for name, value in pip_settings().items())
    (tree / "etc/pip.conf").write_text(f"[global]\n{lines}")
    container = images.run("from", "scratch")
    images.run("add", "--quiet", container, str(tree), "/")
    images.run("config", "--env", f"PATH={PATH}", container)
    images.run("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(tree)


def downloaded(tree: Path) -> dict[str, str]:
    """Download the packages of the base into a new directory; return their SHA-256 by file name."""
    tree.mkdir(parents=True)
    run([*DEBOOTSTRAP, "--download-only", RELEASE, str(tree)])
    files = sorted(tree.glob("var/cache/apt/archives/*.deb"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def record() -> Path:
    """Return the file that pins Debian's packages on this architecture."""
    architecture = run(["dpkg", "--print-architecture"]).strip()
    return DOCKERFILE.parent / f"debian-{architecture}.txt"


def compare(recorded: Path, found: Mapping[str, str]) -> None:
    """Raise BuildFailed unless the packages are those of the record, byte for byte."""
    lines = recorded.read_text().splitlines() if recorded.exists() else []
    wanted = {(line[66:], line[:64]) for line in lines if not line.startswith("#")}
    differing = sorted(
        [f"not recorded: {digest}  {name}" for name, digest in found.items() - wanted]
        + [f"recorded: {digest}  {name}" for name, digest in wanted - found.items()]
    )
    if differing:
        raise BuildFailed(
            f"Debian {RELEASE} has other packages than {recorded.relative_to(ROOT)}. Review them,"
            " then run: python3 -m infra.build_image --record\n" + "\n".join(differing)
        )


def write_record() -> None:
    """Record the packages that Debian has now."""
    with tempfile.TemporaryDirectory(prefix="weir-base-") as scratch:
        found = downloaded(Path(scratch) / "base")
    lines = (f"{digest}  {name}\n" for name, digest in found.items())
    record().write_text(RECORD_HEADER + "".join(lines))


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine: where packages come from."""
    listed = run([sys.executable, "-m", "pip", "config", "list"])
    found = re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    sources = ("index-url", "extra-index-url", "find-links", "default-timeout")
    return {name: value for name, value in found if name in sources}


def local_paths() -> list[str]:
    """Return directories of this machine that pip's settings name, an index with its files."""
    words = " ".join(pip_settings().values()).replace("\\n", " ").split()
    urls = [urlsplit(word) for word in words]
    paths = [Path(url.path) for url in urls if url.scheme in ("", "file")]
    return sorted(
        {
            str(path.parent if path.name == "simple" else path)
            for path in paths
            if path.is_absolute() and path.is_dir()
        }
    )


def missing() -> str:
    """Return what this machine lacks for a build, empty if nothing."""
    programs = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return ", ".join(programs + (["root"] if os.geteuid() else []))


def main(arguments: Sequence[str]) -> int:
    """Build the image in the directory that is named. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("directory", type=Path, nargs="?", help="a new directory for the images")
    what.add_argument("--record", action="store_true", help="pin the packages Debian has now")
    options = parser.parse_args(arguments)
    if lacking := missing():
        print(f"the image cannot be built here, which lacks: {lacking}", file=sys.stderr)
        return TEMPORARY_FAILURE
    try:
        if options.record:
            write_record()
        else:
            build(options.directory)
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return TEMPORARY_FAILURE if isinstance(failure, DownloadFailed) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
