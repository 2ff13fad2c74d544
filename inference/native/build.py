"""Compile the native decoder: `python -m inference.native.build`.

Run at installation and when the wheel and the image are built, so that no worker compiles. Needs
only Python and a C++ compiler.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from inference.native.loader import PREBUILT, NativeUnavailable, compile_library, library_file


def build(directory: Path) -> Path:
    """Compile the library, unless it exists; remove those of other sources. Return its path.

    Raises NativeUnavailable if the compiler is missing or fails.
    """
    library = directory / library_file()
    if not library.exists():
        compile_library(library)
    for other in directory.glob("decoder-*.so"):
        if other != library:
            other.unlink()
    library.chmod(0o755)
    directory.chmod(0o755)  # readable by the image's user
    return library


def main() -> None:
    """Compile into `prebuilt/`, and report the result."""
    parser = argparse.ArgumentParser(description="Compile the native decoder.")
    parser.add_argument(
        "--out",
        type=Path,
        default=PREBUILT,
        help=f"output directory; the library is loaded from {PREBUILT}",
    )
    parser.add_argument(
        "--if-possible", action="store_true", help="without a compiler, report it and succeed"
    )
    arguments = parser.parse_args()
    try:
        library = build(arguments.out)
    except NativeUnavailable as error:
        if not arguments.if_possible:
            raise SystemExit(f"error: {error}") from error
        print(f"The native decoder is not built, torch computes, several times slower: {error}")
    else:
        print(f"The native decoder is built: {library}")


if __name__ == "__main__":
    main()
