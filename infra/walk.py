"""Count functions and files on the path of a request: `python -m infra.walk [--ceiling S F]`.

An api process and its engine serve the bundled model for one request at a time, each on a new
stream, with receipts and five quotas. A function is on the path if each of several requests calls
it between the arrival of the stream and the last frame, and an idle process does not. It counts
once per process, however often it is called; lambdas, comprehensions and functions of other
packages do not count. A step is a function that calls another one of Weir; the others are leaves.
Ceilings are for steps.

A separate run counts calls, on 64 open streams with one request each and a simulated engine: calls
of all Python functions in the api process, and wake-ups of its tasks beyond those by grpc.aio,
which wakes one for each message.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import textwrap
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from api.cli.stack import Child, child_environment, ensure_receipt_key, wait_until_serving
from api.core.endpoint import make_private
from api.core.settings import Settings, bundled_models
from bench.site import MODEL, children_of, create_keys, database
from infra.walk_notes import ROOT
from metering.store.migrations_runner import migrate

# Measured on 28 November 2026: 146, 41; 372, 78; 290 to 325 calls, 3.1. To be lowered and never
# raised; tests/e2e/test_request_path.py holds them.
STEPS_MAX, STEP_FILES_MAX = 158, 43
FUNCTIONS_MAX, FILES_MAX = 390, 81  # with leaves
# Per request; they vary by some percent with the size of batches.
CALLS_MAX, WAKE_UPS_MAX = 340.0, 4.0

PROMPT = " ".join(["hotel"] * 25)
WARM_UP_REQUESTS, WALKED_REQUESTS, WALKED_TOKENS = 3, 5, 4
IDLE_S = 2.0  # longer than the intervals of most background loops
SETTLED_S = 0.3  # for work that follows the last frame
STREAM_COUNT, WARM_UP_ROUNDS, ROUNDS = 64, 3, 10


@dataclass(frozen=True, slots=True)
class Function:
    """Function of Weir that a request calls."""

    path: str
    name: str
    is_step: bool

    def __str__(self) -> str:
        return self.name if self.is_step else f"({self.name})"


@dataclass(frozen=True, slots=True)
class ProcessWalk:
    """Functions that one process calls for a request, in the order of their first call."""

    process: str
    functions: tuple[Function, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """Functions that a request calls, by process."""

    processes: tuple[ProcessWalk, ...]

    @property
    def functions(self) -> list[Function]:
        """Functions of all processes."""
        return [function for process in self.processes for function in process.functions]

    @property
    def steps(self) -> list[Function]:
        """Functions that call other functions of Weir."""
        return [function for function in self.functions if function.is_step]


@dataclass(frozen=True, slots=True)
class Cost:
    """Python calls per request, and wake-ups of tasks beyond those by grpc.aio."""

    call_count: float
    wake_up_count: float


class Server:
    """Api process and its children, all with the profile hook."""

    def __init__(self, address: str, keys: Sequence[str], pids: Sequence[int], notes: Path) -> None:
        self.keys = keys
        self._address = address
        self._pids = pids
        self._notes = notes

    @contextlib.asynccontextmanager
    async def stream(self, key: str) -> AsyncIterator[Any]:
        """Open a `Generate` call on a new connection."""
        async with grpc.aio.insecure_channel(
            self._address, (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            call: Any = pb_grpc.InferenceServiceStub(channel).Generate(
                metadata=(("authorization", f"Bearer {key}"),)
            )
            yield call
            call.cancel()

    async def counted(self, work: Awaitable[object]) -> dict[int, dict[str, Any]]:
        """Run the work and return the calls that each process made during it, by process id."""
        for each in self._notes.iterdir():
            each.unlink()
        await self._toggle("counting")
        await work
        await self._toggle("counted")
        return {pid: json.loads((self._notes / f"{pid}.counted").read_text()) for pid in self._pids}

    async def _toggle(self, suffix: str) -> None:
        """Send the signal to all processes, and wait until each has written its file."""
        for pid in self._pids:
            os.kill(pid, signal.SIGUSR2)
        paths = [self._notes / f"{pid}.{suffix}" for pid in self._pids]
        while not all(path.exists() for path in paths):  # noqa: ASYNC110  # other processes write
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(database_url: str, **settings: Any) -> AsyncIterator[Server]:
    """Run a server with a migrated database until the block ends."""
    with tempfile.TemporaryDirectory(prefix="weir-walk-") as directory:
        home, notes, hook = (Path(directory) / name for name in ("home", "notes", "hook"))
        for each in (home, home / "logs", notes, hook):
            make_private(each)
        (hook / "sitecustomize.py").write_text(
            "import pathlib\n\nfrom infra.walk_notes import"
            f" take_notes\n\ntake_notes(pathlib.Path({str(notes)!r}))\n"
        )
        models = {MODEL: next(iter(bundled_models().values()))}
        server_settings = Settings.of(
            database_url=database_url,
            home=home,
            listen="127.0.0.1:0",
            models=models,
            **settings,
        )
        ensure_receipt_key(server_settings)
        api = Child("api server", [sys.executable, "-m", "api"], home / "logs" / "api.log")
        await api.start(child_environment(server_settings) | {"PYTHONPATH": f"{hook}:{ROOT}"})
        try:
            address = (await wait_until_serving(home, api)).address
            keys = await asyncio.to_thread(create_keys, database_url, STREAM_COUNT)
            assert api.process is not None
            yield Server(address, keys, [api.process.pid, *children_of(api.process.pid)], notes)
        finally:
            await api.stop()


async def ask(call: Any, token_count: int) -> int:
    """Send one request and read its frames. Return the number of messages in both directions."""
    start = pb.StartFrame(model=MODEL, text=PROMPT, max_output_tokens=token_count, ignore_eos=True)
    await call.write(
        pb.GenerateRequest(frames=[pb.ClientFrame(request_id=str(uuid.uuid4()), start=start)])
    )
    message_count, kinds = 1, set[str | None]()
    while "finished" not in kinds:
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise ConnectionError(f"the stream ended: {await call.details()}")
        kinds = {frame.WhichOneof("kind") for frame in answer.frames}
        if "failed" in kinds:
            raise ConnectionError(f"the request failed: {answer}")
        message_count += 1
    return message_count


async def walk(database_url: str) -> Walk:
    """Send requests to a new server and collect the functions that they call."""
    async with serving(database_url) as server, contextlib.AsyncExitStack() as streams:

        async def request() -> None:
            call = await streams.enter_async_context(server.stream(server.keys[0]))
            await ask(call, WALKED_TOKENS)
            await asyncio.sleep(SETTLED_S)

        for _ in range(WARM_UP_REQUESTS):
            await request()
        idle = await server.counted(asyncio.sleep(IDLE_S))
        runs = [await server.counted(request()) for _ in range(WALKED_REQUESTS)]

    def walk_of(pid: int) -> ProcessWalk:
        each = [run[pid]["functions"] for run in runs]
        common = (
            (name, *name.split(" ", 1))
            for name in each[0]
            if name not in idle[pid]["functions"] and all(name in functions for functions in each)
        )
        return ProcessWalk(
            runs[0][pid]["process"],
            tuple(
                Function(path, name, all(functions[key] for functions in each))
                for key, path, name in common
            ),
        )

    return Walk(tuple(map(walk_of, idle)))


async def cost(database_url: str) -> Cost:
    """Measure the mean cost of a request when many streams are open."""
    async with (
        serving(database_url, engine_device="simulated", simulated_time_scale=0.0) as server,
        contextlib.AsyncExitStack() as streams,
    ):
        calls = [await streams.enter_async_context(server.stream(key)) for key in server.keys]
        message_count = 0

        async def rounds(call: Any, count: int) -> None:
            nonlocal message_count
            for _ in range(count):
                exchanged_count = await ask(call, 1)  # `+= await` would lose other streams' counts
                message_count += exchanged_count

        await asyncio.gather(*(rounds(call, WARM_UP_ROUNDS) for call in calls))
        message_count = 0
        counted = await server.counted(asyncio.gather(*(rounds(call, ROUNDS) for call in calls)))
    counts = next(iter(counted.values()))
    request_count = len(calls) * ROUNDS
    return Cost(
        counts["call_count"] / request_count,
        (counts["wake_up_count"] - message_count) / request_count,
    )


def files_of(functions: Iterable[Function]) -> set[str]:
    """Collect the paths of the files that define these functions."""
    return {function.path for function in functions}


def text_of(walked: Walk) -> str:
    """Format a walk by process: a line whenever the file changes, leaves in brackets."""
    lines: list[str] = []
    for each in walked.processes:
        lines.append(
            f"{each.process}: {len(each.functions)} functions in"
            f" {len(files_of(each.functions))} files"
        )
        for path, functions in itertools.groupby(each.functions, lambda function: function.path):
            lines.append(f"  {path}: {', '.join(map(str, functions))}")
        lines.append("")
    return "\n".join(lines)


def markdown_of(walked: Walk) -> str:
    """Format the files that define steps, by process and first call, for docs/architecture.md."""
    paragraphs = []
    for each in walked.processes:
        files = dict.fromkeys(
            f"`{function.path}`" for function in each.functions if function.is_step
        )
        paragraphs.append(
            textwrap.fill(
                f"`{each.process}`: {', '.join(files)}.",
                100,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n\n".join(paragraphs)


async def measure(database_url: str) -> tuple[Walk, Cost]:
    return await walk(database_url), await cost(database_url)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the walk. Return 1 if it exceeds the ceiling, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.walk", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--ceiling", nargs=2, type=int, metavar=("STEPS", "FILES"), help="exit with 1 above these"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print what docs/architecture.md shows"
    )
    options = parser.parse_args(arguments)
    with database(None, None) as url:
        migrate(url)
        walked, each = asyncio.run(measure(url))
    print(markdown_of(walked) if options.markdown else text_of(walked))
    print(
        f"{len(walked.steps)} steps in {len(files_of(walked.steps))} files; "
        f"{len(walked.functions)} functions in {len(files_of(walked.functions))} files with leaves"
    )
    print(
        f"{each.call_count:.0f} Python calls and {each.wake_up_count:.1f} wake-ups of tasks per"
        " request"
    )
    if options.ceiling is None:
        return 0
    steps_max, files_max = options.ceiling
    return int(len(walked.steps) > steps_max or len(files_of(walked.steps)) > files_max)


if __name__ == "__main__":
    sys.exit(main())
