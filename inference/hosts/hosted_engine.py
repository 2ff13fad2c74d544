"""An engine in a child process as the API process sees it: its sequences there, and what it tells of them.

Holds no model and imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from inference.engine import EngineStatistics, ModelInfo
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.hosts.engine_life import EngineLife
from inference.hosts.host_process import HostKind, HostWaits
from inference.hosts.host_protocol import (
    CancelSequence,
    Event,
    ProtocolBroken,
    Ready,
    RefusedEvent,
    StepReport,
    ToParent,
    sequence_event,
    start_message,
)
from inference.hosts.hosted_life import HostedLife
from inference.limits import EngineLimits
from inference.prefix_hint import PrefixHint
from inference.sequence_stream import BufferedStream


class HostedEngine(EngineLife, HostedLife):
    """One model in one child process. See `Engine` for the contract."""

    def __init__(self, model: ModelInfo, limits: EngineLimits, waits: HostWaits, kind: HostKind) -> None:
        """Starts nothing."""
        self._kind = kind
        super().__init__(replace(model, continues_output=True), limits, waits, kind.block_tokens)

    def _submit(self, stream: BufferedStream) -> None:
        assert self._host is not None, "the engine is ready"
        if all(other.ended for other in self._streams.values() if other is not stream):
            self._watchdog.heard()  # an idle host had no reason to report, whoever has yet to read what it has told
        self._host.send(start_message(stream.number, stream.request))

    def _send_cancel(self, stream: BufferedStream) -> None:
        if self._host is not None:
            self._host.send(CancelSequence(stream.number))

    def _host_ready(self, message: Ready, loading_time_s: float) -> None:
        self._hint = PrefixHint(message.kv_block_count, self._block_tokens)
        self._ready(message.kv_block_count, loading_time_s)

    def _receive(self, message: ToParent) -> None:
        if not isinstance(message, StepReport):
            raise ProtocolBroken(f"unexpected: {message!r}"[:200])
        self._watchdog.heard()
        self._statistics = EngineStatistics(*message.statistics)
        for event in message.events:
            self._dispatch(event)

    def _owes_answers(self) -> bool:
        return any(not stream.ended for stream in self._streams.values())

    def _dispatch(self, event: Event) -> None:
        stream = self._streams.get(event.number)
        if stream is None:
            return  # its caller has left
        if isinstance(event, RefusedEvent):
            refused: EngineError = RequestImpossible(event.message, event.field)
            if event.failed:
                refused = EngineFailed(event.message)
            elif event.overloaded:
                refused = EngineOverloaded(event.message, self._overload_wait_s())
            stream.fail(refused)
            return
        self._take(stream, sequence_event(event))
