"""Set up, build and check the page of the console: `console`, built into `api/console/static`.

    python -m infra.console_page --install    install pinned packages; without Node, only say so
    python -m infra.console_page --build      format, check and build
    python -m infra.console_page --check      the same without a change: is the page up to date

The built files are committed, so that a server can run where there is no Node. They depend only on
the source and the lock file, and `--check` compares them byte by byte.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infra import typescript_sdk
from infra.generate_proto import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "console"
BUILT = ROOT / "api" / "console" / "static"
COMPRESSED_BYTES_MAX = 300_000  # of all files together


class Outdated(Exception):
    """The page is not what its source builds, or is too large."""


def missing() -> str | None:
    """Find the reason why the page cannot be built here; None if it can."""
    return typescript_sdk.missing(SOURCE)


def run(program: str, *arguments: str | Path) -> None:
    """Run an installed program in the source. Raises: CalledProcessError."""
    subprocess.run([SOURCE / "node_modules" / ".bin" / program, *arguments], cwd=SOURCE, check=True)


def check_types() -> None:
    """Generate the types of the contract's messages and check the source with them."""
    generated = SOURCE / "src" / "gen"
    shutil.rmtree(generated, ignore_errors=True)
    generated.mkdir()
    plugin = SOURCE / "node_modules" / ".bin" / "protoc-gen-es"
    options = [
        f"--plugin=protoc-gen-es={plugin}",
        f"--es_out={generated}",
        "--es_opt=target=ts,json_types=true",
    ]
    protoc([*options, *typescript_sdk.CONTRACT, *typescript_sdk.ERRORS])
    run("tsc", "--project", ".")


def build(directory: Path) -> None:
    """Build the page into a directory, whose files are replaced."""
    run("vite", "build", "--logLevel", "warn", "--outDir", directory, "--emptyOutDir")


def build_tests(directory: Path) -> None:
    """Bundle the tests for Node into a directory, whose files are replaced."""
    config = ("--config", "vite.tests.config.ts")
    run("vite", "build", "--logLevel", "warn", *config, "--outDir", directory, "--emptyOutDir")


def files(directory: Path) -> dict[str, bytes]:
    """Read the files of a built page by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def compressed_bytes(page: dict[str, bytes]) -> int:
    """Return the size of the files, each compressed as the server sends it."""
    return sum(len(gzip.compress(content, mtime=0)) for content in page.values())


def check() -> None:
    """Check format, types, size and bytes. Raises: CalledProcessError, Outdated."""
    run("prettier", "--check", "--log-level", "warn", ".")
    check_types()
    with tempfile.TemporaryDirectory(prefix="weir-console-") as scratch:
        build(Path(scratch))
        compare(files(BUILT), files(Path(scratch)))


def compare(committed: dict[str, bytes], built: dict[str, bytes]) -> None:
    """Raise Outdated if a page is not the one that was built, or is too large."""
    names = sorted(
        name for name in committed.keys() | built.keys() if committed.get(name) != built.get(name)
    )
    if names:
        raise Outdated(
            f"{', '.join(names)} in {BUILT.relative_to(ROOT)} must be what the source in"
            f" {SOURCE.name} builds: run make console"
        )
    if (size := compressed_bytes(committed)) > COMPRESSED_BYTES_MAX:
        raise Outdated(
            f"the page must have at most {COMPRESSED_BYTES_MAX:,} compressed bytes, and has"
            f" {size:,}: remove a dependency"
        )


def main() -> int:
    """Install, build or check. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("--install", "--build", "--check"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args()
    if options.install:
        typescript_sdk.install(SOURCE)
    if not (options.build or options.check):
        return 0
    if (reason := missing()) is not None:
        print(f"console: {reason}, so its page is not built", file=sys.stderr)
        return 1 if options.build or os.environ.get("WEIR_REQUIRE_NODE") else 0
    try:
        if options.build:
            run("prettier", "--write", "--log-level", "warn", ".")
            build(BUILT)
        check()
    except (subprocess.CalledProcessError, Outdated) as error:
        print(f"console: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
