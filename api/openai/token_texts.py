"""Tokens as the APIs show them: texts, bytes, log-probabilities and offsets."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from inference import engine
from inference.text.tokenizer import Tokenizer, TokenSpan, TokenSpans

# Of a prompt, which arrive in frames, or of output, which arrive as the engine gives them.
TokenLogprob = pb.TokenLogprob | engine.TokenLogprob
TokenLogprobs = pb.TokenLogprobs | engine.TokenLogprobs

LOGPROB_MIN = -9999.0  # OpenAI's value for probability 0: JSON has no infinity
CONTEXT_CHARS = 256  # of a prompt, that decide how its output begins
CACHED_TOKENS_MAX = 16_384  # whose text and bytes are kept
ALIGN_CHARS = 16  # that normalization may add to a token


@dataclass(slots=True)
class Columns:
    """Tokens of a plain completion, as parallel lists with one entry per token.

    `tokens` has the text that each token adds. End tokens add none; of a character that is split
    into several tokens, the last one adds it. `text_offset` counts code points of the text.
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)


class TokenTexts:
    """Converts the tokens of one model to the formats of the APIs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._text_and_bytes = lru_cache(CACHED_TOKENS_MAX)(self._find_text_and_bytes)

    def entry(self, token: TokenLogprob, *, by_id: bool = False) -> dict[str, Any]:
        """Describe a token with its log-probability. With `by_id`, its name is its id."""
        text, data = self._text_and_bytes(token.token_id)
        return {
            "token": named_by_id(token) if by_id else text,
            "bytes": data,
            "logprob": max(token.logprob, LOGPROB_MIN),
        }

    def _find_text_and_bytes(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        data = self.tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), tuple(data)

    def content(
        self, logprobs: Sequence[TokenLogprobs], *, by_id: bool = False
    ) -> list[dict[str, Any]]:
        return [
            self.entry(each.chosen, by_id=by_id)
            | {"top_logprobs": [self.entry(token, by_id=by_id) for token in each.top]}
            for each in logprobs
        ]

    def of_prompt(
        self, logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Describe the tokens of a prompt in vLLM's format, by id; None for the first one.

        A rank of 1 is the most likely token. The rank of a token that is not among `top` is
        unknown.
        """
        positions: list[dict[str, dict[str, Any]] | None] = [None] * min(len(logprobs), 1)
        for each in logprobs[1:]:
            top: Sequence[TokenLogprob] = each.top
            ranked = {token.token_id: rank for rank, token in enumerate(top, 1)}
            positions.append(
                {
                    str(token.token_id): {
                        "logprob": max(token.logprob, LOGPROB_MIN),
                        "rank": ranked.get(token.token_id),
                        "decoded_token": self._text_and_bytes(token.token_id)[0],
                    }
                    for token in (each.chosen, *top)
                }
            )
        return positions

    def span_of(
        self, text: str, logprobs: Sequence[TokenLogprobs], *, is_last: bool
    ) -> tuple[int, int]:
        """Find the tokens of a text in a sequence of tokens; return where they begin and end.

        Of several occurrences, `is_last` chooses the last, otherwise the first.
        """
        sought, decoder = text.encode(), self.tokenizer.decoder
        parts = [
            b""  # control tokens, such as end tokens
            if decoder.token_text(each.chosen.token_id, True) == ""
            else self.tokenizer.token_bytes(each.chosen.token_id)
            for each in logprobs
        ]
        joined = b"".join(parts)
        begin = joined.rfind(sought) if is_last else joined.find(sought)
        ends = [*itertools.accumulate(map(len, parts))]
        return bisect_right(ends, begin), bisect_left(ends, begin + len(sought)) + (begin >= 0)

    def prompt_text(self, start: pb.StartFrame) -> str:
        """Return a plain prompt as text: as it was sent, or decoded from its token ids."""
        return start.text or self.tokenizer.decoder.text_of(tuple(start.token_ids.ids))

    def spans_after(self, start: pb.StartFrame) -> TokenSpans:
        """Create the tracker of token offsets for the output of a plain prompt."""
        tail = start.text[-CONTEXT_CHARS:]
        ids = start.token_ids.ids or self.tokenizer.encode(tail, add_special_tokens=False)
        return self.tokenizer.decoder.spans(tuple(ids))

    def columns(
        self, logprobs: Sequence[TokenLogprobs], spans: TokenSpans, *, is_whole: bool
    ) -> Columns:
        """Convert output tokens to columns. With `is_whole`, no more tokens follow."""
        return self._columns(logprobs, _placed(logprobs, spans, is_whole=is_whole))

    def echoed(
        self,
        prompt_logprobs: Sequence[TokenLogprobs],
        logprobs: Sequence[TokenLogprobs],
        prompt: str,
    ) -> Columns:
        """Convert the tokens of a prompt, whose text is `prompt`, and of its output to columns."""
        decoder = self.tokenizer.decoder
        ids = tuple(each.chosen.token_id for each in prompt_logprobs)
        placed = _placed(prompt_logprobs, decoder.spans(), is_whole=True)
        if decoder.text_of(ids) != prompt:
            controls = map(self.tokenizer.backend.id_to_token, ids)
            texts = [span.text for span in placed]
            bounds = [0, *aligned(prompt, texts, [*controls])[1:], len(prompt)]
            placed = [
                TokenSpan(prompt[start:end], start, span.follows)
                for span, (start, end) in zip(placed, itertools.pairwise(bounds), strict=True)
            ]
        placed += [
            span._replace(offset=span.offset + len(prompt))
            for span in _placed(logprobs, decoder.spans(ids), is_whole=True)
        ]
        columns = self._columns([*prompt_logprobs, *logprobs], placed)
        # Nothing precedes the first token.
        columns.token_logprobs[:1] = [None]
        columns.top_logprobs[:1] = [None]
        return columns

    def _columns(
        self,
        logprobs: Sequence[TokenLogprobs],
        spans: Sequence[TokenSpan],
    ) -> Columns:
        """Build the columns of tokens.

        Of the most likely tokens, those with the same text are named by id, except the chosen one.
        """
        columns = Columns()
        for span, each in zip(spans, logprobs, strict=True):
            chosen = each.chosen
            top: dict[str, float] = {}
            for token in each.top:
                name = span.text
                if token.token_id != chosen.token_id:
                    name = self._name(token.token_id, span)
                    if name == span.text or name in top:
                        name = f"token_id:{token.token_id}"
                top[name] = max(token.logprob, LOGPROB_MIN)
            logprob = max(chosen.logprob, LOGPROB_MIN)
            top.setdefault(span.text, logprob)
            columns.tokens.append(span.text)
            columns.token_logprobs.append(logprob)
            columns.top_logprobs.append(top)
            columns.text_offset.append(span.offset)
        return columns

    def _name(self, token_id: int, span: TokenSpan) -> str:
        """Return the name of an alternative token at this place."""
        text = self.tokenizer.decoder.token_text(token_id, span.follows)
        if text is None:  # a part of a character, as OpenAI spells it
            data = self.tokenizer.token_bytes(token_id)
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text or self.tokenizer.backend.id_to_token(token_id) or f"token_id:{token_id}"


def named_by_id(token: TokenLogprob) -> str:
    """Name a token by its id, as vLLM does."""
    return f"token_id:{token.token_id}"


def by_ids(columns: Columns, logprobs: Sequence[TokenLogprobs]) -> Columns:
    """Replace the name of each token by its id."""
    top = [
        {named_by_id(token): max(token.logprob, LOGPROB_MIN) for token in (*each.top, each.chosen)}
        for each in logprobs
    ]
    return replace(
        columns,
        tokens=[named_by_id(each.chosen) for each in logprobs],
        top_logprobs=[
            None if known is None else each
            for known, each in zip(columns.top_logprobs, top, strict=True)
        ],
    )


def _placed(
    logprobs: Sequence[TokenLogprobs], spans: TokenSpans, *, is_whole: bool
) -> list[TokenSpan]:
    placed = [spans.add(each.chosen.token_id) for each in logprobs]
    if is_whole and placed:  # a torn character counts as the last token's
        placed[-1] = placed[-1]._replace(text=placed[-1].text + spans.finish())
    return placed


def aligned(text: str, parts: Sequence[str], controls: Sequence[str | None]) -> list[int]:
    """Find the offset of each token in a text that may differ from the texts of the tokens.

    `parts` are the texts of the tokens, and `controls` the names that control tokens have in the
    text. A tokenizer may also normalize the text.
    """
    offsets, at = [], 0
    for part, control in zip(parts, controls, strict=True):
        offset, length = at, len(part)
        if not part and control and text.startswith(control, at):
            length = len(control)
        for each in (part, part.strip()):
            if each and (found := text.find(each, at, at + len(part) + ALIGN_CHARS)) >= 0:
                offset, length = found, len(each)
                break
        offsets.append(offset)
        at = min(offset + length, len(text))
    return offsets
