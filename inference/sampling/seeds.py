"""Numbers that follow from seeds: what chance decides is a hash of a sequence's seed and a position. No torch."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments. SplitMix64, Steele et al. 2014."""
    return (_mix(_mix(seed & _MASK) ^ (index * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def choice_seed(seed: int, choice_index: int) -> int:
    """The seed of one of several choices; the first one's is the request's own."""
    return seed if choice_index == 0 else _mix(_mix(seed & _MASK) + choice_index)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
