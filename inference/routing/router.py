"""What serves a request: names, versions and regions are looked up in a catalog, replicas told apart by the engine.

The catalog is pure data, checked by whoever builds it. A model has one name, by which it is priced, billed and limited. Behind it
stand one or more versions, each served by an engine of its own; `name@version` pins one, and the bare name is spread over them by
weight. An alias is another name for either."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from inference.engine import Backend, Encoder, Engine, ModelInfo
from inference.errors import EngineError, RequestImpossible
from inference.routing.replica import ReplicaReport as ReplicaReport
from inference.routing.replica import ReplicaState as ReplicaState


class ModelUnknown(EngineError):
    """No engine serves a model of this name."""

    reason = "MODEL_UNKNOWN"

    def __init__(self, model: str, known: Sequence[str], own_name: str = "") -> None:
        """own_name: what it stands for, where only models' own names are taken."""
        remedy = f"it stands for {own_name!r}: give that" if own_name else f"known are: {', '.join(known) or 'none'}"
        super().__init__(f"model {model[:64]!r} is unknown{' here' if own_name else ''}; {remedy}")
        self.model = model


class ModelMismatch(EngineError):
    """There is a model of this name, and it does something else. wanted: what it was asked for."""

    reason = "MODEL_MISMATCH"

    def __init__(self, model: str, *, wanted: str, does: str) -> None:
        super().__init__(f"model {model[:64]!r} does not {wanted}: it serves {does}")
        self.model = model


@dataclass(frozen=True, slots=True)
class EncoderRoute:
    """Where a request that embeds goes. model: the own name of what was asked for; served: the name that the encoder serves."""

    model: str
    served: str
    encoder: Encoder


class Route(msgspec.Struct, frozen=True):
    """Where a request goes. model: the own name of what was asked for, by which it is billed.

    served: the name that the engine serves. regions: see `GenerationRequest`.
    """

    model: str
    served: str
    engine: Engine
    regions: tuple[str, ...] = ()


@runtime_checkable
class Replicated(Protocol):
    """An engine, or an encoder, that is made of replicas: one or several."""

    def reports(self) -> list[ReplicaReport]:
        """How each of them stands."""
        ...

    def drain(self, names: Collection[str]) -> None:
        """Give these nothing new from now on, and the others what they take."""
        ...

    def move_out(self, name: str) -> int:
        """Let what runs in a drained one go on elsewhere, as far as it can; how many were told to."""
        ...


class ReplicaCounts(NamedTuple):
    """How many engines of a model take requests now, of how many, and how many of these an operator keeps out of use."""

    ready: int
    total: int
    drained: int


class Router:
    """Chooses an engine. Engines are known by the names that they serve: a model's, or `name@version`."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        encoders: Mapping[str, Encoder] | None = None,
        catalog: Catalog | None = None,
        encoder_catalog: Catalog | None = None,
    ) -> None:
        """encoders: models that embed, by names of their own. The catalogs name all of each; without one, each is a model."""
        self._engines = dict(engines)
        self._encoders = dict(encoders or {})
        self._catalog = catalog or Catalog.plain(tuple(engines))
        self._encoder_catalog = encoder_catalog or Catalog.plain(tuple(self._encoders))
        self._routes: dict[tuple[str, str], Route] = {}  # by name and region, of those that go the same way whatever the request

    def own_name(self, model: str) -> str:
        """A model's own name for an alias or a version of it; any other name stays as it is."""
        own = self._encoder_catalog.own_name(model)
        return own if own in self._encoder_catalog.shares else self._catalog.own_name(model)

    def check_own_name(self, model: str) -> None:
        """Of what is set for a model and must not change with its aliases. Raises: ModelUnknown."""
        if model not in self._catalog.shares and model not in self._encoder_catalog.shares:
            self.find(model)
            raise ModelUnknown(model, (), self.own_name(model))

    def engine(self, served: str) -> Engine:
        """The engine that serves under this name."""
        return self._engines[served]

    def choose(self, model: str) -> Engine:
        """The engine of a model, an alias or a version; of several versions the one with the largest share.

        Raises: ModelUnknown; ModelMismatch for a model that embeds.
        """
        own = self._catalog.own_name(model)
        if own in self._catalog.shares and own == self._catalog.aliases.get(model, model):
            return self._engines[self._catalog.main_share(own).served]
        return self._engines[self._share(model, "").served]

    def route(self, model: str, request_id: object, region: str = "") -> Route:
        """Where a request goes; the same one, by the text of its id, always to the same version. region: as the request says.

        Raises: ModelUnknown, ModelMismatch; RequestImpossible if the region is unknown.
        """
        if (found := self._routes.get((model, region))) is not None:
            return found
        catalog = self._catalog
        share = catalog.share(model, request_id) or self._share(model, request_id)
        try:
            regions = catalog.regions(region)
        except KeyError:
            known = ", ".join(self._catalog.fallbacks)
            remedy = f"known are: {known}" if known else "this deployment has no regions: leave it unset"
            raise RequestImpossible(f"region {region[:64]!r} is unknown; {remedy}", "region") from None
        own_name = catalog.own_name(model)
        route = Route(own_name, share.served, self._engines[share.served], regions)
        if len(catalog.shares[own_name]) == 1:
            self._routes[model, region] = route
        return route

    def route_encoder(self, model: str, request_id: str) -> EncoderRoute:
        """Where a request that embeds goes; the same one always to the same version.

        Raises: ModelUnknown; ModelMismatch for a model that generates.
        """
        share = self._encoder_catalog.share(model, request_id)
        if share is None:
            if self._catalog.share(model, "") is not None:
                raise ModelMismatch(model, wanted="embed", does="Generate")
            raise ModelUnknown(model, self._names())
        return EncoderRoute(self._encoder_catalog.own_name(model), share.served, self._encoders[share.served])

    def choose_encoder(self, model: str) -> Encoder:
        """The encoder of a model, an alias or a version; of several versions the one with the largest share. Raises as above."""
        own = self._encoder_catalog.own_name(model)
        if own in self._encoder_catalog.shares and own == self._encoder_catalog.aliases.get(model, model):
            return self._encoders[self._encoder_catalog.main_share(own).served]
        return self.route_encoder(model, "").encoder

    def find(self, model: str) -> Backend:
        """What serves a model, whatever it does. Raises: ModelUnknown."""
        embeds = self._encoder_catalog.share(model, "") is not None
        return self.choose_encoder(model) if embeds else self.choose(model)

    def models(self) -> list[ModelInfo]:
        """All models by their own names, as most of their requests find them."""
        names = sorted([*self._catalog.shares, *self._encoder_catalog.shares])
        return [replace(self.find(name).model, name=name) for name in names]

    def aliases(self, model: str) -> list[str]:
        """Other names of a model and of its versions. model: its own name."""
        return self._catalog_of(model).aliases_of(model)

    def versions(self, model: str) -> dict[str, float]:
        """The versions of a model that can be pinned, with their shares of what pins none. model: its own name."""
        shares = [share for share in self._catalog_of(model).shares.get(model, ()) if share.version]
        total = sum(share.weight for share in shares)
        return {share.version: share.weight / total for share in shares}

    def replicas(self, model: str) -> ReplicaCounts:
        """How many engines a model has, in all its versions. model: its own name."""
        backends: Mapping[str, Backend] = self._encoders if model in self._encoder_catalog.shares else self._engines
        counts = [replica_counts(backends[share.served]) for share in self._catalog_of(model).shares[model]]
        return ReplicaCounts(*map(sum, zip(*counts, strict=True)))

    def reports(self) -> list[tuple[str, ReplicaReport]]:
        """How every replica stands, with the name that it serves."""
        return [(name, report) for name, backend in self._replicated() for report in backend.reports()]

    def drain(self, drained: Mapping[str, Collection[str]]) -> None:
        """Keep these replicas out of use, by the names that they serve, and no others."""
        for name, backend in self._replicated():
            backend.drain(drained.get(name, ()))

    def move_out(self, served: str, replica: str) -> None:
        """Let what runs in a drained replica go on elsewhere, as far as it can."""
        for name, backend in self._replicated():
            if name == served:
                backend.move_out(replica)

    def every_replica(self) -> Iterator[tuple[str, ReplicaReport]]:
        """How every engine stands that serves anything, with the name of what it serves."""
        for backend in self.backends():
            name = backend.model.name
            if isinstance(backend, Replicated):
                yield from ((name, report) for report in backend.reports())
                continue
            condition, told = backend.condition(), backend.statistics()
            state = ReplicaState(condition.state.value)
            live_count = told.running_sequence_count + told.waiting_sequence_count
            yield name, ReplicaReport(name, "", state, live_count, 0, condition.reason, told)

    def engines(self) -> list[Engine]:
        """All engines, by the names that they serve."""
        return [self._engines[name] for name in sorted(self._engines)]

    def encoders(self) -> list[Encoder]:
        """All encoders, by model name."""
        return [self._encoders[name] for name in sorted(self._encoders)]

    def backends(self) -> list[Backend]:
        """Everything that is served: engines and encoders."""
        return [*self.engines(), *self.encoders()]

    def _share(self, model: str, request_id: object) -> Share:
        share = self._catalog.share(model, request_id)
        if share is None:
            if self._encoder_catalog.share(model, "") is not None:
                raise ModelMismatch(model, wanted="generate", does="Embed")
            raise ModelUnknown(model, self._names())
        return share

    def _catalog_of(self, model: str) -> Catalog:
        return self._encoder_catalog if model in self._encoder_catalog.shares else self._catalog

    def _replicated(self) -> Iterator[tuple[str, Replicated]]:
        for name, backend in sorted([*self._engines.items(), *self._encoders.items()]):
            if isinstance(backend, Replicated):
                yield name, backend

    def _names(self) -> list[str]:
        catalogs = (self._catalog, self._encoder_catalog)
        return sorted({name for catalog in catalogs for name in (*catalog.shares, *catalog.aliases)})


def replica_counts(backend: Backend) -> ReplicaCounts:
    """How many engines are behind this one."""
    if not isinstance(backend, Replicated):
        return ReplicaCounts(int(backend.healthy()), 1, 0)
    told = backend.reports()
    ready_count = sum(report.state is ReplicaState.READY for report in told)
    return ReplicaCounts(ready_count, len(told), sum(report.is_drained for report in told))


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
