"""Engine workers for tests, forked from a process that has imported torch, and their api processes.

Each has the environment and the files of a normal worker, but its parent is the server of
`tests.forks`; `children_of` returns the workers of an api process. The fixture `executed_workers`
and `weir up` in tests/e2e/test_up.py start workers as in production.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from common import processes as system
from common.processes import inherited
from inference.safety.classifiers import CHILD_ENVIRONMENT as CLASSIFIER_ENVIRONMENT
from inference.workers import process
from inference.workers.process import CHILD_ENVIRONMENT
from tests.forks import ANSWER_BYTES_MAX, ENVIRONMENT, Forked, ForkedChild, Server, send

APIS = Server("api.serving")
WORKERS = Server(
    *("inference.core.engine_core", "inference.encoder.network"),
    environment=lambda: {**CHILD_ENVIRONMENT, **inherited(ENVIRONMENT)},
)
CLASSIFIER_MODULE = "inference.safety.classifier_worker"
CLASSIFIERS = Server(
    *("torch", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    environment=lambda: {**CLASSIFIER_ENVIRONMENT, **inherited(ENVIRONMENT)},
)
# Servers of workers with other environments. The TensorRT-LLM double computes on one thread.
OTHERS = {
    CLASSIFIER_MODULE: CLASSIFIERS,
    "inference.adapters.tensorrt_worker": Server(
        "inference.core.engine_core", environment=lambda: {"OMP_NUM_THREADS": "1", **inherited()}
    ),
}


class StartProcess(Protocol):
    """Type of `process.start_process`."""

    def __call__(
        self,
        module: str,
        fd: int,
        environment: Mapping[str, str],
        log_fd: int | None = None,
        python: str = "",
    ) -> Coroutine[Any, Any, asyncio.subprocess.Process]:
        """Start a worker that has one end of a socket as file descriptor `fd`.

        log_fd: its stderr; None for that of this process. python: its interpreter.
        """


execute_worker: StartProcess = process.start_process


def start_api(
    environment: Mapping[str, str], log: Path, module: str = "tests.forked_workers"
) -> Forked | None:
    """Start an api process that logs to `log` and forks its workers; None as in `Server.start`.

    module: runs `main` of this one.
    """
    classifiers = [CLASSIFIERS.path] if environment.get("WEIR_SAFETY_RULES") else []
    return APIS.start([sys.executable, "-m", module, WORKERS.path, *classifiers], environment, log)


def children_of(pid: int, module: str = "") -> list[int]:
    """Return the children of a process and the workers forked for it, if they run `module`."""
    executed = [child for child in system.children_of(pid) if module in command_of(child)]
    return executed + [
        child for server in (WORKERS, *OTHERS.values()) for child in server.children_of(pid, module)
    ]


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended, and without /proc."""
    try:
        return (system.PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def path_of_server(module: str) -> str:
    """Return the socket of the server that forks workers of this module."""
    return OTHERS.get(module, WORKERS).path


def fork_workers(path_of_server: Callable[[str], str] = path_of_server) -> StartProcess:
    """Return a substitute for `process.start_process`, which stays the fallback."""

    async def start_process(
        module: str,
        fd: int,
        environment: Mapping[str, str],
        log_fd: int | None = None,
        python: str = "",
    ) -> asyncio.subprocess.Process:
        if python:
            return await execute_worker(module, fd, environment, log_fd, python)
        with open(os.devnull, "r+") as null:  # noqa: ASYNC230  # never blocks
            files = {0: null.fileno(), 1: null.fileno(), 2: log_fd or 2, fd: fd}
            arguments = ("--fd", str(fd))
            connection = send(
                path_of_server(module),
                files,
                module=module,
                arguments=arguments,
                environment=environment,
                owner=os.getpid(),
            )
        connection.setblocking(False)
        try:
            answer = await asyncio.get_running_loop().sock_recv(connection, ANSWER_BYTES_MAX)
        except BaseException:
            connection.close()
            raise
        if answer:
            return cast(asyncio.subprocess.Process, ForkedChild(connection, answer))
        connection.close()
        return await execute_worker(module, fd, environment, log_fd)

    return start_process


def main() -> None:
    """Run an api process. Arguments: paths of the servers of engines and, if any, classifiers."""
    from api.__main__ import main as api_main  # late: not every importer of this module needs it

    engines, *classifiers = sys.argv[1:]
    process.start_process = fork_workers(
        lambda module: classifiers[0] if module == CLASSIFIER_MODULE else engines
    )
    api_main()


if __name__ == "__main__":
    main()
