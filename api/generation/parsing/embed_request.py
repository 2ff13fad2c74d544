"""Parsing, validation and tokenization of `Embed` requests, and construction of responses."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core import wire
from api.core.errors import InputsTooLong, LongInput
from api.core.messages import quota_statuses
from api.core.texts import Violations
from api.core.wire import payload_hash
from api.generation.delivery.encoding import varint
from api.generation.delivery.frames import set_settlement
from api.generation.parsing.text_work import INLINE_COST_MAX, MESSAGE_COST_CHARS
from api.generation.parsing.tokenizing import TextJob, check_chars
from api.queue.fair_queue import ServiceTier
from inference.engine import ModelInfo, Vector
from inference.text.tokenizer import TokenLimitExceeded
from metering.holds.operations import Admitted, Settled

VECTOR_TAG = b"\x0a"  # tag of `Embedding.vector`: field 1, packed


@dataclass(frozen=True, slots=True)
class ValidEmbed:
    """`Embed` request that is valid by itself; the limits of the model are checked later.

    `inputs` are texts, or token ids that are embedded unchanged.
    """

    request_id: uuid.UUID
    payload_hash: bytes
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    truncates: bool
    labels: dict[str, str]
    tier: ServiceTier
    end_user: str

    @property
    def operation(self) -> str:
        """Name of the operation in OpenTelemetry's semantic conventions."""
        return "embeddings"


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids of one text. If `truncated`, its end was cut off."""

    token_ids: tuple[int, ...]
    truncated: bool


def parse_embed(message: pb.EmbedRequest) -> ValidEmbed:
    """Parse a request and check everything that does not depend on the model.

    Raises InvalidRequest, which lists every violation.
    """
    request_id = wire.parse_request_id(message.request_id)
    wrong = Violations()
    wrong.check_text(message.model, "model", missing=wire.MODEL_MISSING)
    wrong.check(bool(message.inputs), "inputs", "must hold at least one text")
    for index, each in enumerate(message.inputs):
        check_input(each, f"inputs[{index}]", wrong)
    known = message.truncation in pb.Truncation.values()
    wrong.check(known, "truncation", "must be TRUNCATION_NONE or TRUNCATION_END")
    labels = wire.check_purpose(message, wrong)
    wrong.raise_if_any()
    return ValidEmbed(
        request_id=request_id,
        payload_hash=hash_of(message),
        model=message.model,
        inputs=tuple(each.text or tuple(each.token_ids.ids) for each in message.inputs),
        truncates=message.truncation == pb.TRUNCATION_END,
        labels=labels,
        tier=wire.TIERS[message.tier],
        end_user=message.end_user,
    )


def check_input(message: pb.EmbedInput, field: str, wrong: Violations) -> None:
    """Check that an input is set and not empty."""
    match message.WhichOneof("kind"):
        case "text":
            wrong.check(bool(message.text), f"{field}.text", "must not be empty")
        case "token_ids":
            wrong.check(
                bool(message.token_ids.ids),
                f"{field}.token_ids.ids",
                "must hold at least one token id",
            )
        case _:
            wrong.check(False, field, "one of text and token_ids must be set")


def check_against_model(request: ValidEmbed, model: ModelInfo, input_count_max: int) -> None:
    """Check the number of inputs and their token ids against the model. Raises: InvalidRequest."""
    wrong = Violations()
    count = len(request.inputs)
    wrong.check(
        count <= input_count_max,
        "inputs",
        f"this model takes at most {input_count_max} in one call, got {count}",
    )
    size = model.vocabulary_size
    for index, given in enumerate(request.inputs):
        if not isinstance(given, str):
            inside = min(given) >= 0 and max(given) < size
            wrong.check(
                inside, f"inputs[{index}].token_ids.ids", f"must each be from 0 to {size - 1}"
            )
    wrong.raise_if_any()


def hash_of(message: pb.EmbedRequest) -> bytes:
    """Hash all fields except the id, to detect an id that is reused with another payload.

    The hash never equals that of a start frame.
    """
    payload = pb.EmbedRequest()
    payload.CopyFrom(message)
    payload.ClearField("request_id")
    return payload_hash(b"Embed\0" + payload.SerializeToString(deterministic=True))


def embed_response(
    texts: Sequence[TokenizedText],
    vectors: Sequence[Vector],
    admitted: Admitted,
    settled: Settled,
    timings: Mapping[str, float],
) -> pb.EmbedResponse:
    """Build the response of a settled request."""
    response = pb.EmbedResponse(
        timings=types_pb2.Timings(**timings),
        price_version=admitted.prices.version,
        quotas=quota_statuses(admitted.quotas),
    )
    set_settlement(settled, response)
    response.embeddings.extend(
        embedding_message(text, vector) for text, vector in zip(texts, vectors, strict=True)
    )
    return response


def embedding_message(text: TokenizedText, vector: Vector) -> pb.Embedding:
    """Convert one vector to a message.

    Parsing the bytes takes a ninth of the time that appending each number would.
    """
    floats = vector.tobytes()
    message = pb.Embedding.FromString(VECTOR_TAG + varint(len(floats)) + floats)
    message.token_count = len(text.token_ids)
    message.truncated = text.truncated
    return message


def token_count_of(texts: list[TokenizedText]) -> int:
    """Count the tokens of all texts."""
    return sum(len(text.token_ids) for text in texts)


async def tokenize_inputs(
    request: ValidEmbed, job: TextJob, check_room: Callable[[int], Awaitable[None]] | None = None
) -> tuple[list[TokenizedText], float]:
    """Tokenize all inputs; return their token ids and the processor time spent, in seconds.

    A text that may be truncated is tokenized only up to the model's limit. `check_room` is awaited
    once before long texts are tokenized, with a lower bound of their tokens. Raises InputsTooLong,
    which lists every text that is too long; PromptTooLarge, PreparationLimit, Overloaded.
    """
    limit, tokenizer = job.window, job.tokenizer
    truncates = request.truncates

    def tokenize(index: int, given: str | tuple[int, ...]) -> TokenizedText | LongInput:
        if not isinstance(given, str):
            if len(given) > limit and not truncates:
                return LongInput(index, len(given))
            return TokenizedText(given[:limit], truncated=len(given) > limit)
        if truncates:
            ids, truncated = tokenizer.encode_within(given, limit)
            return TokenizedText(ids, truncated=truncated)
        try:
            ids = tokenizer.encode(given, token_count_max=limit)
        except TokenLimitExceeded as exceeded:
            return LongInput(index, exceeded.least_token_count, is_least=True)
        return (
            LongInput(index, len(ids)) if len(ids) > limit else TokenizedText(ids, truncated=False)
        )

    def tokenize_all() -> list[TokenizedText]:
        found = [tokenize(index, given) for index, given in enumerate(request.inputs)]
        if long := [each for each in found if isinstance(each, LongInput)]:
            raise InputsTooLong(long, limit)
        return [each for each in found if isinstance(each, TokenizedText)]

    texts = [given for given in request.inputs if isinstance(given, str)]
    cost = sum([len(text) + MESSAGE_COST_CHARS for text in texts])
    if cost <= INLINE_COST_MAX:
        return tokenize_all(), 0.0
    if not truncates:
        for index, given in enumerate(request.inputs):
            if isinstance(given, str):
                check_chars(f"inputs[{index}]", len(given), tokenizer.chars_max(limit), limit)
    with job.work.permit(job.payer, cost):
        if check_room is not None:
            await check_room(1)
        return await job.work.run(job.payer.organization_id, cost, tokenize_all)
