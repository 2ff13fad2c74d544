"""The clients: they ask all the time, read whatever comes, and write down every token that they get."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from weir_client import AsyncClient, WeirError

LANE_COUNT = 8  # connections at a time
TOGETHER_MAX = 4  # requests at once on one connection
OUTPUT_TOKENS = (1, 7, 40, 150, 400)  # from an answer that is over at once to one that outlives several kills
CANCELLED_SHARE = 0.15
PAUSE_S = 0.05  # after a failure: where nobody listens, asking faster tells nothing
REQUEST_TIMEOUT_S = 60.0  # an answer that takes longer is an error of ours, and is told as one
WORDS = ("hotel", "river", "station", "breakfast", "quiet", "harbour", "late", "family")


@dataclass(slots=True)
class Asked:
    """One request as its client knows it. told: the delivered tokens in its end, None if it had none; failure: of what it broke."""

    request_id: str
    api: int
    began_at: float
    ended_at: float = -math.inf
    received: int = 0
    told: int | None = None
    failure: str = ""


class Load:
    """Keeps asking from `run` until `stop`; may run again."""

    def __init__(self, addresses: Sequence[str], api_key: str, model: str, rng: random.Random) -> None:
        self.asked: list[Asked] = []
        self._addresses = addresses
        self._api_key = api_key
        self._model = model
        self._rng = rng
        self._stopping = False

    @property
    def received(self) -> int:
        return sum(each.received for each in self.asked)

    def begin(self) -> None:
        self._stopping = False

    def stop(self) -> None:
        """Ask for nothing more; what was asked for is read to its end."""
        self._stopping = True

    async def reached(self, token_count: int) -> None:
        """Wait until the clients have so many tokens."""
        while True:
            if self.received >= token_count:
                return
            await asyncio.sleep(PAUSE_S)

    async def run(self) -> None:
        """Until `stop`, and all answers have ended."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(LANE_COUNT):
                tasks.create_task(self._lane(number), name=f"client {number}")

    async def _lane(self, number: int) -> None:
        while not self._stopping:
            api = self._rng.randrange(len(self._addresses))
            async with AsyncClient(self._addresses[api], self._api_key, max_retries=self._rng.randrange(3)) as client:
                answers = [self._ask(client, api) for _ in range(self._rng.randint(1, TOGETHER_MAX))]
                ends = await asyncio.gather(*answers)
            if not any(ends):
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, client: AsyncClient, api: int) -> bool:
        """One request, read to its end; whether it had one."""
        asked = Asked(str(uuid.uuid4()), api, time.monotonic())
        self.asked.append(asked)
        wanted = self._rng.choice(OUTPUT_TOKENS)
        patience = self._rng.randint(0, wanted) if self._rng.random() < CANCELLED_SHARE else None
        prompt = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 60)))
        try:
            generation = client.generate(
                self._model,
                prompt,
                max_output_tokens=wanted,
                ignore_eos=True,
                request_id=asked.request_id,
                timeout=REQUEST_TIMEOUT_S,
                # What a server keeps for a client that comes back counts as delivered, and dies with it: not what is counted here.
                keep_on_disconnect=None,
            )
            if patience == 0:
                generation.start()
                generation.cancel()
            async for delta in generation:
                asked.received += len(delta.token_ids)
                if patience is not None and asked.received >= patience:
                    generation.cancel()
            asked.told = generation.result.usage.delivered_token_count
        except WeirError as error:
            asked.failure = f"{type(error).__name__}: {error.reason}"
            if error.partial is not None and error.partial.usage is not None:
                asked.told = error.partial.usage.delivered_token_count
        asked.ended_at = time.monotonic()
        return asked.told is not None
