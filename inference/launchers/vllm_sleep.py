"""Sleep and wake calls of vLLM's HTTP server (`--enable-sleep-mode`, `VLLM_SERVER_DEV_MODE=1`).

SGLang and others do not have them: use a `command` launcher there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from inference.launchers.http import Answer, send
from inference.launchers.launcher import LaunchFailed

SLEEP_TIMEOUT_S = 120.0  # for moving the weights of a large model to the memory of the host


@dataclass(frozen=True, slots=True)
class SleepTerms:
    """URL of the server, with placeholders, and the level of its sleep.

    At level 1 the weights move to the memory of the host, at level 2 they are dropped.
    """

    url: str
    level: int = 1


async def is_asleep(url: str) -> bool:
    """Return whether the server sleeps. Raises: LaunchFailed."""
    answer = _accepted(await send("GET", f"{url}/is_sleeping"), "is_sleeping")
    try:
        return json.loads(answer.body)["is_sleeping"] is True
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchFailed(f"{url}/is_sleeping did not return is_sleeping as JSON") from error


async def fall_asleep(url: str, level: int) -> None:
    """Put the server to sleep, unless it sleeps. Raises: LaunchFailed."""
    if not await is_asleep(url):
        answer = await send("POST", f"{url}/sleep?level={level}", timeout_s=SLEEP_TIMEOUT_S)
        _accepted(answer, "sleep")


async def wake_up(url: str) -> None:
    """Wake the server, unless it is awake. Raises: LaunchFailed."""
    if await is_asleep(url):
        _accepted(await send("POST", f"{url}/wake_up", timeout_s=SLEEP_TIMEOUT_S), "wake_up")


def _accepted(answer: Answer, call: str) -> Answer:
    if answer.status != 200:
        raise LaunchFailed(
            f"{call} returned status {answer.status}: vLLM has it with --enable-sleep-mode and"
            " VLLM_SERVER_DEV_MODE=1"
        )
    return answer
