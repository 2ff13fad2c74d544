"""Which of several replicas gets a sequence. Each policy is a function of what the set knows; none keeps promises for another.

`round_robin` gives to each in turn. `least_loaded` gives to whom has the fewest tokens still to compute. `prefix_aware` does too,
and counts of the new prompt only what the replica has not cached: so a conversation stays where its prefix is, until the others
have so much less to do that computing it again is sooner done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from inference.routing.replica import Keys, Replica, prefix_keys

TokenIds = tuple[int, ...]


class Work(msgspec.Struct, frozen=True):
    """What a sequence asks for. keys: of its prompt's blocks; none if the policy does not look at them."""

    prompt_token_count: int
    keys: Keys = ()


class PlacementPolicy(Protocol):
    """How to choose."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """What has to be known of a sequence, once for all replicas. output: what of it was generated already."""
        ...

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """One of the candidates, of which there is at least one."""
        ...


class RoundRobin:
    """Each in turn."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """See `PlacementPolicy`."""
        return Work(len(prompt) + len(output))

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Whose last turn is longest ago."""
        return min(candidates, key=lambda replica: replica.placed_at)


class LeastLoaded:
    """Who has the fewest outstanding tokens."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """See `PlacementPolicy`."""
        return Work(len(prompt) + len(output))

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Equal ones in turn."""
        return min(candidates, key=lambda replica: (replica.outstanding_token_count, replica.placed_at))


class PrefixAware:
    """Who would be done with its own work and with this prompt first."""

    def work_of(self, prompt: TokenIds, cache_salt: str, output: TokenIds = ()) -> Work:
        """See `PlacementPolicy`."""
        token_ids = (*prompt, *output)
        return Work(len(token_ids), prefix_keys(token_ids, cache_salt))

    def choose(self, candidates: Sequence[Replica], work: Work) -> Replica:
        """Outstanding tokens and those of the prompt that are not cached, as one sum: both are computed by the same steps."""

        def cost(replica: Replica) -> tuple[int, int]:
            saved = replica.prefixes.find(work.keys).token_count
            return replica.outstanding_token_count + work.prompt_token_count - saved, replica.placed_at

        return min(candidates, key=cost)


POLICIES: Mapping[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
