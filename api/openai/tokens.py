"""Tokenization and detokenization over HTTP, in the formats of other servers.

vLLM and SGLang send `prompt` or `messages` with `model`. llama.cpp sends `content`, and receives
tokens with their texts as `pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.request.registry import RequestRegistry
from api.openai import answers
from api.openai.conversations import Message
from api.openai.error_responses import check_count, invalid_parameter
from api.openai.parameters import (
    ChatParameters,
    ChatTemplateKwargs,
    TokenId,
    check_model_name,
    parse_chat,
)
from api.openai.tools import Choice, ToolParameter
from inference.text.tokenizer import Tokenizer
from metering.tenants.authentication import Principal

TEXT_COUNT_MAX = 128
# Tokens that become text in one piece, which takes some 50 ms.
DECODED_COUNT_MAX = 262_144
PART_TOKENS = 50_000  # that become JSON in one piece
FORMS = ("prompt", "content", "messages")


class TokenizeParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/tokenize`, with exactly one of `prompt`, `content` and `messages`.

    `model` may be left out if the API key can use only one. `with_pieces` and `return_token_strs`
    add the text of each token to the response.
    """

    api: ClassVar[str] = ""

    model: str | None = None
    prompt: str | list[str] | None = None
    content: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    tools: list[ToolParameter] | None = None
    tool_choice: Choice | None = None


class DetokenizeParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/detokenize`. `skip_special_tokens`, off by default, leaves out control tokens."""

    api: ClassVar[str] = ""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


def prompts_to_tokenize(
    requested: TokenizeParameters, model: str
) -> tuple[list[pb.CountTokensRequest], bool]:
    """Convert the prompts; return them, and if special tokens are added. Raises: InvalidRequest."""
    given = [name for name in FORMS if getattr(requested, name) is not None]
    if len(given) != 1:
        raise invalid_parameter(
            given[-1] if given else FORMS[0],
            f"must be sent alone: exactly one of {', '.join(FORMS)} is tokenized",
        )
    adds = requested.add_special_tokens
    if requested.messages is not None:
        if adds:
            raise invalid_parameter(
                "add_special_tokens",
                "must be false or left out with messages: the chat template writes these tokens",
            )
        return [_of_messages(requested, model)], True
    for name in ("continue_final_message", "tools", "chat_template_kwargs"):
        if getattr(requested, name):
            raise invalid_parameter(name, "requires messages: leave it out")
    if requested.content is not None:  # llama.cpp, which adds them only if asked to
        if requested.parse_special is False:
            raise invalid_parameter(
                "parse_special",
                "must be true or left out: control tokens in a plain prompt are control tokens",
            )
        adds = bool(adds or requested.add_special)
    prompt = requested.content if requested.prompt is None else requested.prompt
    texts = [prompt or ""] if prompt is None or isinstance(prompt, str) else prompt
    check_count(texts, "prompt", TEXT_COUNT_MAX)
    return [pb.CountTokensRequest(model=model, text=text) for text in texts], adds is not False


def _of_messages(requested: TokenizeParameters, model: str) -> pb.CountTokensRequest:
    chat = ChatParameters(
        model=model,
        messages=requested.messages or [],
        tools=requested.tools,
        tool_choice=requested.tool_choice,
        chat_template_kwargs=requested.chat_template_kwargs,
        add_generation_prompt=requested.add_generation_prompt,
        continue_final_message=requested.continue_final_message,
    )
    [start] = parse_chat(chat).starts
    shown = start.tools if start.tool_choice.mode != pb.TOOL_MODE_NONE else ()
    return pb.CountTokensRequest(model=model, conversation=start.conversation, tools=shown)


class ShownTokens(NamedTuple):
    """Tokens of one text in a response, as JSON. `strings` has their texts if requested."""

    token_count: int
    tokens: Raw
    strings: Raw | None


def shows_texts(requested: TokenizeParameters) -> bool:
    """Return whether the response shows the text of each token."""
    of_vllm = requested.content is None and requested.return_token_strs
    return bool(requested.with_pieces or of_vllm)


def shown_tokens(
    requested: TokenizeParameters, ids: Sequence[int], tokenizer: Tokenizer
) -> ShownTokens:
    """Encode the tokens of one text as the response shows them."""
    if not shows_texts(requested):
        return ShownTokens(len(ids), _json_of(ids, list), None)
    pieces: dict[int, str | list[int]] = {}
    for id_ in ids:
        if id_ not in pieces:
            pieces[id_] = piece_of(tokenizer, id_)
    if requested.content is not None:
        both = _json_of(ids, lambda part: [{"id": id_, "piece": pieces[id_]} for id_ in part])
        return ShownTokens(len(ids), both, None)
    texts = {id_: _text(piece) for id_, piece in pieces.items()}
    strings = _json_of(ids, lambda part: [texts[id_] for id_ in part])
    return ShownTokens(len(ids), _json_of(ids, list), strings)


def _json_of(ids: Sequence[int], shown: Callable[[Sequence[int]], list[Any]]) -> Raw:
    """Encode a list as JSON in parts, so that other threads can run in between."""
    parts = [
        answers.encode(shown(ids[at : at + PART_TOKENS]))[1:-1]
        for at in range(0, len(ids), PART_TOKENS)
    ]
    return Raw(b"[" + b",".join(parts) + b"]")


def tokenized_body(
    requested: TokenizeParameters, found: Sequence[ShownTokens], window: int
) -> dict[str, Any]:
    """Build the response for the tokens of one text, or of several as lists of lists."""
    first = found[0]
    if requested.content is not None:
        return {"tokens": first.tokens}
    if not isinstance(requested.prompt, list):
        return {
            "count": first.token_count,
            "max_model_len": window,
            "tokens": first.tokens,
            "token_strs": first.strings,
        }
    return {
        "count": [each.token_count for each in found],
        "max_model_len": window,
        "tokens": [each.tokens for each in found],
        "token_strs": [each.strings for each in found] if shows_texts(requested) else None,
    }


def piece_of(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """Return the text of a token, or its bytes if they are not valid UTF-8 on their own."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _text(piece: str | list[int]) -> str:
    return piece if isinstance(piece, str) else "".join(f"<0x{byte:02X}>" for byte in piece)


def check_decoded_count(requested: DetokenizeParameters) -> None:
    """Limit the number of tokens that are decoded at once. Raises: InvalidRequest."""
    if (count := len(requested.tokens)) > DECODED_COUNT_MAX:
        raise invalid_parameter(
            "tokens",
            f"must have at most {DECODED_COUNT_MAX} tokens, got {count}: send them in several"
            " requests",
        )


def detokenized_body(text: str) -> dict[str, str]:
    """Build the response with a text, under the names of vLLM, llama.cpp and SGLang."""
    return {"prompt": text, "content": text, "text": text}


def model_named(name: str | None, registry: RequestRegistry, principal: Principal) -> str:
    """Return the requested model, or the only one the API key may use. Raises: InvalidRequest."""
    if name:
        check_model_name(name)  # before it is quoted anywhere
        return name
    usable = [each.name for each in registry.router.models() if principal.may_use(each.name)]
    if len(usable) != 1:
        raise invalid_parameter(
            "model", f"is required, since this key may use {len(usable)} models: name one of them"
        )
    return usable[0]
