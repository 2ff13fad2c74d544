"""Set up and build the TypeScript client: `sdk/typescript`.

    python -m infra.typescript_sdk --install    install pinned packages; without Node, only say so
    python -m infra.typescript_sdk --build      generate the messages of the contract, and compile

Generated code is not committed: the package contains the code compiled from it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from infra.generate_proto import protoc

SDK = Path(__file__).resolve().parent.parent / "sdk" / "typescript"
PROTO = SDK.parent.parent / "proto"
CONTRACT = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("weir/v1/*.proto"))
ERRORS = ("google/rpc/error_details.proto", "google/rpc/status.proto")


def missing(project: Path = SDK) -> str | None:
    """Find the reason why a project of npm cannot be built here; None if it can."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "Node.js with npm is not installed"
    if not (project / "node_modules" / ".bin" / "tsc").exists():
        return (
            "its packages are not installed: run make setup-dev where the npm registry can be"
            " reached"
        )
    return None


def install(project: Path = SDK) -> None:
    """Install the packages of the lock file. Without Node or a registry, print so and return."""
    if shutil.which("npm") is None:
        print(f"{project.name}: Node.js with npm is not installed, so it is not set up")
        return
    done = subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--silent"], cwd=project, capture_output=True, text=True
    )
    if done.returncode != 0:
        print(
            f"{project.name}: npm could not install its packages, so it is not set"
            f" up:\n{done.stderr[-2000:]}"
        )


def build() -> None:
    """Generate and compile into `sdk/typescript/dist` unless it is up to date; one build at a time.

    Raises: CalledProcessError; the compiler prints its errors.
    """
    built = SDK / "node_modules" / ".weir-built"
    directory = os.open(SDK, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if not (
            built.exists()
            and (SDK / "dist").exists()
            and built.stat().st_mtime_ns > max(map(changed_ns, inputs()))
        ):
            built.unlink(missing_ok=True)
            rebuild()
            built.touch()
    finally:
        os.close(directory)


def inputs() -> Iterator[Path]:
    """Yield the files that the build depends on."""
    yield from SDK.glob("*.json")
    yield from PROTO.rglob("*.proto")
    for directory in ("src", "tests"):
        yield from (path for path in (SDK / directory).rglob("*.ts") if "gen" not in path.parts)


def changed_ns(path: Path) -> int:
    """Return the modification time of a file in nanoseconds."""
    return path.stat().st_mtime_ns


def rebuild() -> None:
    """Generate and compile unconditionally. The caller holds the lock."""
    generated = SDK / "src" / "gen"
    shutil.rmtree(generated, ignore_errors=True)
    generated.mkdir(parents=True)
    plugin = SDK / "node_modules" / ".bin" / "protoc-gen-es"
    options = [
        f"--plugin=protoc-gen-es={plugin}",
        f"--es_out={generated}",
        "--es_opt=target=ts,import_extension=js",
    ]
    protoc([*options, *CONTRACT, *ERRORS])
    shutil.rmtree(SDK / "dist", ignore_errors=True)
    subprocess.run(
        [SDK / "node_modules" / ".bin" / "tsc", "--project", SDK / "tsconfig.json"], check=True
    )


def main() -> int:
    """Install the packages, build the client, or do both. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--build", action="store_true")
    options = parser.parse_args()
    if options.install:
        install()
    if options.build:
        if (reason := missing()) is not None:
            print(f"the TypeScript client cannot be built: {reason}", file=sys.stderr)
            return 1
        build()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
