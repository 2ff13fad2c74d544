"""Largest logit of a row, found by both decoders."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from inference.decoder.model import NOT_FINITE, TorchKernels
from inference.native import loader

SIZES = (1, 15, 16, 17, 64, 333)  # around the width of a vector


def native_best(values: torch.Tensor) -> int:
    """Return the native decoder's index of the largest value."""
    library = loader.load()
    assert library is not None
    numbers = values.numpy().copy()
    found = {
        int(library.weir_best_of(level, numbers.ctypes.data_as(ctypes.c_void_p), len(numbers)))
        for level in loader.available_levels(library, is_bfloat16=True).values()
    }
    assert len(found) == 1, "the same for all instruction sets"
    return found.pop()


@pytest.fixture(params=["torch", "native"])
def best_of(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], int]:
    """Return each decoder's function for one row."""
    if request.param == "torch":
        return lambda values: int(TorchKernels().best(values[None])[0])
    if loader.load() is None:
        pytest.skip("no native library on this machine, or switched off")
    return native_best


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_the_largest_wins(best_of: Callable[[torch.Tensor], int], size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(50):
        # Few values: many ties.
        values = torch.from_numpy(rng.integers(-3, 3, size).astype(np.float32))

        assert best_of(values) == int(values.numpy().argmax())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_value_that_is_not_finite_has_no_best(
    best_of: Callable[[torch.Tensor], int], size: int, broken: float
) -> None:
    for index in {0, size // 2, size - 1}:
        values = torch.zeros(size)
        values[index] = broken

        assert best_of(values) == NOT_FINITE
