"""Replicas: list, drain, and back into service."""

from __future__ import annotations

from weir.v1 import replicas_pb2 as replica_pb

from api.access.servicer import AuthenticatedServicer
from api.admin.live_calls import check_reason
from api.core import wire
from api.core.interceptor import Context
from inference.routing.router import Router
from metering.control import live
from metering.control.live import LiveRow
from metering.core.errors import InvalidValue, NotFound


class ReplicaCalls(AuthenticatedServicer):
    """Calls on replicas."""

    _router: Router

    async def ListReplicas(
        self, request: replica_pb.ListReplicasRequest, context: Context
    ) -> replica_pb.ListReplicasResponse:
        await self._caller(context)
        view = await live.replica_view(self._sessions)
        async with self._sessions() as session:
            drains = await live.list_drains(session)
        rows = [
            row
            for row in view.replicas
            if not request.model or live.is_of(row.model, request.model)
        ]
        drains = [
            drain for drain in drains if not request.model or live.is_of(drain.model, request.model)
        ]
        if request.model and not (rows or drains or self._own(request.model)):
            raise NotFound("model with replicas", request.model)
        return replica_pb.ListReplicasResponse(
            replicas=map(replica_message, rows),
            drains=map(drain_message, drains),
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

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
        return replica_pb.DrainReplicaResponse(
            drain=drain,
            replicas=map(replica_message, view.named(model, request.replica)),
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

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
        return replica_pb.UndrainReplicaResponse(
            undrained=undrained,
            replicas=map(replica_message, view.named(model, request.replica)),
            unresponsive_process_ids=map(str, view.unresponsive_process_ids),
        )

    async def _served_name(self, model: str, replica: str) -> str:
        """Return the served name of a replica known to processes or drains.

        Raises: NotFound, InvalidValue.
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
        """Return this process's replicas of a model, which may not be in its report yet."""
        return {
            (served, report.name)
            for served, report in self._router.reports()
            if live.is_of(served, model)
        }


def replica_message(row: LiveRow) -> replica_pb.Replica:
    return wire.message_of(replica_pb.Replica, row, drained=row.is_drained)


def drain_message(order: LiveRow) -> replica_pb.ReplicaDrain:
    move_after = None if order.move_after_ms is None else wire.duration(order.move_after_ms / 1000)
    return wire.message_of(
        replica_pb.ReplicaDrain, order, drain_time=order.drained_at, move_after=move_after
    )
