"""What a service tier multiplies prices with: exactly, or not at all. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from metering.errors import InvalidValue

MULTIPLIER_SCALE = 1000  # multipliers are thousandths
MULTIPLIER_MAX_MILLI = 1_000_000  # a thousandfold; more would be a unit mixed up


def multiplied_rates(rates: Sequence[int], multiplier_milli: int) -> list[int]:
    """Prices times thousandths, exactly. Raises: InvalidValue telling the nearest multipliers that leave no fraction of a pico."""
    if not 0 <= multiplier_milli <= MULTIPLIER_MAX_MILLI:
        raise InvalidValue("batch_multiplier", f"give 0 to {MULTIPLIER_MAX_MILLI // MULTIPLIER_SCALE}")
    step = math.lcm(*(MULTIPLIER_SCALE // math.gcd(rate, MULTIPLIER_SCALE) for rate in rates))
    if rest := multiplier_milli % step:
        below, above = multiplier_milli - rest, multiplier_milli - rest + step
        given, *near = (each / MULTIPLIER_SCALE for each in (multiplier_milli, below, above))
        remedy = f"{given:g} makes fractions of a pico of these prices: give {near[0]:g} or {near[1]:g}"
        raise InvalidValue("batch_multiplier", remedy)
    return [rate * multiplier_milli // MULTIPLIER_SCALE for rate in rates]
