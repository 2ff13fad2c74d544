"""At what rate a line of requests was observed to be served, so that waits can be told from it. Nothing is assumed in advance."""

from __future__ import annotations

import math

SAMPLE_S = 0.25  # seconds: several steps of a slow engine, so that one sample is no single step
MEMORY_S = 5.0  # seconds after which a sample weighs a third: follows a load that changes, not one that flickers


class ServiceRate:
    """Units of service per second, over the time in which something waited: at other times it is the demand that is measured."""

    def __init__(self) -> None:
        self._per_s: float | None = None
        self._sampled_from: float | None = None
        self._sampled_units = 0.0

    @property
    def per_s(self) -> float | None:
        """None until there was enough to observe."""
        return self._per_s

    def watch(self, now: float, *, waiting: bool) -> None:
        """Something waits, or nothing does any more. now: monotonic seconds."""
        if waiting and self._sampled_from is None:
            self._sampled_from, self._sampled_units = now, 0.0
        elif not waiting:
            self._sampled_from = None

    def served(self, units: float, now: float) -> None:
        """So much was served just now."""
        if self._sampled_from is None:
            return
        self._sampled_units += units
        elapsed_s = now - self._sampled_from
        if elapsed_s < SAMPLE_S:
            return
        sample = self._sampled_units / elapsed_s
        if self._per_s is None:
            self._per_s = sample
        else:
            self._per_s += (sample - self._per_s) * -math.expm1(-elapsed_s / MEMORY_S)
        self._sampled_from, self._sampled_units = now, 0.0
