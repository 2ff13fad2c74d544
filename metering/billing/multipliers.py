"""What a service tier multiplies prices with: exactly, or not at all. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from metering.errors import InvalidValue

FIELD = "batch_multiplier_milli"  # as the contract calls it
MULTIPLIER_SCALE = 1000  # multipliers are thousandths
MULTIPLIER_MAX_MILLI = 1_000_000  # a thousandfold; more would be a unit mixed up


def multiplied_rates(rates: Sequence[int], multiplier_milli: int) -> list[int]:
    """Prices times thousandths, exactly. Raises: InvalidValue telling the nearest multipliers that leave no fraction of a pico."""
    if not 0 <= multiplier_milli <= MULTIPLIER_MAX_MILLI:
        raise InvalidValue(FIELD, f"give 0 to {MULTIPLIER_MAX_MILLI} thousandths")
    step = math.lcm(*(MULTIPLIER_SCALE // math.gcd(rate, MULTIPLIER_SCALE) for rate in rates))
    if rest := multiplier_milli % step:
        below, above = multiplier_milli - rest, multiplier_milli - rest + step
        told = f"{multiplier_milli} thousandths make fractions of a pico of these prices"
        raise InvalidValue(
            FIELD, f"{told}: give {below} or {above}, which is {below / MULTIPLIER_SCALE:g} or {above / MULTIPLIER_SCALE:g}"
        )
    return [rate * multiplier_milli // MULTIPLIER_SCALE for rate in rates]
