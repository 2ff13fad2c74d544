"""Engines and encoders that run while they are wanted: slots that take requests while they are cold, and start for them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType

from inference.engine import EmbeddingRequest, Embeddings, Encoder, Engine, GenerationRequest, SequenceStream
from inference.fleet.slot import FAULT_STANDS_S, OnDemandSlot, SlotTerms

__all__ = ["FAULT_STANDS_S", "OnDemandEncoder", "OnDemandEngine", "SlotTerms"]


class OnDemandEngine(OnDemandSlot[Engine]):
    """A slot for one engine at a time. See `Engine` for the contract.

    Unlike others it takes requests in `generate` while it is cold, and starts for them: what was ready a moment ago may have been
    closed since.
    """

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`."""
        engine = self._running()
        return 0 if engine is None else engine.predict_cached_token_count(prompt_token_ids, cache_salt)

    def generate(self, request: GenerationRequest) -> SlotSequence:
        """See `Engine.generate`; waits for the start if it is cold. Raises as `start` does, too."""
        return SlotSequence(self, request)


class OnDemandEncoder(OnDemandSlot[Encoder]):
    """A slot for one encoder at a time. See `Encoder` for the contract. It takes requests while it is cold, too."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """See `Encoder.embed`; waits for the start if it is cold. Raises as `start` does, too."""
        with self._in_use():
            encoder = await self.started()
            return await encoder.embed(request)


class SlotSequence:
    """One sequence in a slot, as a context manager: from entering it to leaving it the slot is in use."""

    def __init__(self, slot: OnDemandEngine, request: GenerationRequest) -> None:
        self._slot = slot
        self._request = request
        self._running: AbstractAsyncContextManager[SequenceStream]

    async def __aenter__(self) -> SequenceStream:
        self._slot.begin_use()
        try:
            self._running = (await self._slot.started()).generate(self._request)
            return await self._running.__aenter__()
        except BaseException:
            self._slot.end_use()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return await self._running.__aexit__(kind, error, trace)
        finally:
            self._slot.end_use()
