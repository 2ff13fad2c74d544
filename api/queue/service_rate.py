"""Service rate of one tier, measured while its requests wait."""

from __future__ import annotations

import math

SAMPLE_S = 0.25  # seconds: several steps of a slow engine
MEMORY_S = 5.0  # seconds after which a sample weighs a third: follows the load without flickering


class ServiceRate:
    """Service units per second while requests wait; at other times it would measure demand."""

    def __init__(self) -> None:
        self.per_s: float | None = None  # None before any observation
        self._sampled_from: float | None = None
        self._sampled_units = 0.0
        self.is_sampled = False  # while requests wait

    def watch(self, now: float, *, waiting: bool) -> None:
        """Record whether requests wait. now: monotonic seconds."""
        self.is_sampled = waiting
        if waiting and self._sampled_from is None:
            self._sampled_from, self._sampled_units = now, 0.0
        elif not waiting:
            self._sampled_from = None

    def served(self, units: float, now: float) -> None:
        """Record service at this time."""
        if self._sampled_from is None:
            return
        self._sampled_units += units
        elapsed_s = now - self._sampled_from
        if elapsed_s < SAMPLE_S:
            return
        sample = self._sampled_units / elapsed_s
        if self.per_s is None:
            self.per_s = sample
        else:
            self.per_s += (sample - self.per_s) * -math.expm1(-elapsed_s / MEMORY_S)
        self._sampled_from, self._sampled_units = now, 0.0
