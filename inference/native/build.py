"""Compile the native decoder for images without a compiler: `python -m inference.native.build --out
DIR`.

Builds one library per instruction set of this machine's architecture. Needs only Python and a C++
compiler.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from inference.native.loader import INSTRUCTION_SETS, PREBUILT, NativeUnavailable, compile_library, find_compiler, prebuilt_name


def build(directory: Path) -> list[Path]:
    """Return the libraries built, for the newest processors first. Raises: NativeUnavailable."""
    machine = platform.machine()
    chosen = [each for each in INSTRUCTION_SETS if each.machine == machine]
    if not chosen:
        known = ", ".join(sorted({each.machine for each in INSTRUCTION_SETS}))
        raise NativeUnavailable(f"this machine is {machine}: prebuilt libraries are supported for {known}")
    compiler, libraries = find_compiler(), []
    for each in chosen:
        library = directory / prebuilt_name(each)
        compile_library(compiler, each.flags, library)
        library.chmod(0o755)
        libraries.append(library)
    directory.chmod(0o755)  # readable by the image's user
    return libraries


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Compile the native decoder for every instruction set of this architecture.")
    parser.add_argument("--out", type=Path, default=PREBUILT, help=f"output directory; libraries are loaded from {PREBUILT}")
    try:
        for library in build(parser.parse_args().out):
            print(library)
    except NativeUnavailable as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
