"""How the writes of holds were batched: sizes and durations, a microsecond for each batch."""

from __future__ import annotations

from api.observability.histogram import Histogram

BATCH_SECONDS_BOUNDS_MS = (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class HoldBatches:
    """How the writes of holds were batched. `measured` is what `HoldStore` tells."""

    def __init__(self) -> None:
        self.sizes = Histogram(BATCH_SIZE_BOUNDS)
        self.durations = Histogram(BATCH_SECONDS_BOUNDS_MS)

    def measured(self, operation_count: int, duration_s: float) -> None:
        """One batch was written, or failed."""
        self.sizes.observe(operation_count)
        self.durations.observe(duration_s * 1000)
