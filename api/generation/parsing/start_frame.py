"""Parsing and validation of start frames, and of the prompts of `CountTokens`.

All violations of a message are reported together, by field.
"""

from __future__ import annotations

import uuid
from collections.abc import Set
from operator import attrgetter, itemgetter

import msgspec
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import PromptTooLong
from api.core.texts import Violations
from api.core.wire import (
    MODEL_MISSING,
    TIERS,
    check_purpose,
    parse_request_id,
    payload_hash,
    seconds_of,
)
from api.generation.parsing.conversation import Prompt, check_prompt, parse_prompt, thinking_of
from api.generation.parsing.decoding import (
    NO_OVERRIDES,
    NO_STOP_RULES,
    SamplingOverrides,
    StopRules,
    check_decoding,
    check_stop,
    parse_beam_search,
    parse_response_format,
    parse_sampling,
    parse_stop,
)
from api.generation.parsing.tools import (
    NO_TOOLS,
    ToolUse,
    check_tool_use,
    check_tools,
    parse_tool_use,
    parse_tools,
)
from api.generation.request.limits import Cost, check_cost, cost_of
from api.queue.fair_queue import ServiceTier
from inference.engine import BeamSearchParams, ResponseFormat
from inference.text.tokenizer import ChatMessage, Thinking
from inference.text.tools import Tool
from metering.receipts.subjects import NO_LABELS, Labels

# Most frames have no others.
# Of the pairs that `ListFields` returns
FIELD, NAME = itemgetter(0), attrgetter("name")
PLAIN_FIELDS = frozenset({"model", "conversation", "text", "token_ids", "max_output_tokens"})
SAMPLING_FIELDS = frozenset({"sampling", "top_logprobs", "prompt_logprobs"})
STOP_FIELDS = frozenset(StopRules.__struct_fields__)
DECODING_FIELDS = SAMPLING_FIELDS | {"response_format", "beam_search", "choice_count"}
COPIED_FIELDS = frozenset(
    {
        "choice_count",
        "usage_interval_tokens",
        "initial_credit_tokens",
        "region",
        "end_user",
        "no_fallback",
    }
)
TOOL_FIELDS = frozenset({"tools", "tool_choice"})
LIMIT_FIELDS = frozenset(
    {
        "region",
        "usage_interval_tokens",
        "start_timeout",
        "keep_on_disconnect",
        "initial_credit_tokens",
        "max_cost",
    }
)
PURPOSE_FIELDS = frozenset({"tier", "labels", "end_user"})


class ValidStart(msgspec.Struct):
    """Start frame that is valid by itself; model, context window and quotas are checked later.

    Only `model` changes: it is the name as sent, and after routing the canonical name; and
    `requested_model`, the canonical name of the requested model while `model` is its fallback.
    `given_id` is the request id as the client writes it, for use in responses.
    """

    request_id: uuid.UUID
    given_id: str
    payload_hash: bytes
    model: str
    prompt: Prompt
    stop: StopRules = NO_STOP_RULES
    thinking: Thinking = None
    sampling: SamplingOverrides = NO_OVERRIDES
    response_format: ResponseFormat | None = None
    choice_count: int = 1
    beam_search: BeamSearchParams | None = None
    usage_interval_tokens: int | None = None
    labels: Labels = NO_LABELS
    end_user: str = ""
    tier: ServiceTier = ServiceTier.INTERACTIVE
    start_timeout_s: float | None = None
    # How long it runs, and is kept, without a subscription; None: not at all.
    keep_s: float | None = None
    initial_credit_tokens: int | None = None
    max_cost: Cost | None = None
    region: str = ""
    tool_use: ToolUse = NO_TOOLS
    no_fallback: bool = False
    requested_model: str = ""

    @property
    def operation(self) -> str:
        """Name of the operation in OpenTelemetry's semantic conventions."""
        return (
            "chat" if self.prompt and isinstance(self.prompt[0], ChatMessage) else "text_completion"
        )


def parse_start(
    request_id: str, start: pb.StartFrame, window_tokens_max: int | None = None
) -> ValidStart:
    """Parse a start frame and check everything that does not depend on the model.

    `window_tokens_max` is the largest context window of any model. Raises PromptTooLong, or
    InvalidRequest, which lists every violation.
    """
    parsed_id = parse_request_id(request_id)
    wrong = Violations()
    if window_tokens_max is not None and (count := len(start.token_ids.ids)) > window_tokens_max:
        # Before they are copied: a million ids take a tenth of a second.
        raise PromptTooLong(count, None, window_tokens_max)
    # Absent fields are valid, and most frames lack most fields: check only present ones.
    present = set(map(NAME, map(FIELD, start.ListFields())))
    wrong.check_text(start.model, "model", missing=MODEL_MISSING)
    check_prompt(start, wrong)
    labels = NO_LABELS
    has_options = not present <= PLAIN_FIELDS
    if has_options and not present.isdisjoint(DECODING_FIELDS):
        check_decoding(start, wrong)
    if has_stop := not present.isdisjoint(STOP_FIELDS):
        check_stop(start, wrong)
    if has_options:
        if not present.isdisjoint(TOOL_FIELDS):
            check_tool_use(start, wrong)
        if not present.isdisjoint(LIMIT_FIELDS):
            check_limits(start, wrong)
        if not present.isdisjoint(PURPOSE_FIELDS):
            labels = check_purpose(start, wrong)
    wrong.raise_if_any()
    valid = ValidStart(
        parsed_id,
        request_id,
        payload_hash(start.SerializeToString(deterministic=True)),
        start.model,
        parse_prompt(start),
        parse_stop(start, present) if has_stop else NO_STOP_RULES,
        thinking_of(start) if "conversation" in present else None,
    )
    if has_options:
        set_options(valid, start, present)
        valid.labels = labels
    return valid


def set_options(valid: ValidStart, start: pb.StartFrame, present: Set[str]) -> None:
    """Convert the fields that few frames have, of a frame that passed all checks."""
    for name in COPIED_FIELDS & present:
        setattr(valid, name, getattr(start, name))
    if not present.isdisjoint(SAMPLING_FIELDS):
        valid.sampling = parse_sampling(start)
    if "response_format" in present:
        valid.response_format = parse_response_format(start)
    if "beam_search" in present:
        valid.beam_search = parse_beam_search(start)
    if "start_timeout" in present:
        valid.start_timeout_s = seconds_of(start.start_timeout)
    if "keep_on_disconnect" in present:
        valid.keep_s = seconds_of(start.keep_on_disconnect)
    if "max_cost" in present:
        valid.max_cost = cost_of(start.max_cost)
    if "tools" in present:
        valid.tool_use = parse_tool_use(start)
    valid.tier = TIERS[start.tier]


def check_limits(start: pb.StartFrame, wrong: Violations) -> None:
    """Check the fields of a start frame that concern limits, region, credit and reconnection."""
    if start.region:
        wrong.check_text(start.region, "region")
    if start.HasField("usage_interval_tokens"):
        interval = start.usage_interval_tokens
        wrong.check(interval >= 1, "usage_interval_tokens", f"must be at least 1, got {interval}")
    if start.HasField("start_timeout"):
        wrong.check(seconds_of(start.start_timeout) > 0, "start_timeout", "must be more than 0 s")
    if start.HasField("keep_on_disconnect"):
        wrong.check(
            seconds_of(start.keep_on_disconnect) > 0,
            "keep_on_disconnect",
            "must be more than 0 s; leave it unset for none",
        )
    if start.HasField("initial_credit_tokens"):
        credit = start.initial_credit_tokens
        wrong.check(credit >= 0, "initial_credit_tokens", f"must be at least 0, got {credit}")
    if start.HasField("max_cost"):
        check_cost(start.max_cost, "max_cost", wrong)


def parse_count_tokens(message: pb.CountTokensRequest) -> tuple[Prompt, tuple[Tool, ...]]:
    """Parse the prompt and the tools that are shown with it. Raises: InvalidRequest."""
    wrong = Violations()
    wrong.check_text(message.model, "model", missing=MODEL_MISSING)
    check_prompt(message, wrong)
    check_tools(message.tools, wrong)
    right = not message.tools or message.WhichOneof("prompt") != "text"
    wrong.check(right, "tools", "require a conversation, which shows them to the model")
    wrong.raise_if_any()
    return parse_prompt(message), parse_tools(message.tools)
