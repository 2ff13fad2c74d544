"""Interface of launchers, which start and stop the servers of a model, and their shared values.

All methods can be repeated: a scaler that dies in the middle of a call is replaced by another one,
which makes the same call again. So `start` adopts a server that runs already, and `stop` of a
server that does not run does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

# Of commands, for scripts: the replica, its lifetime, model and number.
VARIABLES = (
    "WEIR_REPLICA_ID",
    "WEIR_REPLICA_LIFETIME",
    "WEIR_REPLICA_MODEL",
    "WEIR_REPLICA_NUMBER",
)
REASON_CHARS_MAX = 500  # of an error in the database and in `weir replicas list`
# JSON and the variables of a shell, `${NAME}`, pass.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")


class LaunchFailed(Exception):
    """A server could not be started, stopped or put to sleep. The message is for operators."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:REASON_CHARS_MAX])


@dataclass(frozen=True, slots=True)
class LaunchedId:
    """Identity of a replica. `served` is the model, or `model@version`.

    `lifetime` is new whenever the replica is started from nothing: a late `stop` of an earlier one
    must not end the present server.
    """

    served: str
    number: int
    lifetime: str

    def __str__(self) -> str:
        return f"{self.served}#{self.number}"

    def environment(self) -> dict[str, str]:
        """Variables for the commands of a launcher."""
        values = (str(self), self.lifetime, self.served, str(self.number))
        return dict(zip(VARIABLES, values, strict=True))


class Launcher(Protocol):
    """Interface of a kind of launcher, for one version. One call per replica runs at a time."""

    def expect(self, numbers: frozenset[int]) -> None:
        """Note which replicas should run, for launchers that can only set their number."""
        ...

    async def start(self, replica: LaunchedId) -> str:
        """Start the server, unless it runs; return its address once it takes connections.

        Raises: LaunchFailed.
        """
        ...

    async def wake(self, replica: LaunchedId, address: str) -> str:
        """Wake the server, unless it is awake; return its address, which may have changed.

        Raises: LaunchFailed.
        """
        ...

    async def stop(self, replica: LaunchedId) -> None:
        """Stop the server, asleep or not; return when it has ended. Raises: LaunchFailed."""
        ...

    async def sleep(self, replica: LaunchedId) -> None:
        """Put the server to sleep. Raises: LaunchFailed."""
        ...

    async def runs(self, replica: LaunchedId, address: str) -> bool:
        """Return whether the server runs. Raises: LaunchFailed if unknown."""
        ...


def check_placeholders(text: str, allowed: frozenset[str]) -> str:
    """Return the text. Raises ValueError for a placeholder that is not allowed."""
    for name in _PLACEHOLDER.findall(text):
        if name not in allowed:
            known = ", ".join(f"{{{each}}}" for each in sorted(allowed))
            raise ValueError(f"{{{name}}} is not a placeholder: there are {known}")
    return text


def filled(text: str, values: Mapping[str, object]) -> str:
    """Replace the placeholders of a checked text, as in `vllm://127.0.0.1:{port}`."""
    return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), text)
