"""Placement policies: choose the replica for a sequence, without state of their own.

`round_robin` chooses each replica in turn. `least_loaded` chooses the one with the fewest
outstanding tokens. `prefix_aware` does so too, but adds the tokens of the new prompt that the
replica has not cached: a conversation stays with its prefix until another replica has so much less
to do that recomputing the prefix is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from inference.routing.replica import Keys, Replica, prefix_keys

TokenIds = tuple[int, ...]


class Work(msgspec.Struct, frozen=True):
    """Work of a sequence. `keys` of its prompt's blocks are empty if the policy ignores them."""

    prompt_token_count: int
    keys: Keys = ()


class PlacementPolicy(Protocol):
    """Policy that chooses the replica for a sequence."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """Measure a sequence's work, once for all replicas. `output` has the tokens so far."""
        ...

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Choose one of the candidates. There must be at least one."""
        ...


class RoundRobin:
    """Policy that chooses each replica in turn."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """Implement `PlacementPolicy`."""
        return Work(len(prompt) + len(output))

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Choose the replica whose last placement is the oldest."""
        return min(candidates, key=lambda replica: replica.placed_at)


class LeastLoaded:
    """Policy that chooses the replica with the fewest outstanding tokens."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """Implement `PlacementPolicy`."""
        return Work(len(prompt) + len(output))

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Choose the least loaded replica; equally loaded ones in turn."""
        return min(
            candidates, key=lambda replica: (replica.outstanding_token_count, replica.placed_at)
        )


class PrefixAware:
    """Policy that chooses the replica which would finish its work and this prompt first."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """Implement `PlacementPolicy`."""
        token_ids = (*prompt, *output)
        return Work(len(token_ids), prefix_keys(token_ids, cache_salt))

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Choose the replica with the smallest sum of outstanding and uncached prompt tokens."""

        def cost(replica: Replica) -> tuple[int, int]:
            saved = replica.prefixes.find(work.keys).token_count
            return (
                replica.outstanding_token_count + work.prompt_token_count - saved,
                replica.placed_at,
            )

        return min(candidates, key=cost)


POLICIES: Mapping[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
