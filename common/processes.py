"""Processes of this machine: liveness, parents, and the environment that children inherit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")
# Environment variables that a child inherits.
INHERITED_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *("VIRTUAL_ENV", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),  # not HF_TOKEN: models are local
    )
)
# Variables of compute libraries by prefix: compilers, loader, BLAS, OpenMP, CUDA, MPI, torch, ...
INHERITED_PREFIXES = (
    *("LC_", "LD_", "DYLD_", "PYTHON", "MALLOC_", "GLIBC_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "UCX_", "OMPI_", "PMIX_", "MPI_"),
    *(
        "TORCH_",
        "PYTORCH_",
        "TORCHINDUCTOR_",
        "TRITON_",
        "TOKENIZERS_",
        "TRANSFORMERS_",
        "TLLM_",
        "TRTLLM_",
        "TENSORRT_",
    ),
    "WEIR_NATIVE",  # read by `inference/native/loader.py` before any message
)


def alive(pid: int) -> bool:
    """Return whether a process is running; False for a zombie."""
    if PROC.is_dir():
        return _parent_of(PROC / str(pid)) is not None
    return pid in parents()


def parents() -> dict[int, int]:
    """Map the id of every running process to its parent's id."""
    if PROC.is_dir():
        return {
            int(entry.name): parent
            for entry in PROC.iterdir()
            if entry.name.isdigit() and (parent := _parent_of(entry))
        }
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if state[0] not in "ZX"}


def children_of(pid: int) -> list[int]:
    return [child for child, parent in parents().items() if parent == pid]


def descendants(*pids: int) -> list[int]:
    """List the ids of the processes' current children and their descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found = list(pids)
    for each in found:
        found += (child for child in children.get(each, ()) if child not in found)
    return found[len(pids) :]


def command_line(pid: int) -> str:
    """Read the command line of a process; empty if the process has ended or there is no /proc."""
    return _content(PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode(errors="replace")


def started_with(variable: str, value: str) -> list[int]:
    """Find the running processes that were started with this environment variable, and return their
    ids.

    Children inherit the variable, whatever their parent, session and process group are now. The
    list is empty without /proc.
    """
    entry = f"{variable}={value}".encode()
    return [
        int(each.name)
        for each in (PROC.iterdir() if PROC.is_dir() else ())
        if each.name.isdigit() and entry in _content(each / "environ").split(b"\0")
    ]


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Select the environment variables that a child inherits: an allowlist keeps secrets out."""
    return {
        name: value
        for name, value in environment.items()
        if name in INHERITED_NAMES or name.startswith(INHERITED_PREFIXES)
    }


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _parent_of(entry: Path) -> int | None:
    """Read the parent's id from a directory of /proc; None for a process that has ended."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)
