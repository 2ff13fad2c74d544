"""Routing of requests to engines by model name, version and region; engines choose among replicas.

The catalog is pure data, validated by its builder. A model has one canonical name, by which it is
priced, billed and limited, and one or more versions, each served by its own engine. `name@version`
pins a version, and the bare name is distributed over them by weight. An alias is another name for
either."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from inference.engine import Backend, Encoder, Engine, ModelInfo, Startable
from inference.errors import EngineError, RequestImpossible
from inference.routing.replica import ReplicaReport as ReplicaReport
from inference.routing.replica import ReplicaState as ReplicaState

VERSION_MARK = "@"


NAMES_SHOWN = 8  # the rest is counted


def shown(names: Sequence[str]) -> str:
    """Join names for a message, cut with a count if they are many."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "") or "none"


class ModelUnknown(EngineError):
    """No engine serves a model of this name."""

    reason = "MODEL_UNKNOWN"

    def __init__(self, model: str, known: Sequence[str], canonical_name: str = "") -> None:
        """`canonical_name` is that of `model`, if only canonical names are allowed here."""
        if canonical_name:
            super().__init__(
                f"The model {model[:64]!r} must be given by its name {canonical_name!r} here. Use"
                " that name."
            )
        else:
            super().__init__(f"There is no model {model[:64]!r}. Use one of: {shown(known)}.")
        self.model = model


class ModelMismatch(EngineError):
    """The model does not serve this kind of request. requested: verb. served: RPC of the model."""

    reason = "MODEL_MISMATCH"

    def __init__(self, model: str, *, requested: str, served: str) -> None:
        super().__init__(
            f"The model {model[:64]!r} does not {requested}. It serves {served}: call that, or use"
            " another model."
        )
        self.model = model


@dataclass(frozen=True, slots=True)
class EncoderRoute:
    """Route of an embedding request: the model's canonical name, and the encoder's as `served`.

    For `reach` see `Route`.
    """

    model: str
    served: str
    encoder: Encoder
    reach: Startable

    @property
    def backend(self) -> Backend:
        """Encoder of the route."""
        return self.encoder


class Route(msgspec.Struct, frozen=True):
    """Route of a request. `model` is the canonical name, by which the request is billed.

    `served` is the name that the engine serves, `reach` the part of the engine that the request may
    use. For `regions` and `adapter` see `GenerationRequest`, and for `is_bound`. `fallback` has the
    models to try, in order, if this one cannot take the request.
    """

    model: str
    served: str
    engine: Engine
    reach: Startable
    regions: tuple[str, ...] = ()
    adapter: str = ""
    fallback: tuple[str, ...] = ()
    is_bound: bool = False

    @property
    def backend(self) -> Backend:
        """Engine of the route."""
        return self.engine


@runtime_checkable
class Replicated(Protocol):
    """Interface of an engine or encoder that consists of replicas."""

    def reports(self) -> list[ReplicaReport]:
        """Describe the state of each replica."""
        ...

    def drain(self, names: Collection[str]) -> None:
        """Drain exactly the replicas with these names."""
        ...

    def move_out(self, name: str) -> int:
        """Move sequences from a drained replica to others; return how many move."""
        ...

    def within(self, regions: tuple[str, ...], *, is_bound: bool) -> Startable:
        """Return the replicas that requests of these regions may use."""
        ...


class ReplicaCounts(NamedTuple):
    """Counts of a model's engines: those that take requests, all of them, and drained ones."""

    ready: int
    total: int
    drained: int


class Router:
    """Registry of engines by the name that they serve: a model's, or `name@version`."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        encoders: Mapping[str, Encoder] | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        """Create the router. The names of `encoders`, for embedding, must differ from `engines`.

        The catalog lists all engines and encoders. Without it, each served name is a model.
        """
        self._engines = dict(engines)
        self._encoders = dict(encoders or {})
        self._backends: dict[str, Backend] = {**self._engines, **self._encoders}
        self._catalog = catalog or Catalog.plain(tuple(self._backends))
        # By name, region and binding, of unversioned models
        self._routes: dict[tuple[str, str, str], Route] = {}

    def become(
        self, engines: Mapping[str, Engine], encoders: Mapping[str, Encoder], catalog: Catalog
    ) -> None:
        """Route by another catalog from now on. Routes that were chosen before stay valid."""
        self._engines, self._encoders = dict(engines), dict(encoders)
        self._backends = {**self._engines, **self._encoders}
        self._catalog = catalog
        self._routes = {}

    def canonical_name(self, model: str) -> str:
        """Resolve an alias or version to its canonical name; other names are returned unchanged."""
        return self._catalog.canonical_name(model)

    def check_canonical_name(self, model: str) -> None:
        """Raise ModelUnknown unless the name is canonical, as settings of a model require."""
        if model not in self._catalog.shares:
            self.find(model)
            raise ModelUnknown(model, (), self.canonical_name(model))

    def route(
        self, model: str, request_id: object, region: str = "", bound_region: str = ""
    ) -> Route:
        """Choose the route of a request. The same request id always gets the same version.

        With `bound_region`, the request may run there only. Raises ModelUnknown, ModelMismatch, or
        RequestImpossible if the region is unknown or another than that.
        """
        if (cached := self._routes.get((model, region, bound_region))) is not None:
            return cached
        catalog, share = self._catalog, self._share(model, request_id)
        engine = self._engines.get(share.served)
        if engine is None:
            raise ModelMismatch(model, requested="generate", served="Embed")
        try:
            regions = (bound_region,) if bound_region else catalog.regions(region)
        except KeyError:
            self.check_region(region)
            raise
        if bound_region and region not in ("", bound_region):
            raise RequestImpossible(
                f"region {region[:64]!r} is not the one that your organization is bound to: name"
                f" {bound_region!r}, or leave it out",
                "region",
            )
        canonical_name = catalog.canonical_name(model)
        fallback = catalog.fallback_of(model) if catalog.model_fallbacks else ()
        route = Route(
            canonical_name,
            share.served,
            engine,
            reach_of(engine, regions, is_bound=bool(bound_region)),
            regions,
            share.adapter,
            fallback,
            is_bound=bool(bound_region),
        )
        if len(catalog.shares[canonical_name]) == 1:
            self._routes[model, region, bound_region] = route
        return route

    def route_encoder(self, model: str, request_id: str, bound_region: str = "") -> EncoderRoute:
        """Choose the route of an embedding request. A request id always gets the same version.

        With `bound_region`, the request may run there only. Raises ModelUnknown, or ModelMismatch
        for a model that generates.
        """
        share = self._share(model, request_id)
        encoder = self._encoders.get(share.served)
        if encoder is None:
            raise ModelMismatch(model, requested="embed", served="Generate")
        regions = (bound_region,) if bound_region else ()
        reach = reach_of(encoder, regions, is_bound=bool(bound_region))
        return EncoderRoute(self._catalog.canonical_name(model), share.served, encoder, reach)

    def find(self, model: str) -> Backend:
        """Look up the engine or encoder of a model, alias or version. Raises ModelUnknown.

        Of several, it is the one with the largest share.
        """
        target = self._catalog.aliases.get(model, model)
        if target in self._catalog.shares:
            return self._backends[self._catalog.main_share(target).served]
        return self._backends[self._share(model, "").served]

    def models(self) -> list[ModelInfo]:
        """List all models by canonical name, each as its version with the largest share."""
        return [replace(self.find(name).model, name=name) for name in sorted(self._catalog.shares)]

    def regions(self) -> list[str]:
        """List the regions of the fleet."""
        return list(self._catalog.fallbacks)

    def check_region(self, region: str) -> None:
        """Raise RequestImpossible unless the fleet has the region."""
        if region not in self._catalog.fallbacks:
            known = ", ".join(self._catalog.fallbacks)
            remedy = (
                f"choose one of {known}"
                if known
                else "this deployment has no regions: leave it unset"
            )
            raise RequestImpossible(f"region {region[:64]!r} is unknown; {remedy}", "region")

    def aliases(self, model: str) -> list[str]:
        """List the aliases of a model, given by its canonical name, and of its versions."""
        return self._catalog.aliases_of(model)

    def other_names(self, model: str) -> dict[str, str]:
        """Map each other name of a model, given by its canonical name, to its target: aliases to a
        model or version, and `name@version` to the model.
        """
        catalog = self._catalog
        aliases = {alias: catalog.aliases[alias] for alias in catalog.aliases_of(model)}
        return aliases | dict.fromkeys(
            (f"{model}{VERSION_MARK}{version}" for version in self.versions(model)), model
        )

    def versions(self, model: str) -> dict[str, float]:
        """Map a model's versions to their shares of requests. `model` is the canonical name."""
        shares = [share for share in self._catalog.shares.get(model, ()) if share.version]
        total = sum(share.weight for share in shares)
        return {share.version: share.weight / total for share in shares}

    def replicas(self, model: str) -> ReplicaCounts:
        """Count a model's engines over all versions. `model` is the canonical name."""
        counts = [
            replica_counts(self._backends[share.served]) for share in self._catalog.shares[model]
        ]
        return ReplicaCounts(*map(sum, zip(*counts, strict=True)))

    def kernels(self, model: str) -> list[str]:
        """List the kernels of a model's ready engines. `model` is the canonical name."""
        served = {share.served for share in self._catalog.shares[model]}
        reports = (report for name, report in self.every_replica() if name in served)
        return sorted({report.kernels for report in reports} - {""})

    def reports(self) -> list[tuple[str, ReplicaReport]]:
        """Describe every replica, each with the name that it serves."""
        return [
            (name, report) for name, backend in self._replicated() for report in backend.reports()
        ]

    def drain(self, drained: Mapping[str, Collection[str]]) -> None:
        """Drain exactly these replicas, listed by the names that they serve."""
        for name, backend in self._replicated():
            backend.drain(drained.get(name, ()))

    def move_out(self, served: str, replica: str) -> None:
        """Move sequences of the engine `served` from a drained replica to others."""
        for name, backend in self._replicated():
            if name == served:
                backend.move_out(replica)

    def every_replica(self) -> Iterator[tuple[str, ReplicaReport]]:
        """Yield the state of every engine and encoder, with the name that it serves."""
        for backend in self.backends():
            name = backend.model.name
            if isinstance(backend, Replicated):
                yield from ((name, report) for report in backend.reports())
                continue
            condition, statistics = backend.condition(), backend.statistics()
            state = ReplicaState(condition.state.value)
            live_count = statistics.running_sequence_count + statistics.waiting_sequence_count
            yield (
                name,
                ReplicaReport(
                    name,
                    "",
                    state,
                    live_count,
                    0,
                    condition.reason,
                    statistics,
                    kernels=condition.kernels,
                ),
            )

    def backends(self) -> list[Backend]:
        """List all engines, then all encoders, sorted by the names that they serve."""
        kinds: tuple[Mapping[str, Backend], ...] = (self._engines, self._encoders)
        return [kind[name] for kind in kinds for name in sorted(kind)]

    def _share(self, model: str, request_id: object) -> Share:
        share = self._catalog.share(model, request_id)
        if share is None:
            known = {*self._catalog.shares, *self._catalog.aliases}
            raise ModelUnknown(model, sorted(known))
        return share

    def _replicated(self) -> Iterator[tuple[str, Replicated]]:
        for name, backend in sorted(self._backends.items()):
            if isinstance(backend, Replicated):
                yield name, backend


def reach_of(backend: Backend, regions: tuple[str, ...], *, is_bound: bool) -> Startable:
    """Return the part of a backend that requests of these regions may use; all without regions."""
    if regions and isinstance(backend, Replicated):
        return backend.within(regions, is_bound=is_bound)
    return backend


def replica_counts(backend: Backend) -> ReplicaCounts:
    """Count the replicas of a backend; one that is not replicated counts as one."""
    if not isinstance(backend, Replicated):
        return ReplicaCounts(int(backend.healthy()), 1, 0)
    reports = backend.reports()
    ready_count = sum(report.state is ReplicaState.READY for report in reports)
    return ReplicaCounts(ready_count, len(reports), sum(report.is_drained for report in reports))


@dataclass(frozen=True, slots=True)
class Share:
    """Version of a model with its weight. `served` is the name of its engine; `version` may be
    empty.

    `adapter` is the engine's, for a model that is an adapter of another one.
    """

    version: str
    served: str
    weight: float = 1.0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Names of models, versions, aliases and regions.

    `shares` has the versions by model name. `aliases` lead to a model, or to a version as
    `name@version`. `fallbacks` lists for each region the only other regions for its requests, in
    order of preference. `own_region` is for requests that do not name one; empty for no preference.
    `model_fallbacks` lists for models the models to try instead, in order.
    """

    shares: Mapping[str, Sequence[Share]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    own_region: str = ""
    model_fallbacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def plain(cls, names: Sequence[str]) -> Catalog:
        """Build a catalog of models without versions, aliases or regions."""
        return cls({name: (Share("", name),) for name in names})

    def canonical_name(self, requested: str) -> str:
        """Resolve a model, alias or version to its canonical name; others are unchanged."""
        target = self.aliases.get(requested, requested)
        if target in self.shares:
            return target
        name, mark, version = target.rpartition(VERSION_MARK)
        known = mark and any(share.version == version for share in self.shares.get(name, ()))
        return name if known else requested

    def share(self, requested: str, request_id: object) -> Share | None:
        """Choose the version for a request, the same in every process; None for unknown names."""
        target = self.aliases.get(requested, requested)
        if target in self.shares:
            shares = self.shares[target]
            return shares[0] if len(shares) == 1 else drawn(shares, f"{target}\0{request_id}")
        name, _, version = target.rpartition(VERSION_MARK)
        return next(
            (
                share
                for share in self.shares.get(name, ())
                if share.version and share.version == version
            ),
            None,
        )

    def fallback_of(self, requested: str) -> tuple[str, ...]:
        """List the models to try if this one cannot take a request; none for `name@version`."""
        if requested in self.shares or requested in self.aliases:
            return self.model_fallbacks.get(self.canonical_name(requested), ())
        return ()

    def main_share(self, name: str) -> Share:
        """Find the version with the largest weight, the first of equal ones."""
        return max(self.shares[name], key=lambda share: share.weight)

    def aliases_of(self, name: str) -> list[str]:
        """List the aliases of a model and of its versions, sorted."""
        return sorted(alias for alias in self.aliases if self.canonical_name(alias) == name)

    def regions(self, requested: str) -> tuple[str, ...]:
        """List the regions where a request may run, in order of preference; empty for anywhere.

        Raises KeyError for an unknown region.
        """
        region = requested or self.own_region
        return (region, *self.fallbacks[region]) if region else ()


def drawn(shares: Sequence[Share], key: str) -> Share:
    """Choose a share by weight and hash of the key. New weights move as few keys as possible."""
    total = sum(share.weight for share in shares)
    point = (
        int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        / 2.0**64
        * total
    )
    for share in shares:
        point -= share.weight
        if point < 0:
            return share
    return max(shares, key=lambda share: share.weight)  # rounding may reach the total
