"""Log-probabilities of tokens as the APIs write them: each token by its text and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from inference.text.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0  # OpenAI's number for what cannot happen; JSON has none for it


class TokenTexts:
    """The tokens of one model as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """A token's text; what is only a part of a character is written as replacement characters."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def one(self, token: pb.TokenLogprob) -> dict[str, Any]:
        """A token and how likely it is."""
        data = self._tokenizer.token_bytes(token.token_id)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": max(token.logprob, LOGPROB_MIN)}

    def content(self, logprobs: Sequence[pb.TokenLogprobs]) -> list[dict[str, Any]]:
        """As chat completions and responses have it."""
        return [self.one(each.chosen) | {"top_logprobs": [self.one(token) for token in each.top]} for each in logprobs]

    def columns(self, logprobs: Sequence[pb.TokenLogprobs], first_offset: int) -> dict[str, Any]:
        """As plain completions have it. first_offset: characters of the output before these tokens."""
        texts = [self.text(each.chosen.token_id) for each in logprobs]
        offsets = list(accumulate(map(len, texts), initial=first_offset))
        return {
            "tokens": texts,
            "token_logprobs": [max(each.chosen.logprob, LOGPROB_MIN) for each in logprobs],
            "top_logprobs": [self._likeliest(each.top) for each in logprobs],
            "text_offset": offsets[:-1],
        }

    def _likeliest(self, tokens: Sequence[pb.TokenLogprob]) -> dict[str, float]:
        return {self.text(token.token_id): max(token.logprob, LOGPROB_MIN) for token in tokens}
