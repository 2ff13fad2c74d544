"""Engine hosts for tests, forked from a process that has imported torch, and api processes that start such hosts.

Each is a host like any other, with the environment and the files that it would get, but that its parent is the server of
`tests.forks`: `children_of` tells whose it is. Hosts are started as they are in production by the tests that use the fixture
`executed_hosts`, and by `weir up` in tests/e2e/test_up.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from common import processes as system
from common.child_environment import inherited
from inference.safety.safety_file import CHILD_ENVIRONMENT as CLASSIFIER_ENVIRONMENT
from inference.workers import process
from inference.workers.process import CHILD_ENVIRONMENT
from tests.forks import ANSWER_BYTES_MAX, ENVIRONMENT, Forked, ForkedChild, Server, send


class StartProcess(Protocol):
    """The type of `process.start_process`."""

    def __call__(self, module: str, fd: int, environment: Mapping[str, str]) -> Coroutine[Any, Any, asyncio.subprocess.Process]:
        """Start a host that has one end of a socket as its file `fd`."""


execute_host: StartProcess = process.start_process
APIS = Server("api.__main__")
HOSTS = Server(
    *("inference.core.engine_core", "inference.encoder.network"),
    environment=lambda: {**CHILD_ENVIRONMENT, **inherited(ENVIRONMENT)},
)
CLASSIFIER_MODULE = "inference.safety.classifier_host"
CLASSIFIERS = Server(
    *("torch", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    environment=lambda: {**CLASSIFIER_ENVIRONMENT, **inherited(ENVIRONMENT)},
)
# Of hosts whose environment is another one. The TensorRT-LLM of tests computes with torch, on one thread.
OTHERS = {
    CLASSIFIER_MODULE: CLASSIFIERS,
    "inference.adapters.tensorrt_worker": Server(
        "inference.core.engine_core", environment=lambda: {"OMP_NUM_THREADS": "1", **inherited()}
    ),
}


def start_api(environment: Mapping[str, str], log: Path) -> Forked | None:
    """A new api process that appends to `log` and whose hosts are forked; None: see `Server.start`."""
    classifiers = [CLASSIFIERS.path] if environment.get("WEIR_SAFETY_RULES") else []
    return APIS.start([sys.executable, "-m", "tests.forked_hosts", HOSTS.path, *classifiers], environment, log)


def children_of(pid: int, module: str = "") -> list[int]:
    """Processes whose parent it is, and hosts that were forked for it. module: only those that run it."""
    executed = [child for child in system.children_of(pid) if module in command_of(child)]
    return executed + [child for server in (HOSTS, *OTHERS.values()) for child in server.children_of(pid, module)]


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended, and without /proc."""
    try:
        return (system.PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def path_of_server(module: str) -> str:
    """The socket of the server that forks hosts which run this module."""
    return OTHERS.get(module, HOSTS).path


def fork_hosts(path_of_server: Callable[[str], str] = path_of_server) -> StartProcess:
    """A substitute for `process.start_process`, which is still used where the server's environment is another one."""

    async def start_process(module: str, fd: int, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        with open(os.devnull, "r+") as null:  # noqa: ASYNC230  # never blocks
            files = {0: null.fileno(), 1: null.fileno(), 2: 2, fd: fd}
            arguments = ("--fd", str(fd))
            connection = send(
                path_of_server(module), files, module=module, arguments=arguments, environment=environment, owner=os.getpid()
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
        return await execute_host(module, fd, environment)

    return start_process


def main() -> None:
    """Be an api process. The arguments are the paths of the servers of its engines and, if it has any, of its classifiers."""
    from api.__main__ import main as api_main  # here, since tests that start no api process import this module as well

    engines, *classifiers = sys.argv[1:]
    process.start_process = fork_hosts(lambda module: classifiers[0] if module == CLASSIFIER_MODULE else engines)
    api_main()


if __name__ == "__main__":
    main()
