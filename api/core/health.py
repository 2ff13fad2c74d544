"""Health of this process, and the reasons if it is not serving.

Each service has its gRPC health name. Each part that services depend on has one too: `database`,
`journal`, `engine/<model>` for each model, and `billing_worker`. Load balancers check a service;
its parts show the reason. No request can be served without the database, the journal or any engine.
Without a billing worker, requests are served and billed later, so its state is only informative.
`operator_http.py` reports the same over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from weir.v1 import (
    admin_service_pb2,
    billing_service_pb2,
    inference_service_pb2,
    receipt_service_pb2,
)

from api.core.endpoint import Endpoint
from inference.engine import Backend
from inference.routing.router import ReplicaReport, Router
from metering.holds.holds import HoldStore
from metering.holds.journal import UsageJournal
from metering.store.db import DatabaseSettings

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (inference_service_pb2, "InferenceService"),
        (admin_service_pb2, "AdminService"),
        (billing_service_pb2, "BillingService"),
        (receipt_service_pb2, "ReceiptService"),
    )
)

INFERENCE_SERVICE = SERVICES[0]
INTERVAL_S = 0.2
STORE, JOURNAL, BILLING_WORKER = "database", "journal", "billing_worker"
ENGINE = "engine/"  # before the model's name

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """State of one part since `since`. `fault` says why the part does not work, if it does not."""

    fault: str
    since: datetime


class Health:
    """Health by name: the whole server (empty name), each service, and the parts they depend on."""

    def __init__(self) -> None:
        self.servicer = HealthServicer()
        self._last: dict[str, bool] = {}
        # The journal's owner reports its faults.
        self._parts = {JOURNAL: Part("", datetime.now(UTC))}
        # Reasons why no request can be admitted; empty if requests can be.
        self.reasons: tuple[str, ...] = ("starting",)
        self.warnings: tuple[str, ...] = ()  # why requests take longer than they should

    def report(self, part: str, fault: str) -> None:
        """Set the state of a part; an empty `fault` means healthy. `publish` tells the watchers."""
        before = self._parts.get(part)
        changed = before is None or bool(before.fault) is not bool(fault)
        since = datetime.now(UTC) if before is None or changed else before.since
        self._parts[part] = Part(fault, since)

    def keep(self, prefix: str, names: Collection[str]) -> None:
        """Forget the parts with this prefix that are not named."""
        kept = {prefix + name for name in names}
        gone = [each for each in self._parts if each.startswith(prefix) and each not in kept]
        for part in gone:
            del self._parts[part]

    @property
    def parts(self) -> dict[str, bool]:
        """Return by name whether each part works."""
        return {name: not part.fault for name, part in self._parts.items()}

    def described(self) -> dict[str, dict[str, str]]:
        """Describe the parts for operators: state, time of the last change, reason. Thread-safe."""
        return {
            name: {
                "state": "not serving" if part.fault else "serving",
                "since": part.since.isoformat(timespec="seconds"),
                **({"reason": part.fault} if part.fault else {}),
            }
            for name, part in sorted(self._parts.copy().items())
        }

    async def publish(self, serving: Mapping[str, bool]) -> None:
        """Notify the gRPC watchers of each name whose state has changed."""
        gone = [each for each in self._last if each.startswith(ENGINE) and each not in self._parts]
        for name in gone:  # clients that watch it learn that it left
            del self._last[name]
            await self.servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        for name, well in serving.items():
            if self._last.get(name) is not well:
                self._last[name] = well
                status = (
                    health_pb2.HealthCheckResponse.SERVING
                    if well
                    else health_pb2.HealthCheckResponse.NOT_SERVING
                )
                await self.servicer.set(name, status)


async def keep_health(
    health: Health,
    endpoint: Endpoint,
    router: Router,
    holds: HoldStore,
    journal: UsageJournal,
    settings: DatabaseSettings,
    stopping: asyncio.Event,
) -> None:
    """Update health and connection file until the process drains, then report not serving."""
    previous: Mapping[str, bool] = {}
    failed: set[str] = set()
    while not stopping.is_set():
        health.report(
            STORE, "" if store_is_well(holds, settings) else "the database does not answer"
        )
        health.report(JOURNAL, "" if journal.can_write() else "its file cannot be written")
        for engine in router.backends():
            health.report(f"{ENGINE}{engine.model.name}", engine_fault(engine))
        health.keep(ENGINE, [engine.model.name for engine in router.backends()])
        parts = health.parts
        serving = services(parts, may_admit_without_store(holds, settings))
        for name in (name for name, well in parts.items() if previous.get(name, well) is not well):
            if not parts[name]:
                failed.add(name)
                log.warning("part_failed", part=name, serving=serving[""])
            else:  # at the start, a part that becomes ready has not failed
                event = "part_recovered" if name in failed else "part_ready"
                log.info(event, part=name, serving=serving[""])
        previous = parts
        await health.publish(parts | serving)
        health.reasons = reasons(parts, serving[""])
        health.warnings = warnings(report for _, report in router.every_replica())
        endpoint.write(serving=serving[""])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), INTERVAL_S)
    health.reasons = ("draining",)
    await health.publish(dict.fromkeys(("", *SERVICES), False))
    endpoint.write(serving=False)


def engine_fault(engine: Backend) -> str:
    """Return why a model cannot be served; empty if it is ready or would start on demand."""
    if engine.healthy():
        return ""
    condition = engine.condition()
    return "" if condition.starts_on_demand else condition.reason or condition.state.value


def services(parts: Mapping[str, bool], may_admit_without_store: bool) -> dict[str, bool]:
    """Derive the state of each service from the states of the parts.

    The state of the whole server, with the empty name, is that of the inference service.
    """
    inference = (
        any(well for name, well in parts.items() if name.startswith(ENGINE))
        and parts.get(JOURNAL, True)
        and (parts[STORE] or may_admit_without_store)
    )
    return dict.fromkeys(SERVICES, parts[STORE]) | {INFERENCE_SERVICE: inference, "": inference}


def reasons(parts: Mapping[str, bool], is_serving: bool) -> tuple[str, ...]:
    """Return the reasons why no request can be admitted; empty while the server is serving.

    Model names are left out, since the health port requires no API key.
    """
    if is_serving:
        return ()
    engine_ready = any(well for name, well in parts.items() if name.startswith(ENGINE))
    conditions = {
        "no model is ready": not engine_ready,
        "the database does not answer": not parts[STORE],
        "the usage journal cannot be written": not parts.get(JOURNAL, True),
    }
    return tuple(reason for reason, holds in conditions.items() if holds)


def warnings(reports: Iterable[ReplicaReport]) -> tuple[str, ...]:
    """Return warnings about engines that run slower than they could. Model names are left out."""
    if any(report.kernels == "torch" for report in reports):
        return ("an engine computes without native kernels: see `weir doctor engine`",)
    return ()


def store_is_well(holds: HoldStore, settings: DatabaseSettings) -> bool:
    """Return True if the database answers, or has been unavailable only briefly.

    False if it has never answered.
    """
    return holds.away_s is None or (holds.has_answered and holds.away_s < settings.unready_after_s)


def may_admit_without_store(holds: HoldStore, settings: DatabaseSettings) -> bool:
    """Return whether requests can be admitted under pre-authorized holds."""
    return (
        settings.unavailable_policy == "grace" and holds.statistics().preauthorized_hold_count > 0
    )
