"""What can be asked for under which name, and where: aliases, versions, shares of traffic, regions. Pure data, checked by whoever
builds it.

A model has one name, by which it is priced, billed and limited. Behind it stand one or more versions, each served by an engine of
its own; `name@version` pins one, and the bare name is spread over them by weight. An alias is another name for either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

VERSION_MARK = "@"


@dataclass(frozen=True, slots=True)
class Share:
    """A version of a model and its weight. served: the name of the engine behind it; version: empty if the model has just one."""

    version: str
    served: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Catalog:
    """shares: the versions of each model by its name. aliases: to a model, or to a version as `name@version`.

    fallbacks: of each region, where its requests may go when they cannot run there, the first preferred; nowhere else.
    own_region: of this process, for requests that name none; empty for no preference.
    """

    shares: Mapping[str, Sequence[Share]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    own_region: str = ""

    @classmethod
    def plain(cls, names: Sequence[str]) -> Catalog:
        """Models without versions, aliases or regions."""
        return cls({name: (Share("", name),) for name in names})

    def own_name(self, asked: str) -> str:
        """The model's own name for whatever it was asked by; what is unknown stays as it is."""
        target = self.aliases.get(asked, asked)
        if target in self.shares:
            return target
        name, mark, version = target.rpartition(VERSION_MARK)
        known = mark and any(share.version == version for share in self.shares.get(name, ()))
        return name if known else asked

    def share(self, asked: str, request_id: object) -> Share | None:
        """The version that a request gets, the same for the same request in every process; None if the name is unknown."""
        target = self.aliases.get(asked, asked)
        if target in self.shares:
            shares = self.shares[target]
            return shares[0] if len(shares) == 1 else drawn(shares, f"{target}\0{request_id}")
        name, _, version = target.rpartition(VERSION_MARK)
        return next((share for share in self.shares.get(name, ()) if share.version and share.version == version), None)

    def main_share(self, name: str) -> Share:
        """The version that most requests for a model get; of equal ones the first."""
        return max(self.shares[name], key=lambda share: share.weight)

    def aliases_of(self, name: str) -> list[str]:
        """Other names of a model and of its versions, in order."""
        return sorted(alias for alias in self.aliases if self.own_name(alias) == name)

    def regions(self, asked: str) -> tuple[str, ...]:
        """Where a request that names this region may run, the first preferred; anywhere for an empty tuple.

        Raises: KeyError for an unknown region.
        """
        region = asked or self.own_region
        return (region, *self.fallbacks[region]) if region else ()


def drawn(shares: Sequence[Share], key: str) -> Share:
    """One of several by weight: the same key draws the same one, and a change of weights moves as few keys as it must."""
    total = sum(share.weight for share in shares)
    point = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2.0**64 * total
    for share in shares:
        point -= share.weight
        if point < 0:
            return share
    return max(shares, key=lambda share: share.weight)  # rounding can put the point at the total itself
