"""What running sequences will still need: KV blocks for tokens to come, and the prefix blocks that they are about to compute.

Pure arithmetic on sequences; the scheduler decides by it who may enter.
"""

from __future__ import annotations

from inference.core.kv_cache import KV_BLOCK_TOKENS, PrefixMatch, blocks_for
from inference.core.sequence import Sequence
from inference.limits import EngineLimits


class Commitments:
    """Those of the sequences that were added."""

    def __init__(self, limits: EngineLimits) -> None:
        self.owed_block_count = 0
        self._limits = limits
        self._in_progress: dict[
            int, tuple[float, int, int]
        ] = {}  # precedence of the first that computes a prefix block, by its key

    def add(self, sequence: Sequence) -> None:
        """A running sequence."""
        self.owed_block_count += self.owed_by(sequence, len(sequence.block_table))
        first = sequence.computed_token_count // KV_BLOCK_TOKENS
        for block in sequence.prefix_keys[first:]:
            self._in_progress[block.key] = min(self._in_progress.get(block.key, sequence.precedence), sequence.precedence)

    def owed_by(self, sequence: Sequence, covered_block_count: int) -> int:
        """Blocks that a sequence, and beams that it is to have, still need for tokens and the reserved share of future output."""
        owed_output = min(sequence.owed_output_token_count, self._limits.owed_output_token_count_max)
        needed = blocks_for(len(sequence.token_ids) + owed_output)
        of_beams = (sequence.place_count - 1) * (needed - len(sequence.token_ids) // KV_BLOCK_TOKENS)
        return max(needed - covered_block_count, 0) + of_beams

    def has_in_progress(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether the next prefix block of a waiting sequence is being computed by one that comes before it.

        One that comes after it does not count: that one may get on only when this one has.
        """
        matched = len(match.blocks)
        if matched >= len(sequence.prefix_keys):
            return False
        first = self._in_progress.get(sequence.prefix_keys[matched].key)
        return first is not None and first < sequence.precedence
