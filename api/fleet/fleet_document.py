"""Canonical document of a fleet, and the differences between two fleets.

The document has the keys of a fleet file (`fleet_file.py`), without defaults, and absolute paths:
parsed again, it is the same fleet on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from api.fleet.endpoint_slices import SlicesTerms
from api.fleet.fleet_file import (
    RECOVERY_WAIT_S,
    Fleet,
    FleetModel,
    FleetTarget,
    FleetVersion,
)

COLUMNS = 100
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FleetChange:
    """Difference of two fleets at one place. None: the place does not exist."""

    path: str
    before: Any
    after: Any


def document_of(fleet: Fleet) -> str:
    """Write the canonical document of a fleet."""
    return yaml.safe_dump(values_of(fleet), sort_keys=False, allow_unicode=True, width=COLUMNS)


def changes_between(before: Fleet, after: Fleet) -> list[FleetChange]:
    """List the differences of two fleets, in the order of their documents."""
    return list(_changes("", keyed(values_of(before)), keyed(values_of(after))))


def values_of(fleet: Fleet) -> Values:
    """Convert a fleet to the values of its document."""
    return given(
        regions={name: list(others) for name, others in fleet.regions.items()},
        memory_bytes=fleet.memory_bytes,
        gpus=list(fleet.gpus),
        pools={name: {"max": pool.unit_count_max} for name, pool in fleet.pools.items()},
        models={model.name: _model(model) for model in fleet.models},
        aliases=dict(fleet.aliases),
    )


def given(**values: Any) -> Values:
    """Leave out empty values."""
    return {name: value for name, value in values.items() if value not in (None, "", [], {}, False)}


def _model(model: FleetModel) -> Values:
    terms: Values = {}
    if model.policy != "prefix_aware":
        terms["policy"] = model.policy
    if model.recovery_wait_s != RECOVERY_WAIT_S:
        terms["recovery_wait_s"] = model.recovery_wait_s
    if model.fallback:
        terms["fallback"] = list(model.fallback)
    if len(model.versions) == 1 and not model.versions[0].version:
        return terms | _version(model.versions[0])
    versions = {}
    for version in model.versions:
        weight = {} if version.weight == 1.0 else {"weight": version.weight}
        versions[version.version] = _version(version) | weight
    return terms | {"versions": versions}


def _version(version: FleetVersion) -> Values:
    counts = version.replica_count_min, version.replica_count_max
    is_usual = bool(version.targets) or counts == (1, 1)
    found = given(
        directory=None if version.directory is None else str(version.directory.absolute()),
        region=version.region,
        targets=list(map(_target, version.targets)),
        memory_bytes=version.memory_bytes or None,
        engine_config=dict(version.engine_config),
        gpus=list(version.gpus),
        share_prefixes=version.share_prefixes,
        launcher={} if version.launcher is None else version.launcher.values(),
        replicas={} if is_usual else dict(zip(("min", "max"), counts, strict=True)),
    )
    if version.idle_timeout_s is not None:  # 0 is a value: never
        found["idle_timeout_s"] = version.idle_timeout_s
    return {"engine": version.engine} | found


def _target(target: FleetTarget) -> str | Values:
    if target == FleetTarget(target.address):
        return target.address
    return given(
        address=target.address,
        region=target.region,
        key_file=None if target.key_file is None else str(target.key_file.absolute()),
        key_header=target.key_header,
        endpoint_slices={} if target.slices is None else _slices(target.slices),
    )


def _slices(terms: SlicesTerms) -> Values:
    return given(
        namespace=terms.namespace,
        service=terms.service,
        kubeconfig=None if terms.kubeconfig is None else str(terms.kubeconfig.absolute()),
    )


def keyed(value: Any) -> Any:
    """Convert lists of targets to mappings by address, so that each is compared with itself."""
    if not isinstance(value, dict):
        return value
    found = {name: keyed(each) for name, each in value.items()}
    if isinstance(targets := found.get("targets"), list):
        pairs = [
            (each, {}) if isinstance(each, str) else (each["address"], each) for each in targets
        ]
        found["targets"] = dict(pairs)
    return found


def _changes(path: str, before: Any, after: Any) -> Iterator[FleetChange]:
    if before == after and _order(before) == _order(after):
        return
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield FleetChange(path, before, after)
        return
    common = [name for name in after if name in before]
    if common != [name for name in before if name in after]:
        yield FleetChange(f"{path} (order)", list(before), list(after))
    for name in {**before, **after}:
        yield from _changes(f"{path}.{name}" if path else name, before.get(name), after.get(name))


def _order(value: Any) -> str:
    """Write a value so that equal ones with keys in another order differ."""
    return json.dumps(value, default=str) if isinstance(value, Mapping) else ""
