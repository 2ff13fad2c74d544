"""RPCs about the running service: requests, replicas, traffic, and what an operator must see."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import live_requests_pb2 as live_pb
from weir.v1 import operation_pb2 as operation_pb
from weir.v1 import replicas_pb2 as replica_pb

from api.access.servicer import AuthenticatedServicer, SharedReads
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import find_generation
from api.observability.traffic import Latencies, ModelTraffic, Traffic, traffic_of
from inference.routing.router import Router
from metering.backlog import Concern, read_concerns
from metering.control import live
from metering.control.live import LiveRow, cancel_request
from metering.control.traffic import Counts, Period
from metering.core.audit import record_change
from metering.core.errors import InvalidValue, NotFound
from metering.holds.recovery import sweep_expired_holds
from metering.receipts.signing import Signer
from metering.tenants import tenants

T = TypeVar("T", live.ProjectRequest, LiveRow)

Killed = live_pb.KillRequestResponse

REASON_CHARS_MAX = 200
PAGE_SIZE = 200
END_WAIT_S = 2.0  # a healthy process ends a request within milliseconds
END_POLL_S = 0.005
# Seconds between two views of the same requests or replicas, each of which asks all processes.
VIEWS_APART_S = 0.1
TRAFFIC_AGE_MAX_S = 5.0  # a third of the shortest step
CONCERNS_AGE_MAX_S = 10.0
PERIODS = {
    operation_pb.TRAFFIC_PERIOD_UNSPECIFIED: Period.HOUR,
    operation_pb.TRAFFIC_PERIOD_QUARTER_HOUR: Period.QUARTER_HOUR,
    operation_pb.TRAFFIC_PERIOD_HOUR: Period.HOUR,
    operation_pb.TRAFFIC_PERIOD_DAY: Period.DAY,
}
# Fields of a message by the counts of `Counts`.
COUNT_FIELDS = [
    f"{each.removesuffix('s').replace('tokens', 'token')}_counts" for each in Counts._fields
]


class LiveCalls(AuthenticatedServicer):
    """RPCs for running requests."""

    _database_url: str
    _signer: Signer | None
    _views: SharedReads

    async def ListLiveRequests(
        self, request: live_pb.ListLiveRequestsRequest, context: Context
    ) -> live_pb.ListLiveRequestsResponse:
        await self._caller(context)
        async with self._sessions() as session:
            owner = request.organization
            owner_id = (await tenants.find_organization(session, owner)).id if owner else None
        selection = owner_id, request.page_size or PAGE_SIZE, request.stuck_only
        return await self._views.read(selection, lambda: self._view(*selection))

    async def _view(
        self, owner_id: uuid.UUID | None, page_size: int, stuck_only: bool
    ) -> live_pb.ListLiveRequestsResponse:
        view = await live.live_view(
            self._sessions, organization_id=owner_id, page_size=page_size, stuck_only=stuck_only
        )
        return live_pb.ListLiveRequestsResponse(
            requests=map(live_request_message, view.requests),
            organizations=[
                wire.message_of(live_pb.LiveOrganization, each) for each in view.organizations
            ],
            request_count=view.request_count,
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

    async def GetRequest(
        self, request: live_pb.GetRequestRequest, context: Context
    ) -> live_pb.GetRequestResponse:
        await self._caller(context)
        request_id = wire.parse_request_id(request.request_id)
        async with self._sessions() as session:
            project_id = await project_id_of(session, request.project)
            owners = await live.find_request_owners(session, request_id, project_id)
            owner = await only_one(session, owners, request_id)
            return live_pb.GetRequestResponse(
                generation=await find_generation(session, owner.project_id, request_id),
                organization_name=owner.organization_name,
                project_name=owner.project_name,
                api_key_prefix=owner.api_key_prefix,
            )

    async def KillRequest(
        self, request: live_pb.KillRequestRequest, context: Context
    ) -> live_pb.KillRequestResponse:
        await self._caller(context)
        request_id = wire.parse_request_id(request.request_id)
        check_reason(request.reason)
        located, had_ended = await self._find_request(request_id, request.project)
        if had_ended:
            return await self._killed(Killed.RESULT_ALREADY_ENDED, request_id, located)
        async with self._transaction(context) as (session, actor):
            await record_kill(session, actor, request_id, located, request.reason)
            await cancel_request(
                session, project_id=located.project_id, request_id=request_id, reason=request.reason
            )
        ended = await self._wait_for_end(request_id, located)
        result = Killed.RESULT_ENDED if ended else Killed.RESULT_PENDING
        return await self._killed(result, request_id, located)

    async def ExpireOverdueHolds(
        self, request: live_pb.ExpireOverdueHoldsRequest, context: Context
    ) -> live_pb.ExpireOverdueHoldsResponse:
        """Expire overdue holds now, like the periodic task of the worker."""
        await self._caller(context)
        expired_count = await sweep_expired_holds(self._database_url, signer=self._signer)
        if expired_count:
            async with self._transaction(context) as (session, actor):
                after, action = {"expired_count": expired_count}, "holds.expire_overdue"
                await record_change(session, actor=actor, action=action, subject_id="", after=after)
        return live_pb.ExpireOverdueHoldsResponse(expired_count=expired_count)

    async def _find_request(
        self, request_id: uuid.UUID, project: str
    ) -> tuple[live.ProjectRequest, bool]:
        """Find the project of a request, and whether the request has ended.

        Raises NotFound, or InvalidValue if several projects have a request with this id.
        """
        async with self._sessions() as session:
            project_id = await project_id_of(session, project)
            found = await live.find_project_requests(session, request_id, project_id)
        running = [located for located in found if located.is_held] or await live.find_waiting(
            self._sessions, request_id, project_id
        )
        async with self._sessions() as session:
            return await only_one(session, running or found, request_id), not running

    async def _wait_for_end(self, request_id: uuid.UUID, located: live.ProjectRequest) -> bool:
        """Wait until a request has ended; return False if it has not within `END_WAIT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                # It may run in another process, so there is no event to wait for.
                while await self._runs(request_id, located):  # noqa: ASYNC110
                    await asyncio.sleep(END_POLL_S)
                return True
        return False

    async def _runs(self, request_id: uuid.UUID, located: live.ProjectRequest) -> bool:
        if not located.is_held and await live.find_waiting(
            self._sessions, request_id, located.project_id
        ):
            return True
        async with self._sessions() as session:  # a waiting request may have a hold by now
            return any(
                held.is_held
                for held in await live.find_project_requests(
                    session, request_id, located.project_id
                )
            )

    async def _killed(
        self, result: Killed.Result.ValueType, request_id: uuid.UUID, located: live.ProjectRequest
    ) -> Killed:
        answer = Killed(result=result)
        with contextlib.suppress(NotFound):
            async with self._sessions() as session:
                answer.generation.CopyFrom(
                    await find_generation(session, located.project_id, request_id)
                )
                if result == Killed.RESULT_PENDING and (
                    hold := await live.find_running_hold(session, located.project_id, request_id)
                ):
                    answer.expire_time.FromDatetime(hold.expires_at)
        return answer


async def project_id_of(session: AsyncSession, project: str) -> uuid.UUID | None:
    """Find a project by name or id; None for an empty name. Raises: NotFound."""
    return (await tenants.find_project(session, project)).id if project else None


async def only_one(session: AsyncSession, found: Sequence[T], request_id: uuid.UUID) -> T:
    """Return the only request with an id.

    Raises NotFound, or InvalidValue if several projects have a request with this id.
    """
    if not found:
        raise NotFound("request", str(request_id))
    if len(found) > 1:
        names = await tenants.project_names(session, [each.project_id for each in found])
        raise InvalidValue(
            "project",
            f"several projects have a request with this id, name one: {', '.join(names)}",
        )
    return found[0]


async def record_kill(
    session: AsyncSession,
    actor: str,
    request_id: uuid.UUID,
    located: live.ProjectRequest,
    reason: str,
) -> None:
    hold = await live.find_running_hold(session, located.project_id, request_id)
    before: dict[str, object] = {"project_id": str(located.project_id), "state": "waiting"}
    if hold is not None:
        before |= {
            "organization_id": str(hold.organization_id),
            "api_key_id": str(hold.api_key_id),
            "model": hold.model,
            "state": hold.state,
            "delivered_token_count": hold.delivered_token_count,
        }
    after = before | {"state": "ordered to end", "reason": reason}
    await record_change(
        session,
        actor=actor,
        action="request.kill",
        subject_id=str(request_id),
        before=before,
        after=after,
    )


def live_request_message(row: LiveRow) -> live_pb.LiveRequest:
    times = {"admit_time": row.admitted_at, "expire_time": row.expires_at}
    return wire.message_of(
        live_pb.LiveRequest, row, age=wire.duration(max(row.age_s, 0.0)), **times
    )


def check_reason(reason: str) -> None:
    """Check the length of a reason and that it is printable. Raises: InvalidValue."""
    if len(reason) > REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"must be at most {REASON_CHARS_MAX} printable characters")


class TrafficCalls(AuthenticatedServicer):
    """RPCs for the charts and the front page of an operator."""

    _traffic: SharedReads
    _concerns: SharedReads

    async def GetTraffic(
        self, request: operation_pb.GetTrafficRequest, context: Context
    ) -> operation_pb.GetTrafficResponse:
        await self._caller(context)
        period = PERIODS.get(request.period)
        if period is None:
            raise InvalidValue("period", f"must be 0 to {max(PERIODS)}, got {request.period}")
        return await self._traffic.read(period, lambda: self._read_traffic(period))

    async def _read_traffic(self, period: Period) -> operation_pb.GetTrafficResponse:
        return traffic_message(await traffic_of(self._sessions, period))

    async def ListConcerns(
        self, request: operation_pb.ListConcernsRequest, context: Context
    ) -> operation_pb.ListConcernsResponse:
        await self._caller(context)
        return await self._concerns.read("", self._read_concerns)

    async def _read_concerns(self) -> operation_pb.ListConcernsResponse:
        async with self._sessions() as session:
            concerns = await read_concerns(session)
        return operation_pb.ListConcernsResponse(concerns=map(concern_message, concerns))


def concern_message(concern: Concern) -> operation_pb.Concern:
    return operation_pb.Concern(
        kind=operation_pb.ConcernKind.Value(f"CONCERN_KIND_{concern.kind.name}"),
        organization_name=concern.organization_name,
        subject=concern.subject,
        count=concern.count,
        age=None if concern.age_s is None else wire.duration(max(concern.age_s, 0.0)),
        detail=concern.detail,
    )


def traffic_message(traffic: Traffic) -> operation_pb.GetTrafficResponse:
    message = operation_pb.GetTrafficResponse(
        step=wire.duration(traffic.period.step_s),
        step_count=traffic.period.step_count,
        total=model_message(traffic.total),
        models=map(model_message, traffic.models),
    )
    message.start_time.FromMilliseconds(round(traffic.start_s * 1000))
    return message


def model_message(traffic: ModelTraffic) -> operation_pb.ModelTraffic:
    counts: dict[str, Any] = dict(zip(COUNT_FIELDS, traffic.counts, strict=True))
    return operation_pb.ModelTraffic(
        model=traffic.model,
        running_counts=traffic.running,
        waiting_counts=traffic.waiting,
        first_token=latency_message(traffic.first_token),
        inter_token=latency_message(traffic.inter_token),
        errors=[
            operation_pb.TrafficError(reason=reason, count=count)
            for reason, count in traffic.errors
        ],
        **counts,
    )


def latency_message(latencies: Latencies) -> operation_pb.Latency:
    return operation_pb.Latency(
        p50_ms=latencies.p50_ms,
        p99_ms=latencies.p99_ms,
        period_p50_ms=latencies.period_p50_ms,
        period_p99_ms=latencies.period_p99_ms,
    )


class ReplicaCalls(AuthenticatedServicer):
    """RPCs for replicas."""

    _router: Router
    _views: SharedReads

    async def ListReplicas(
        self, request: replica_pb.ListReplicasRequest, context: Context
    ) -> replica_pb.ListReplicasResponse:
        await self._caller(context)
        view, drains = await self._views.read("replicas", self._replicas_and_drains)
        rows: Sequence[LiveRow] = view.replicas
        if model := request.model:
            rows = [row for row in rows if live.is_of(row.model, model)]
            drains = [drain for drain in drains if live.is_of(drain.model, model)]
            if not (rows or drains or self._own(model)):
                raise NotFound("model with replicas", model)
        return replica_pb.ListReplicasResponse(
            drains=map(drain_message, drains), **replicas_of(view, rows)
        )

    async def _replicas_and_drains(self) -> tuple[live.ReplicaView, Sequence[LiveRow]]:
        view = await live.replica_view(self._sessions)
        async with self._sessions() as session:
            return view, await live.list_drains(session)

    async def DrainReplica(
        self, request: replica_pb.DrainReplicaRequest, context: Context
    ) -> replica_pb.DrainReplicaResponse:
        await self._caller(context)
        check_reason(request.reason)
        move_after = wire.given_duration(request, "move_after")
        model = await self._served_name(request.model, request.replica)
        async with self._transaction(context) as (session, actor):
            order = await live.drain_replica(
                session,
                model=model,
                replica=request.replica,
                reason=request.reason,
                move_after=move_after,
                actor=actor,
            )
            drain = drain_message(order)
        view = await live.replica_view(self._sessions)
        named = view.named(model, request.replica)
        return replica_pb.DrainReplicaResponse(drain=drain, **replicas_of(view, named))

    async def UndrainReplica(
        self, request: replica_pb.UndrainReplicaRequest, context: Context
    ) -> replica_pb.UndrainReplicaResponse:
        await self._caller(context)
        check_reason(request.reason)
        model = await self._served_name(request.model, request.replica)
        async with self._transaction(context) as (session, actor):
            undrained = await live.end_drain(
                session, model=model, replica=request.replica, reason=request.reason, actor=actor
            )
        view = await live.replica_view(self._sessions)
        named = view.named(model, request.replica)
        return replica_pb.UndrainReplicaResponse(undrained=undrained, **replicas_of(view, named))

    async def _served_name(self, model: str, replica: str) -> str:
        """Find the served name (model and version) of a replica that is reported or drained.

        Raises NotFound, or InvalidValue if several versions have a replica with this name.
        """
        view = await live.replica_view(self._sessions)
        async with self._sessions() as session:
            known = {(drain.model, drain.replica) for drain in await live.list_drains(session)}
        known |= {(row.model, row.replica) for row in view.replicas}
        of_model = sorted(
            {entry for entry in known if live.is_of(entry[0], model)} | self._own(model)
        )
        if not of_model:
            raise NotFound("model with replicas", model)
        served = [served for served, name in of_model if name == replica]
        if not served:
            raise NotFound("replica", replica)
        if len(served) > 1:
            raise InvalidValue(
                "model",
                f"several versions have a replica with this name, name one: {', '.join(served)}",
            )
        return served[0]

    def _own(self, model: str) -> set[tuple[str, str]]:
        """Return served name and name of this process's replicas of a model.

        Its last report may not include all of them yet.
        """
        return {
            (served, report.name)
            for served, report in self._router.reports()
            if live.is_of(served, model)
        }


def replicas_of(view: live.ReplicaView, rows: Iterable[LiveRow]) -> dict[str, Any]:
    """Convert replicas, and the processes that did not report theirs, to fields of a response."""
    return {
        "replicas": map(replica_message, rows),
        "unresponsive_process_ids": map(str, view.unresponsive_process_ids),
    }


def replica_message(row: LiveRow) -> replica_pb.Replica:
    return wire.message_of(replica_pb.Replica, row, drained=row.is_drained)


def drain_message(order: LiveRow) -> replica_pb.ReplicaDrain:
    move_after = None if order.move_after_ms is None else wire.duration(order.move_after_ms / 1000)
    return wire.message_of(
        replica_pb.ReplicaDrain, order, drain_time=order.drained_at, move_after=move_after
    )
