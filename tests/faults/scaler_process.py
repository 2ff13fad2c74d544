"""`run` is an api process reduced to its part of launching: it wants a replica while a file exists.

Tests fork it from a process that has imported this module, and kill it at any moment.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path
from typing import Any, cast

from api.fleet.launch_plan import LaunchTerms
from api.fleet.launching import LaunchedVersion, Launching
from inference.adapters.launched_replica import LaunchedReplica
from inference.launchers.launcher import LaunchedId
from inference.launchers.process import ProcessLauncher, ProcessTerms
from inference.routing.on_demand import ManagedEngine

SERVED = "chat"
POLL_S = 0.01
# Notes its start, loads for a moment, and serves.
SERVER = """
import socket, sys, time
open(sys.argv[2], "a").write("start\\n")
time.sleep(0.3)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    listener.accept()[0].close()
"""


class WantingEngine:
    """Engine that is in use while it runs."""

    def idle_since_s(self) -> float | None:
        return None


class SlowLauncher(ProcessLauncher):
    """Launcher with pauses where a scaler may die: before the start, and before its outcome."""

    async def start(self, replica: LaunchedId) -> str:
        await asyncio.sleep(0.05)
        address = await super().start(replica)
        await asyncio.sleep(0.05)
        return address


def run(database_url: str, directory: str) -> None:
    """Serve until killed. The file `wanted` is the demand, `process-PID` has the id."""
    asyncio.run(serve(database_url, Path(directory)))


async def serve(database_url: str, directory: Path) -> None:
    command = (sys.executable, "-ISc", SERVER, "{port}", str(directory / "starts"))
    terms = ProcessTerms(command, "vllm://127.0.0.1:{port}", stop_timeout_s=2.0)
    launched, process_id = LaunchedReplica(SERVED, 0), uuid.uuid4()
    version = LaunchedVersion(SERVED, SlowLauncher(terms, directory / "launched"), LaunchTerms())
    (directory / f"process-{os.getpid()}").write_text(str(process_id))
    version.members.append((launched, cast(ManagedEngine, cast(Any, WantingEngine()))))
    launching = Launching(database_url, process_id)
    launching.become([version], {})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(launching.run())
        while True:
            launched.want() if (directory / "wanted").exists() else launched.leave()
            await asyncio.sleep(POLL_S)
