"""Loads the library of `decoder.cpp`, compiled for this machine if necessary.

Images have no compiler, so their build makes libraries for several instruction sets (`build.py`) in
`prebuilt/` beside this file. The best one for this processor is used if it was built from the
present sources. Elsewhere the library is compiled once.

Compiled libraries are cached under a name that hashes source, flags, compiler and processor, so the
cache is never stale. Without a compiler or a writable cache, or with `WEIR_NATIVE=0`, `load` logs
the reason and returns None, and torch computes instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from inference.kv_blocks import KV_BLOCK_TOKENS

SWITCH = "WEIR_NATIVE"  # environment variable: 0 disables the native code
CACHE_DIRECTORY = "WEIR_NATIVE_CACHE"  # environment variable: cache directory for libraries
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 180.0  # seconds: 20 times the time on an idle core
SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    # Nothing reads errno or floating-point traps; values that are not finite propagate to the
    # logits, which are checked.
    "-fno-math-errno",
    "-fno-trapping-math",
)
THIS_PROCESSOR = ("-march=native",)
PREBUILT = Path(__file__).with_name("prebuilt")  # filled by the image build


class InstructionSet(NamedTuple):
    """A processor generation to compile for. cpu_flags: required flags in Linux's processor list."""

    name: str
    machine: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Best first.
INSTRUCTION_SETS = (
    InstructionSet("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    InstructionSet("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    InstructionSet("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    InstructionSet("armv8-a", "aarch64", ("-march=armv8-a",), frozenset()),
)

_log = logging.getLogger("weir.inference.native")


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """Load the library and declare its argument types; None if it is not used. Logs the outcome
    once.
    """
    if os.environ.get(SWITCH, "1") == "0":
        _log.info("native kernels are disabled by %s=0; computing with torch", SWITCH)
        return None
    try:
        path = prebuilt(PREBUILT) or compiled(cache_directory())
        library = _declare(ctypes.CDLL(str(path)))
    except NativeUnavailable as error:
        _log.warning("native kernels are not available, computing with torch, several times slower: %s", error)
        return None
    except OSError as error:
        _log.warning("native kernels cannot be loaded, computing with torch, several times slower: %s", error)
        return None
    _log.info("native kernels are in use: %s", path)
    return library


def library_name() -> str:
    """Return the file name, without suffix, of the loaded library, which identifies its build."""
    library = load()
    assert library is not None, "the library was loaded"
    return Path(str(library._name)).stem


class NativeUnavailable(Exception):
    """The library is unavailable, with the reason. Not raised outside this package."""


def cache_directory() -> Path:
    named = os.environ.get(CACHE_DIRECTORY)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weir" / "native"


def prebuilt(directory: Path) -> Path | None:
    """Return an image's library for this processor; None if there is none built from these sources."""
    if not directory.is_dir():
        return None
    cpu_flags = _cpu_flags()
    for each in INSTRUCTION_SETS:
        library = directory / prebuilt_name(each)
        if each.machine == platform.machine() and each.cpu_flags <= cpu_flags and library.exists():
            return library
    _log.warning("%s has no native kernels for this version and processor", directory)
    return None


def prebuilt_name(instruction_set: InstructionSet) -> str:
    """Return the file name of a prebuilt library, which names instruction set and sources."""
    return f"decoder-{instruction_set.name}-{_digest(*_sources(), ' '.join(FLAGS + instruction_set.flags).encode())}.so"


def compile_library(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    """Compile the sources into a file. Raises: NativeUnavailable, leaving no file."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as own:
            made = Path(own) / library.name
            command = [compiler, *FLAGS, *flags, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(library)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailable(
            f"{compiler} failed to compile {SOURCE.name}: {error.stderr.decode(errors='replace')[:500]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"compiling into {library.parent} failed: {error}") from error


def find_compiler() -> str:
    """Return the C++ compiler of this machine. Raises: NativeUnavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable(f"none of {', '.join(COMPILERS)} is installed")
    return compiler


def compiled(directory: Path) -> Path:
    """Return the library for this machine, compiled if missing. Raises: NativeUnavailable.

    Concurrent processes may compile it several times: each writes to its own file and renames it,
    so no incomplete file is loaded.
    """
    compiler = find_compiler()
    library = directory / f"decoder-{_fingerprint(compiler)}.so"
    if library.exists():
        return library
    started_s = time.monotonic()
    _log.info("compiling native kernels, once for this machine; the engine starts afterwards")
    compile_library(compiler, THIS_PROCESSOR, library)
    _log.info("compiled native kernels in %.1f s", time.monotonic() - started_s)
    return library


def _fingerprint(compiler: str) -> str:
    """Return a hash of everything the library depends on, 20 hexadecimal digits."""
    try:
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler} does not report its version: {error}") from error
    flags = " ".join(FLAGS + THIS_PROCESSOR).encode()
    return _digest(*_sources(), flags, version, platform.machine().encode(), _processor())


def _sources() -> list[bytes]:
    return [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=10).hexdigest()


def _cpu_flags() -> frozenset[str]:
    """Return this processor's instruction sets in Linux's names; empty on other systems."""
    lines = (line.partition(b":") for line in _processor().splitlines())
    return frozenset(flag.decode() for name, _, flags in lines if name.strip() in (b"flags", b"Features") for flag in flags.split())


def _processor() -> bytes:
    """Return model and instruction sets of the first core on Linux; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0].splitlines()
    except OSError:
        return b""
    told = (b"vendor_id", b"cpu family", b"model", b"flags", b"CPU implementer", b"CPU part", b"Features")
    return b"\n".join(line for line in lines if line.startswith(told))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of all functions, so that wrong calls fail in Python."""

    pointer, index, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    signatures: dict[str, tuple[object, list[object]]] = {
        "weir_kv_block_tokens": (kind, []),
        "weir_best_of": (kind, [pointer, index]),
        "weir_decoder_open": (pointer, [pointer, kind]),
        "weir_decoder_close": (None, [pointer]),
        "weir_decoder_set": (kind, [pointer, index, kind, pointer, pointer, pointer]),
        "weir_decoder_part": (pointer, [pointer, index, kind, ctypes.POINTER(index)]),
        "weir_decoder_adopt": (kind, [pointer, index, kind, pointer, index]),
        "weir_decoder_forward": (kind, [pointer, pointer]),
        "weir_decoder_copy_blocks": (None, [pointer, pointer, index]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.weir_kv_block_tokens() != KV_BLOCK_TOKENS:
        raise NativeUnavailable("decoder.cpp and kv_blocks.py disagree on the size of a KV block")
    return library
