"""What the bodies of all requests share: how they are read, and the parameters that stand in several of them.

A body is parsed once, into a value of the types that are written here, or refused with the parameter that is wrong. The rule for
what is accepted: a parameter is taken if what it asks for is what happens. Nothing is ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from weir.v1 import inference_service_pb2 as pb

from api.core.violations import Violations
from api.core.wire import LABEL_COUNT_MAX
from api.generation.decoding import STOP_TOKEN_ID_COUNT_MAX
from api.openai.refusals import HttpFault, wrong_parameter

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

# `flex` is OpenAI's tier for what may wait, at a lower price: here the batch tier.
TIERS: Mapping[str, pb.ServiceTier.ValueType] = {
    "auto": pb.SERVICE_TIER_INTERACTIVE,
    "default": pb.SERVICE_TIER_INTERACTIVE,
    "flex": pb.SERVICE_TIER_BATCH,
}
# How fields of a start frame are called in all of the APIs; each API adds its own.
COMMON_NAMES: dict[str, str] = {
    "sampling.temperature": "temperature",
    "sampling.seed": "seed",
    "conversation.thinking": "chat_template_kwargs.enable_thinking",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.min_p": "min_p",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.presence_penalty": "presence_penalty",
    "sampling.frequency_penalty": "frequency_penalty",
    "sampling.logit_bias": "logit_bias",
    "min_output_tokens": "min_tokens",
    "labels": "metadata",
    "labels['user']": "user",
    "labels['safety_identifier']": "safety_identifier",
    "tier": "service_tier",
}

_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>[^`]*)`(?: in `(?P<outer>[^`]*)`)?$", re.DOTALL)  # the second form of a key
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)

Body = TypeVar("Body", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


# What is taken of parameters that ask for more than there is, and why no more is.
NO_EFFORT = (
    "none",
    "what a model thinks is text of its answer; chat_template_kwargs.enable_thinking switches it where the model has a switch",
)
NO_VERBOSITY = ("medium", "how much a model says is for its prompt and max_tokens to say")
NO_RETENTION = ("in_memory", "what is cached stays as long as there is room")


class ChatTemplateKwargs(Struct, forbid_unknown_fields=True):
    """Variables of the chat template that a request may set, by either of the names that templates have for the switch."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


def fill_thinking(start: pb.StartFrame, given: ChatTemplateKwargs | None) -> None:
    """Raises: InvalidRequest if both names are given."""
    if given is None or (given.enable_thinking is None and given.thinking is None):
        return
    if given.enable_thinking is not None and given.thinking is not None:
        raise wrong_parameter("chat_template_kwargs", "takes enable_thinking or thinking, not both: they are one switch")
    start.conversation.thinking = bool(given.thinking if given.enable_thinking is None else given.enable_thinking)


class SharedParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters that every generating API has. The second group are not OpenAI's: send them as `extra_body`."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None  # what is cached is found by its content
    store: bool | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, understood. starts: what is to run, one for each prompt. names: what errors call its parameters."""

    starts: Sequence[pb.StartFrame]
    model: str
    streams: bool
    includes_usage: bool
    names: Mapping[str, str]
    choice_count: int = 1  # of each prompt


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body of a request. Raises: HttpFault if it is not JSON, InvalidRequest naming the first parameter that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _violation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpFault(400, f"the body is not valid JSON: {error}", "invalid_json") from None


def _violation(message: str) -> Exception:
    """A violation as msgspec words it: what is wrong, and where."""
    what, param = message, ""
    if (found := _PATH.match(message)) is not None:
        what, param = found["what"], (found["outer"] or found["path"]).removeprefix("$").removeprefix(".")
    for pattern, remedy in ((_UNKNOWN, "is not a parameter of this API; leave it out"), (_MISSING, "is required")):
        if (named := pattern.match(what)) is not None:
            return wrong_parameter(f"{param}.{named['name']}".removeprefix(".")[:200], remedy)
    return wrong_parameter(param, what[:1].lower() + what[1:])


def fill_shared(start: pb.StartFrame, given: SharedParameters) -> None:
    """Put into a start frame what `SharedParameters` has to say of it. Raises: InvalidRequest."""
    check_model_name(given.model)
    check_count(given.metadata, "metadata", LABEL_COUNT_MAX)
    check_count(given.stop_token_ids, "stop_token_ids", STOP_TOKEN_ID_COUNT_MAX)
    start.model = given.model
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        if (value := getattr(given, name)) is not None:
            setattr(start.sampling, name, value)
    start.ignore_eos = bool(given.ignore_eos)
    start.min_output_tokens = given.min_tokens or 0
    start.stop_token_ids.extend(given.stop_token_ids or ())
    start.labels.update(_labels(given))
    if given.service_tier is not None:
        if given.service_tier not in TIERS:
            raise wrong_parameter("service_tier", f"must be one of {', '.join(TIERS)}")
        start.tier = TIERS[given.service_tier]


def check_model_name(model: str) -> None:
    """Raises: InvalidRequest for a name that no model has."""
    wrong = Violations()
    wrong.check(bool(model), "model", "must name a model; GET /v1/models tells which there are")
    wrong.check_text(model, "model")
    wrong.raise_if_any()


def check_shared(given: SharedParameters) -> None:
    """Refuse what asks for something that does not happen here. Raises: InvalidRequest."""
    if given.store:
        raise wrong_parameter("store", "nothing is stored here: leave it out or send false")
    options = given.stream_options
    if options is not None and not given.stream:
        raise wrong_parameter("stream_options", "belongs to a stream: set stream to true or leave it out")
    if options is not None and options.include_obfuscation:
        raise wrong_parameter("stream_options.include_obfuscation", "is not supported: leave it out or send false")


def check_count(elements: Sized | None, param: str, most: int) -> None:
    """As many as there may be, before any is looked at. Raises: InvalidRequest."""
    if elements is not None and len(elements) > most:
        raise wrong_parameter(param, f"at most {most} are allowed, not {len(elements)}")


def refuse_given(given: Struct, *names: str) -> None:
    """Refuse parameters of OpenAI's API that are not served, unless they ask for nothing. Raises: InvalidRequest."""
    for name in names:
        if getattr(given, name) not in (None, False, [], {}):
            raise wrong_parameter(name, "is not supported: leave it out")


def refuse_unless(given: object, param: str, taken: str, remedy: str) -> None:
    """Refuse every value of a parameter but the one that asks for what happens. Raises: InvalidRequest."""
    if given not in (None, taken):
        raise wrong_parameter(param, f"must be {taken} or left out: {remedy}")


def tier_name(start: pb.StartFrame) -> str:
    """The service tier of a request as OpenAI calls it."""
    return "flex" if start.tier == pb.SERVICE_TIER_BATCH else "default"


def _labels(given: SharedParameters) -> dict[str, str]:
    """Metadata as labels, and beside it who the end user is."""
    labels = dict(given.metadata or {})
    for name in ("user", "safety_identifier"):
        value: str | None = getattr(given, name)
        if value:
            if labels.get(name, value) != value:
                raise wrong_parameter(name, "stands in metadata as well, with another value: leave one of them out")
            labels[name] = value
    return labels
