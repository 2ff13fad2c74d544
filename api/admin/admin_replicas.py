"""The calls of `AdminService` about replicas: look at them, take one out of use in all processes, and put it back."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from weir.v1 import admin_service_pb2_grpc as pb_grpc
from weir.v1 import replicas_pb2 as pb

from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.interceptor import Context
from inference.routing.router import Router
from metering.control import replica_drains
from metering.control.control_models import ReplicaDrain
from metering.control.replica_drains import ReplicaRow
from metering.core.errors import InvalidValue, NotFound

REASON_CHARS_MAX = 200


class ReplicaCalls(AdminCalls, pb_grpc.AdminServiceServicer):
    """See `proto/weir/v1/replicas.proto`."""

    _router: Router

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        """Lists engines and orders."""
        await self._caller(context)
        view = await replica_drains.replica_view(self._sessions)
        async with self._sessions() as session:
            drains = await replica_drains.list_drains(session)
        rows = [row for row in view.replicas if not request.model or row.is_of(request.model)]
        drains = [drain for drain in drains if not request.model or replica_drains.is_of(drain.model, request.model)]
        if request.model and not (rows or drains or self._own(request.model)):
            raise NotFound("model with replicas", request.model)
        return pb.ListReplicasResponse(
            replicas=map(replica_message, rows),
            drains=map(drain_message, drains),
            silent_owner_ids=map(str, view.silent_owner_ids),
        )

    async def DrainReplica(self, request: pb.DrainReplicaRequest, context: Context) -> pb.DrainReplicaResponse:
        """Takes a replica out of use."""
        await self._caller(context)
        check_reason(request.reason)
        move_after = span(request.move_after) if request.HasField("move_after") else None
        model = await self._served_name(request.model, request.replica)
        async with self._transaction(context) as (session, actor):
            order = await replica_drains.order_drain(
                session, model=model, replica=request.replica, reason=request.reason, move_after=move_after, actor=actor
            )
            drain = drain_message(order)
        view = await replica_drains.replica_view(self._sessions)
        return pb.DrainReplicaResponse(
            drain=drain,
            replicas=map(replica_message, view.named(model, request.replica)),
            silent_owner_ids=map(str, view.silent_owner_ids),
        )

    async def UndrainReplica(self, request: pb.UndrainReplicaRequest, context: Context) -> pb.UndrainReplicaResponse:
        """Puts a replica into use again."""
        await self._caller(context)
        check_reason(request.reason)
        model = await self._served_name(request.model, request.replica)
        async with self._transaction(context) as (session, actor):
            undrained = await replica_drains.end_drain(
                session, model=model, replica=request.replica, reason=request.reason, actor=actor
            )
        view = await replica_drains.replica_view(self._sessions)
        return pb.UndrainReplicaResponse(
            undrained=undrained,
            replicas=map(replica_message, view.named(model, request.replica)),
            silent_owner_ids=map(str, view.silent_owner_ids),
        )

    async def _served_name(self, model: str, replica: str) -> str:
        """The name that a replica serves, of all that processes and orders know. Raises: NotFound, InvalidValue."""
        view = await replica_drains.replica_view(self._sessions)
        async with self._sessions() as session:
            known = {(drain.model, drain.replica) for drain in await replica_drains.list_drains(session)}
        known |= {(row.model, row.replica) for row in view.replicas}
        of_model = sorted({entry for entry in known if replica_drains.is_of(entry[0], model)} | self._own(model))
        if not of_model:
            raise NotFound("model with replicas", model)
        served = [served for served, name in of_model if name == replica]
        if not served:
            raise NotFound("replica", replica)
        if len(served) > 1:
            raise InvalidValue("model", f"several versions have a replica of this name, say which: {', '.join(served)}")
        return served[0]

    def _own(self, model: str) -> set[tuple[str, str]]:
        """What this process has of a model, which a busy one may not have told in time."""
        return {(served, report.name) for served, report in self._router.reports() if replica_drains.is_of(served, model)}


def check_reason(reason: str) -> None:
    """Raises: InvalidValue."""
    if len(reason) > REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"give at most {REASON_CHARS_MAX} printable characters")


def span(message: Duration) -> timedelta:
    """A length of time. Raises: InvalidValue for one that Python cannot hold."""
    try:
        return message.ToTimedelta()
    except (ValueError, OverflowError) as error:
        raise InvalidValue("move_after", "give a duration of at most 30 days") from error


def replica_message(row: ReplicaRow) -> pb.Replica:
    """One replica of one process."""
    return pb.Replica(
        model=row.model,
        replica=row.replica,
        region=row.region,
        state=pb.ReplicaState.Value(f"REPLICA_STATE_{row.state.upper()}"),
        reason=row.reason,
        drained=row.is_drained,
        request_count=row.request_count,
        outstanding_token_count=row.outstanding_token_count,
        owner_id=str(row.owner_id),
        owner_name=row.owner_name,
    )


def drain_message(order: ReplicaDrain) -> pb.ReplicaDrain:
    """One order."""
    move_after_ms = order.move_after_ms
    return pb.ReplicaDrain(
        model=order.model,
        replica=order.replica,
        reason=order.reason,
        drain_time=wire.timestamp(order.drained_at),
        move_after=None if move_after_ms is None else wire.duration(move_after_ms / 1000),
    )
