"""Loading of the native decoder's library, and choice of its instruction set.

One library has code for several processor generations ("levels") and asks the processor which of
them it can run. `build.py` compiles it into `prebuilt/` beside this file: at installation, in the
wheel and in the image. A library whose name does not match the present sources is not used; then,
as in a source tree that was edited, it is compiled into a cache before the first model is loaded.

Without library and compiler, or with `WEIR_NATIVE=0`, `load` logs the reason and returns None, and
torch computes instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from inference.kv_blocks import KV_BLOCK_TOKENS

# Environment variable: 0 disables the native code, the name of a level excludes better ones.
SWITCH = "WEIR_NATIVE"
CACHE_DIRECTORY = "WEIR_NATIVE_CACHE"  # environment variable: cache directory for libraries
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 300.0  # seconds: 10 times the time on two idle cores
SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # Nothing reads errno or floating-point traps; values that are not finite propagate to the
    # logits, which are checked.
    "-fno-math-errno",
    "-fno-trapping-math",
)
PREBUILT = Path(__file__).with_name("prebuilt")  # filled by `build.py`
# Flags of each level, as library.cpp names them. Oldest processors first: the linker keeps the
# first copy of a function of the standard library, which then runs on all of them.
_X86_V4 = "-march=x86-64-v4"
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("-march=x86-64-v3",),
        "avx_vnni": ("-march=x86-64-v3", "-mavxvnni"),
        "avx512": (_X86_V4,),
        "avx512_vnni": (_X86_V4, "-mavx512vnni"),
        "avx512_bf16": (_X86_V4, "-mavx512vnni", "-mavx512bf16"),
        "amx": (_X86_V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    }
}
PORTABLE: dict[str, tuple[str, ...]] = {"portable": ()}  # on other architectures

_log = logging.getLogger("weir.inference.native")


class NativeUnavailable(Exception):
    """The library cannot be used; the message gives the reason."""


class NativeDisabled(NativeUnavailable):
    """An operator has disabled the library."""


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """Load the library once and log the outcome; None if it is not used."""
    try:
        library = open_library()
        levels = available_levels(library, is_bfloat16=True)
    except NativeDisabled as error:
        _log.info("native kernels are %s; computing with torch", error)
        return None
    except NativeUnavailable as error:
        _log.warning(
            "native kernels are not available, computing with torch, several times slower: %s",
            error,
        )
        return None
    _log.info("native kernels are in use, up to %s: %s", next(iter(levels)), library._name)
    return library


def is_expected() -> bool:
    """Return whether a worker will find or can compile the library. Does not load or compile it."""
    is_built = prebuilt(PREBUILT) or prebuilt(cache_directory())
    is_possible = is_built is not None or any(map(shutil.which, COMPILERS))
    return is_possible and os.environ.get(SWITCH, "1") != "0"


def open_library() -> ctypes.CDLL:
    """Load the library and declare its argument types. Raises NativeUnavailable."""
    if os.environ.get(SWITCH, "1") == "0":
        raise NativeDisabled(f"disabled by {SWITCH}=0")
    try:
        return _declare(ctypes.CDLL(str(prebuilt(PREBUILT) or compiled(cache_directory()))))
    except OSError as error:
        raise NativeUnavailable(f"the library cannot be loaded: {error}") from error


def available_levels(library: ctypes.CDLL, *, is_bfloat16: bool) -> dict[str, int]:
    """List the levels that this machine can run for a type, names with numbers, best first.

    Raises NativeUnavailable if there is none, or if `WEIR_NATIVE` names an unknown one.
    """
    levels: dict[str, int] = {}
    while (name := library.weir_level_name(len(levels))) is not None:
        levels[name.decode()] = len(levels)
    best = os.environ.get(SWITCH, "1")
    if best not in levels and best not in ("", "1"):
        raise NativeUnavailable(f"{SWITCH} must be 0, 1 or one of {', '.join(levels)}, got {best}")
    runnable = {
        name: level
        for name, level in levels.items()
        if level >= levels.get(best, 0) and library.weir_level_computes(level, is_bfloat16)
    }
    if not runnable:
        raise NativeUnavailable(f"this processor supports none of {', '.join(levels)}")
    return runnable


def layout_name(*, is_bfloat16: bool) -> str:
    """Name the layout of packed weights: build and best level, since int8 differs by level."""
    library = load()
    assert library is not None, "the library was loaded"
    level = next(iter(available_levels(library, is_bfloat16=is_bfloat16)))
    return f"{Path(str(library._name)).stem} {level}"


def cache_directory() -> Path:
    named = os.environ.get(CACHE_DIRECTORY)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weir" / "native"


def prebuilt(directory: Path) -> Path | None:
    """Find the library in `directory`; None unless it was built from the present sources."""
    library = directory / library_file()
    return library if library.exists() else None


def library_file() -> str:
    """Build the library's file name, which hashes sources, flags and architecture."""
    flags = repr((FLAGS, levels_of_machine())).encode()
    return f"decoder-{_digest(*_sources(), flags, platform.machine().encode())}.so"


def levels_of_machine() -> dict[str, tuple[str, ...]]:
    return LEVELS.get(platform.machine(), PORTABLE)


def compile_library(library: Path) -> None:
    """Compile the sources into a file, all levels at once. Raises NativeUnavailable, leaving no
    file.

    Concurrent processes may compile it several times: each writes to its own file and renames it,
    so no incomplete file is loaded.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable(f"none of {', '.join(COMPILERS)} is installed")
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as own:
            units = [("library", (), SOURCE.with_name("library.cpp"))] + [
                (name, (*flags, f"-DWEIR_KERNELS=kernels_{name}"), SOURCE)
                for name, flags in levels_of_machine().items()
            ]
            objects = [f"{own}/{name}.o" for name, _, _ in units]
            _run_all(
                [compiler, *FLAGS, *flags, "-c", "-o", out, str(source)]
                for (_, flags, source), out in zip(units, objects, strict=True)
            )
            made = Path(own) / library.name
            _run_all([[compiler, *FLAGS, "-shared", "-o", str(made), *objects]])
            made.replace(library)
    except OSError as error:
        raise NativeUnavailable(f"compiling into {library.parent} failed: {error}") from error


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run commands in parallel. Raises NativeUnavailable with the output of one that failed."""
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in running:
            try:
                _, output = process.communicate(timeout=COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise NativeUnavailable(
                    f"compiling takes over {COMPILE_TIMEOUT_S:.0f} s"
                ) from error
            if process.returncode != 0:
                raise NativeUnavailable(
                    f"the compiler failed to compile {SOURCE.name}:"
                    f" {output.decode(errors='replace')[:500]}"
                )


def compiled(directory: Path) -> Path:
    """Find the library in a cache, compiling it if missing. Raises NativeUnavailable."""
    library = directory / library_file()
    if library.exists():
        return library
    started_s = time.monotonic()
    _log.info("compiling native kernels, once for these sources; the engine starts afterwards")
    compile_library(library)
    _log.info("compiled native kernels in %.1f s", time.monotonic() - started_s)
    return library


def _sources() -> list[bytes]:
    folder = SOURCE.parent
    return [
        path.read_bytes() for path in (*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*.h")))
    ]


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=10).hexdigest()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of all functions, so that wrong calls fail in Python."""

    pointer, index, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    signatures: dict[str, tuple[object, list[object]]] = {
        "weir_kv_block_tokens": (kind, []),
        "weir_level_name": (ctypes.c_char_p, [kind]),
        "weir_level_computes": (kind, [kind, kind]),
        "weir_best_of": (kind, [kind, pointer, index]),
        "weir_shuffle_pieces": (None, [kind, ctypes.c_uint32]),
        "weir_decoder_open": (pointer, [kind, pointer, kind]),
        "weir_decoder_close": (None, [pointer]),
        "weir_decoder_set": (kind, [pointer, index, kind, pointer, pointer, pointer]),
        "weir_decoder_part": (pointer, [pointer, index, kind, ctypes.POINTER(index)]),
        "weir_decoder_adopt": (kind, [pointer, index, kind, pointer, index]),
        "weir_decoder_forward": (kind, [pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.weir_kv_block_tokens() != KV_BLOCK_TOKENS:
        raise NativeUnavailable("decoder.cpp and kv_blocks.py disagree on the size of a KV block")
    return library
