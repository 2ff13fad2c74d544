"""What a decoder's step ends in: the logits of the rows that were wanted, and what greedy decoding takes of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

NOT_FINITE = -1  # in place of a token id


@dataclass(frozen=True, slots=True)
class Logits:
    """values: (R, V) fp32, on the CPU. best: per row the id with the largest logit, the first of equal ones; `NOT_FINITE` if one of
    the row's logits is infinite or no number: whatever follows from that row would be noise.
    """

    values: Tensor
    best: list[int]

    @classmethod
    def of(cls, values: Tensor) -> Logits:
        """With the best looked for in rows that come without."""
        numbers = values.numpy()  # its argmax is 7 times as fast as torch's at 50 rows
        best = numbers.argmax(axis=-1)
        best[~np.isfinite(numbers).all(axis=-1)] = NOT_FINITE
        return cls(values, best.tolist())
