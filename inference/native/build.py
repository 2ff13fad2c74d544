"""Compile the native decoder in advance, for images that have no compiler: `python -m inference.native.build --out DIR`.

Makes one library for each instruction set of this machine's architecture. Needs Python and a C++ compiler, and no package.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from inference.native.loader import INSTRUCTION_SETS, PREBUILT, NativeUnavailable, compile_library, find_compiler, prebuilt_name


def build(directory: Path) -> list[Path]:
    """Return the libraries made, the one for the newest processors first. Raises `NativeUnavailable`."""
    machine = platform.machine()
    chosen = [each for each in INSTRUCTION_SETS if each.machine == machine]
    if not chosen:
        known = ", ".join(sorted({each.machine for each in INSTRUCTION_SETS}))
        raise NativeUnavailable(f"this machine is {machine}: libraries can be made in advance for {known}")
    compiler, libraries = find_compiler(), []
    for each in chosen:
        library = directory / prebuilt_name(each)
        compile_library(compiler, each.flags, library)
        library.chmod(0o755)
        libraries.append(library)
    directory.chmod(0o755)  # of the image's user to read
    return libraries


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Compile the native decoder for every instruction set of this architecture.")
    parser.add_argument("--out", type=Path, default=PREBUILT, help=f"where the libraries go; loaded from {PREBUILT}")
    try:
        for library in build(parser.parse_args().out):
            print(library)
    except NativeUnavailable as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
