"""Messages survive the wire unchanged, and anything else is refused."""

from __future__ import annotations

import pytest

from inference import engine
from inference.kv_blocks import KV_BLOCK_TOKENS, PrefixHint
from inference.workers import protocol
from tests.inference.running import make_request

TIMINGS = engine.EngineTimings(1.5, 2.5, 3.5)


def test_a_request_crosses_unchanged_but_for_its_id() -> None:
    request = make_request(
        [1, 2, 3],
        7,
        sampling=engine.SamplingParams(
            0.5, 0.9, 40, -(1 << 63), 0.1, 1.2, 0.3, -0.4, ((3, 1.5), (9, -100.0)), 20
        ),
        stop_sequences=("a", "🙂"),
        stop_token_ids=frozenset({5, 6}),
        min_output_tokens=4,
        cache_salt="tenant",
        response_format=engine.ResponseFormat(engine.GrammarKind.REGEX, "a+"),
        choice_count=3,
        rank=-2.5,
    )

    message = protocol.decoder_to_worker().decode(
        protocol.encode(protocol.StartSequence(9, request))[protocol.LENGTH_PREFIX.size :]
    )

    assert isinstance(message, protocol.StartSequence)
    crossed = message.request
    assert message.number == 9
    assert crossed.prompt_token_ids == request.prompt_token_ids
    assert crossed.sampling == request.sampling
    assert crossed.stop == request.stop
    assert crossed.cache_salt == "tenant"
    assert crossed.response_format == request.response_format
    assert crossed.choice_count == 3
    assert crossed.rank == -2.5


@pytest.mark.parametrize(
    "event",
    [
        engine.Scheduled(32),
        engine.TokensGenerated((1, 2), "ab🙂"),
        engine.TokensGenerated(
            (7,),
            "x",
            (
                engine.TokenLogprobs(
                    engine.TokenLogprob(7, -0.5),
                    (engine.TokenLogprob(3, -0.25), engine.TokenLogprob(7, -0.5)),
                ),
            ),
        ),
        engine.TokensGenerated((1,), "b", (), 3),
        engine.ChoiceFinished(2, engine.EngineFinishReason.STOP_SEQUENCE, "rest"),
        *(
            engine.SequenceFinished(reason, "rest", 10, 0, 3, TIMINGS)
            for reason in engine.EngineFinishReason
        ),
    ],
)
def test_an_event_crosses_unchanged(event: engine.SequenceEvent) -> None:
    statistics = engine.EngineStatistics(*range(1, 13))
    report = protocol.StepReport(
        [(4, event), (5, engine.SequenceRefused("full", overloaded=True))], statistics
    )

    crossed = protocol.decoder_to_parent().decode(
        protocol.encode(report)[protocol.LENGTH_PREFIX.size :]
    )

    assert isinstance(crossed, protocol.StepReport)
    assert crossed.events == [(4, event), (5, engine.SequenceRefused("full", overloaded=True))]
    assert crossed.statistics == statistics


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xa5start\x01", b"\x91\xa7unknown"])
def test_invalid_messages_are_refused(body: bytes) -> None:
    with pytest.raises(protocol.ProtocolBroken):
        protocol.decoder_to_worker().decode(body)
    with pytest.raises(protocol.ProtocolBroken):
        protocol.decoder_to_parent().decode(body)


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(protocol.ProtocolBroken, match="exceeds"):
        protocol.split(bytearray(protocol.LENGTH_PREFIX.pack(protocol.MESSAGE_BYTES_MAX + 1)))


def test_messages_are_whole_however_the_bytes_come() -> None:
    bodies = [b"abc", b"", b"x" * 300, b"de"]
    sent = (
        b"".join(protocol.LENGTH_PREFIX.pack(len(body)) + body for body in bodies)
        + protocol.LENGTH_PREFIX.pack(10)
        + b"abc"
    )
    for size in (1, 2, 3, 5, 7, 100, len(sent)):
        received, taken = bytearray(), []
        for begin in range(0, len(sent), size):
            received += sent[begin : begin + size]
            taken += protocol.split(received)
        assert taken == bodies, "one that has not come to its end is not taken"
        assert received == protocol.LENGTH_PREFIX.pack(10) + b"abc"


def test_the_hint_knows_what_was_noted_and_forgets_the_oldest() -> None:
    hint = PrefixHint(4, KV_BLOCK_TOKENS)
    hint.note(range(64), "a")

    assert hint.predict(range(64), "a") == 48, "the last token is always computed"
    assert hint.predict([*range(40), 99, *range(50)], "a") == 32
    assert hint.predict(range(64), "b") == 0
    hint.note(range(100, 132), "a")
    assert hint.predict(range(64), "a") == 32, "the tail is forgotten before the head"
    hint.clear()
    assert hint.predict(range(64), "a") == 0
