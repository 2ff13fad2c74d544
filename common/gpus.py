"""GPUs of this machine, as NVIDIA's management library (NVML) reports them.

The package `nvidia-ml-py` is optional, part of the extra `tensorrt`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


class GpusUnknown(Exception):
    """NVML cannot be used: the package or the driver is missing, or permission is denied."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Memory is in bytes; `used_bytes` counts all processes of the machine."""

    name: str
    memory_bytes: int
    used_bytes: int


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """List the GPUs this process may use: those in `CUDA_VISIBLE_DEVICES`, or else all in /dev."""
    if (listed := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(gpu.strip() for gpu in listed.split(",") if gpu.strip() not in ("", "-1"))
    return tuple(map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*"))))))


def read_gpus(ids: Iterable[str]) -> dict[str, Gpu]:
    """Query GPUs by id: an index, in the order of `nvidia-smi`, or a UUID.

    Ids that NVML does not know are left out. Raises GpusUnknown, with the reason, if NVML cannot be
    used.
    """
    try:
        import pynvml
    except ImportError as error:
        raise GpusUnknown("nvidia-ml-py is not installed") from error
    found = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpusUnknown(str(error)) from error
    try:
        for each in ids:
            try:
                handle = (
                    pynvml.nvmlDeviceGetHandleByIndex(int(each))
                    if each.isdecimal()
                    else pynvml.nvmlDeviceGetHandleByUUID(each)
                )
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[each] = Gpu(pynvml.nvmlDeviceGetName(handle), memory.total, memory.used)
            except pynvml.NVMLError:  # such as a shortened UUID, which CUDA accepts
                continue
    finally:
        pynvml.nvmlShutdown()
    return found
