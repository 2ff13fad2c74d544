"""Examination of TensorRT-LLM on a GPU machine, in processes that end before it returns.

The first process asks the questions of `tensorrt_questions.py`. The second is the worker itself:
it is killed once it is ready, since ranks of MPI outlive it with the GPU's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from common.gpus import GpusUnknown, read_gpus
from common.processes import started_with
from inference.adapters.kv_events import KvCacheChange
from inference.adapters.tensorrt_engine import load_message
from inference.adapters.tensorrt_settings import LoadTensorRt, TensorRtSettings
from inference.doctor.findings import Observation, Verdict, needed
from inference.doctor.tensorrt_questions import Observed, program
from inference.workers.process import open_worker
from inference.workers.protocol import FAMILY, LoadFailed, Message, Ready, decoder_to_parent

QUESTIONS = "inference.doctor.tensorrt_questions"
WORKER = "inference.adapters.tensorrt_worker"
END_S = 5.0  # for a process that has closed its connection
OUTLIVES_S = 2.0  # after which a process counts as outliving its parent
FREE_S = 30.0  # for the driver to free the memory of ended processes
FREE_BYTES = 512 << 20  # that other processes may have taken meanwhile
LOG_LINES = 20
ALIVE = "Does it live to the last question?"
KILLED = "After the worker's death, do its processes end, and is the GPU's memory free again?"


async def examine(settings: TensorRtSettings, gpus: Sequence[str] = ()) -> list[Observation]:
    """Ask all questions and return the observations. `gpus` lists the ids of the GPUs whose memory
    is compared.

    Raises CheckpointInvalid, or ValueError for contradictory limits.
    """
    _, load = load_message(settings)
    found = await _ask(settings, load)
    if found[-1].verdict is Verdict.EXPECTED:
        without = msgspec.structs.replace(load, adapters=())  # which may have no effect
        found.append(await _killed_worker(settings, without, gpus))
    return found


async def _ask(settings: TensorRtSettings, load: LoadTensorRt) -> list[Observation]:
    found: list[Observation] = []
    decoder = decoder_to_parent(Observed)
    async with open_worker(
        QUESTIONS, settings.environment, keeps_log=True, python=settings.python
    ) as worker:
        worker.send(load)
        reason = ""
        while (message := await worker.receive(decoder)) is not None:
            match message:
                case Observed(observation=each):
                    found.append(each)
                case LoadFailed(message=reason):
                    pass
        await worker.wait_gone(END_S)
        if not reason and worker.exit_status:
            log = "\n".join(worker.log_lines(LOG_LINES))
            reason = f"it ended with status {worker.exit_status}; its log ends:\n{log}"
    found.append(Observation(ALIVE, needed(not reason), reason or "yes"))
    return found


async def _killed_worker(
    settings: TensorRtSettings, load: LoadTensorRt, gpus: Sequence[str]
) -> Observation:
    before = used_bytes(gpus)
    async with open_worker(
        WORKER, settings.environment, keeps_log=True, python=settings.python
    ) as worker:
        worker.send(load)
        message: Message | None = None
        reason = "its process ended"
        try:
            async with asyncio.timeout(settings.load_timeout_s):
                message = await worker.receive(decoder_to_parent(KvCacheChange))
                while message is not None and not isinstance(message, Ready | LoadFailed):
                    message = await worker.receive(decoder_to_parent(KvCacheChange))
        except TimeoutError:
            reason = f"it took more than {settings.load_timeout_s:g} s"
        if not isinstance(message, Ready):
            reason = message.message if isinstance(message, LoadFailed) else reason
            return Observation(KILLED, Verdict.BAD, f"the worker did not load: {reason}")
        loaded = used_bytes(gpus)
        worker.kill()
        await worker.wait_gone(END_S)
        await asyncio.sleep(OUTLIVES_S)
        outliving = [program(pid) for pid in started_with(FAMILY, worker.family)]
        family = worker.family
    # The end of the block has killed them, as after the death of a worker in production.
    left = started_with(FAMILY, family)
    seen = f"outliving it: {', '.join(outliving) or 'none'}; alive after Weir killed them:"
    seen += f" {len(left) or 'none'}"
    if before is None or loaded is None:
        return Observation(KILLED, needed(not left), f"{seen}; the GPU's memory is not known")
    began_s = time.monotonic()
    while (after := used_bytes(gpus) or 0) > before + FREE_BYTES:
        if time.monotonic() - began_s > FREE_S:
            break
        await asyncio.sleep(0.2)
    seen += f"; bytes in use before {before:,}, loaded {loaded:,}, afterwards {after:,}"
    return Observation(KILLED, needed(not left and after <= before + FREE_BYTES), seen)


def used_bytes(gpus: Sequence[str]) -> int | None:
    """Sum the memory in use on these GPUs, in bytes; None if it is unknown."""
    try:
        found = read_gpus(gpus)
    except GpusUnknown:
        return None
    return sum(gpu.used_bytes for gpu in found.values()) if found else None
