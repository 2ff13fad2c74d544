"""Parameters outside the served APIs: some are refused, the others ignored and named to the client.

A parameter that would change the answer is refused: those of the other APIs, the extensions of
other servers in `CHANGING`, and names that resemble a served one. Others are hints and telemetry:
they are ignored, and the header `weir-ignored-parameters` names them.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.inspect import ListType, StructType, UnionType

from api.openai.refusals import invalid_parameter

IGNORED_HEADER = "weir-ignored-parameters"
NAMES_MAX = 20  # in the header
# Different names that a body may bring beside the parameters; each is compared with all of these.
UNKNOWN_COUNT_MAX = 64
SIMILAR_CHARS_MAX = 32  # a longer name resembles no parameter
SIMILARITY_MIN = 0.85  # "temprature" and "temperature" have 0.95
VISIBLE = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
EMPTY: tuple[object, ...] = (None, False, [], {}, "")  # requests nothing

FORMAT = "use response_format with a json_schema"
SAMPLER = "the engines do not have this sampler"
# Extensions of other servers that change the answer: the value that changes nothing, and the remedy
CHANGING: Mapping[str, tuple[object, str]] = {
    "add_special_tokens": (None, "the chat template or the model's tokenizer decides"),
    "allowed_token_ids": (None, "use logit_bias or response_format"),
    "bad_words": (None, "use logit_bias"),
    "chat_template": (None, "the model's own template is used"),
    "container": (None, "no tool runs on the server"),
    "custom_logit_processor": (None, "use logit_bias"),
    "documents": (None, "put them into a message"),
    "dry_multiplier": (0, SAMPLER),
    "ebnf": (None, "use gRPC with response_format.lark"),
    "grammar": (None, "use gRPC with response_format.lark"),
    "guided_choice": (None, FORMAT),
    "guided_grammar": (None, "use gRPC with response_format.lark"),
    "guided_json": (None, FORMAT),
    "guided_regex": (None, "use gRPC with response_format.regex"),
    "include_stop_str_in_output": (None, "the output ends before a stop sequence"),
    "input_ids": (None, "send token ids as prompt of /v1/completions"),
    "json_schema": (None, FORMAT),
    "length_penalty": (1, "beam search is served over gRPC"),
    "logits_processors": (None, "use logit_bias"),
    "lora_path": (None, "name the adapter as model"),
    "mcp_servers": (None, "no tool runs on the server"),
    "min_new_tokens": (0, "use min_tokens"),
    "mirostat": (0, SAMPLER),
    "mm_processor_kwargs": (None, "send text"),
    "no_stop_trim": (None, "the output ends before a stop sequence"),
    "output_config": (None, FORMAT),
    "personality": (None, "put it into instructions"),
    "regex": (None, "use gRPC with response_format.regex"),
    "return_hidden_states": (None, "not served"),
    "separate_reasoning": (True, "thinking is always apart from the text"),
    "session_params": (None, "send the whole conversation"),
    "skip_special_tokens": (True, "special tokens are never part of the text"),
    "spaces_between_special_tokens": (True, "special tokens are never part of the text"),
    "stop_sequences": (None, "use stop"),
    "structural_tag": (None, FORMAT),
    "structured_outputs": (None, FORMAT),
    "system": (None, "send a message with the role system"),
    "tfs_z": (1, SAMPLER),
    "thinking": (None, "use chat_template_kwargs"),
    "top_a": (0, SAMPLER),
    "truncate_prompt_tokens": (None, "shorten the prompt: it is never cut"),
    "typical_p": (1, SAMPLER),
    "use_beam_search": (None, "beam search is served over gRPC"),
    "xtc_probability": (0, SAMPLER),
}  # fmt: skip
# Objects whose members all direct the answer, by path
CLOSED = frozenset({"chat_template_kwargs", "response_format", "text.format", "tool_choice"})
# Members of messages that direct the answer
DIRECTING = frozenset({"weight"})


@dataclass(frozen=True, slots=True)
class Shape:
    """Known members of a JSON value: of an object by name, of a list's elements."""

    members: Mapping[str, Shape] | None = None
    element: Shape | None = None


@dataclass(slots=True)
class Ignored:
    """Names of ignored parameters, each once, in the order of the body."""

    names: dict[str, None] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Add a name. Raises: InvalidRequest if there are too many."""
        self.names[name] = None
        check_unknown_count(len(self.names))

    def headers(self) -> dict[str, str]:
        """Return the header that names them, or none."""
        shown = [name if VISIBLE.fullmatch(name) else "?" for name in islice(self.names, NAMES_MAX)]
        if (more_count := len(self.names) - len(shown)) > 0:
            shown.append(f"and {more_count} more")
        return {IGNORED_HEADER: ", ".join(shown)} if shown else {}


def check_unknown_count(count: int) -> None:
    """Check the number of unknown parameters. Raises: InvalidRequest."""
    if count > UNKNOWN_COUNT_MAX:
        raise invalid_parameter(
            None,
            f"the body may have {UNKNOWN_COUNT_MAX} different parameters that this API does not"
            f" know, got {count} or more: leave them out",
        )


def without_unknown(
    body: bytes, kind: type[Struct], other_names: frozenset[str], ignored: Ignored
) -> bytes:
    """Return the body without parameters that this API does not have.

    other_names: parameters of the other APIs. ignored: receives their names. Raises: InvalidRequest
    for one that would change the answer; msgspec.DecodeError, RecursionError.
    """
    tree = msgspec.json.decode(body)
    shape = shape_of(kind)
    if isinstance(tree, dict) and shape.members is not None:
        unknown = [name for name in tree if name not in shape.members]
        check_unknown_count(len(unknown))
        for name in unknown:
            if is_ignored(name, tree.pop(name), shape.members, other_names):
                ignored.add(name)
        for name, value in tree.items():
            _strip(value, shape.members[name], name, ignored)
    return msgspec.json.encode(tree)


def is_ignored(
    name: str, value: object, known: Mapping[str, Shape], other_names: frozenset[str]
) -> bool:
    """Return whether an unknown parameter requests something that is ignored.

    Raises: InvalidRequest if it would change the answer.
    """
    harmless, remedy = CHANGING.get(name, (None, ""))
    if value in EMPTY or (name in CHANGING and value == harmless):
        return False
    if name in other_names:
        remedy = "is a parameter of another API; leave it out"
    elif name in CHANGING:
        remedy = f"is not supported: {remedy}"
    elif len(name) <= SIMILAR_CHARS_MAX and (
        similar := difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY_MIN)
    ):
        remedy = f"is not a parameter of this API; did you mean {similar[0]}?"
    else:
        return True
    raise invalid_parameter(name[:200], remedy)


def _strip(value: Any, shape: Shape, path: str, ignored: Ignored) -> None:
    """Remove unknown members below a value. Raises: InvalidRequest if one changes the answer."""
    if isinstance(value, list) and shape.element is not None:
        for each in value:
            _strip(each, shape.element, f"{path}[]", ignored)
    elif isinstance(value, dict) and shape.members is not None:
        for name in [name for name in value if name not in shape.members]:
            if value.pop(name) in EMPTY:
                continue
            if path in CLOSED or name in DIRECTING:
                raise invalid_parameter(
                    f"{path}.{name}"[:200], "is not a parameter of this API; leave it out"
                )
            ignored.add(f"{path}.{name}")
        for name, each in value.items():
            _strip(each, shape.members[name], f"{path}.{name}", ignored)


@functools.cache
def shape_of(kind: type[Struct]) -> Shape:
    """Return the shape of a body."""
    return _shape(msgspec.inspect.type_info(kind))


def _shape(info: msgspec.inspect.Type) -> Shape:
    match info:
        case StructType(fields=fields):
            return Shape({each.encode_name: _shape(each.type) for each in fields})
        case ListType(item_type=item):
            return Shape(element=_shape(item))
        case UnionType(types=types):
            shapes = [_shape(each) for each in types]
            return Shape(
                next((each.members for each in shapes if each.members is not None), None),
                next((each.element for each in shapes if each.element is not None), None),
            )
    return Shape()
