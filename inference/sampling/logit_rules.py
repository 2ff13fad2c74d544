"""What a request asks to be changed in the logits before a token is chosen from them: bias, penalties, tokens held off.

Works on the whole batch at once and only on the entries that change: a row without any of this costs nothing, and what is written
into one row never depends on another.

Formulas, in the order in which they act (that of `transformers`, whose greedy search gives the same tokens):
- bias: logit + bias, as in OpenAI's `logit_bias`;
- repetition penalty r over prompt and output: logit / r if positive, else logit * r (Keskar et al. 2019, section 4.1, with the sign
  rule that `transformers` and vLLM use);
- frequency and presence penalty over the output alone: logit - count * frequency - (count > 0) * presence (OpenAI's definition);
- held off: minus infinity, for ids that would end the output before it has `min_output_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from inference.engine import SamplingParams


class SeenTokens:
    """The distinct token ids of a sequence, and how often each one is in its output. Grows by a token at constant cost."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        capacity = max(2 * len(self._slots), 64)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(self._slots)] = list(self._slots)
        self._counts = np.zeros(capacity, dtype=np.float32)

    @property
    def token_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Each id once. A view: valid until the next `add`."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Occurrences in the output of each of `token_ids`; 0 for one that is in the prompt only."""
        return self._counts[: len(self._slots)]

    def copy(self) -> SeenTokens:
        """Another one with the same tokens, for a sequence that goes on from here."""
        other = SeenTokens(())
        other._slots, other._ids, other._counts = dict(self._slots), self._ids.copy(), self._counts.copy()
        return other

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1


class Ruled(Protocol):
    """What decides about one row. seen: there if the parameters penalise. held_off_ids: ids that must not be chosen now."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seen(self) -> SeenTokens | None: ...
    @property
    def held_off_ids(self) -> tuple[int, ...]: ...


def apply_rules(logits: Tensor, rows: Sequence[Ruled]) -> None:
    """Change logits (R, V) fp32 in place as each row's request asks."""
    biased = [row for row, ruled in enumerate(rows) if ruled.params.logit_bias]
    if biased:
        _add_biases(logits, biased, [rows[row].params for row in biased])
    penalised = [row for row, ruled in enumerate(rows) if ruled.seen is not None]
    if penalised:
        _penalise(logits, penalised, [rows[row] for row in penalised])
    entries = [(row, token_id) for row, ruled in enumerate(rows) for token_id in ruled.held_off_ids]
    if entries:
        at = torch.tensor(entries)
        logits[at[:, 0], at[:, 1]] = float("-inf")


def _add_biases(logits: Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    entries = [(row, token_id, bias) for row, each in zip(rows, params, strict=True) for token_id, bias in each.logit_bias]
    row_ids, token_ids, biases = zip(*entries, strict=True)
    logits.index_put_((torch.tensor(row_ids), torch.tensor(token_ids)), torch.tensor(biases, dtype=logits.dtype), accumulate=True)


def _penalise(logits: Tensor, rows: list[int], ruled: list[Ruled]) -> None:
    seen = [each.seen for each in ruled if each.seen is not None]
    lengths = torch.tensor([len(each.token_ids) for each in seen])

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype).repeat_interleave(lengths)

    row_ids = torch.tensor(rows).repeat_interleave(lengths)
    token_ids = torch.from_numpy(np.concatenate([each.token_ids for each in seen]))
    counts = torch.from_numpy(np.concatenate([each.output_counts for each in seen]))
    repetition = spread([each.params.repetition_penalty for each in ruled])
    values = logits[row_ids, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * spread([each.params.frequency_penalty for each in ruled])
    values -= (counts > 0) * spread([each.params.presence_penalty for each in ruled])
    logits[row_ids, token_ids] = values
