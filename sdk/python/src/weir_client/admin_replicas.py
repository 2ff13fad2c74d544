"""The calls of the admin API about replicas."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from weir.v1 import admin_service_pb2_grpc
from weir.v1 import replicas_pb2 as pb

from weir_client import wire
from weir_client.replicas import DrainedReplica, ReplicaList, UndrainedReplica
from weir_client.unary import UnaryClient


class AsyncReplicaCalls(UnaryClient):
    """Part of `AsyncAdminClient`."""

    @property
    def _stub(self) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
        return admin_service_pb2_grpc.AdminServiceStub(self._opened().channel)

    async def list_replicas(self, model: str = "") -> ReplicaList:
        """The engines of all models, in all processes; of one model or one `name@version` if it is given."""
        answer = await self._call(self._stub.ListReplicas, pb.ListReplicasRequest(model=model))
        return wire.read(ReplicaList, answer)

    async def drain_replica(self, model: str, name: str, *, reason: str = "", move_after_s: float | None = None) -> DrainedReplica:
        """Takes a replica out of use in all processes. Doing it twice changes nothing.

        move_after_s: so long after the order, what still runs there is moved to other replicas, as far as it can be; None: it
        ends where it runs.
        """
        request = pb.DrainReplicaRequest(model=model, replica=name, reason=reason)
        if move_after_s is not None:
            request.move_after.CopyFrom(_duration(move_after_s))
        answer = await self._call(self._stub.DrainReplica, request)
        return wire.read(DrainedReplica, answer)

    async def undrain_replica(self, model: str, name: str, *, reason: str = "") -> UndrainedReplica:
        """Puts a replica into use again. Doing it twice changes nothing."""
        request = pb.UndrainReplicaRequest(model=model, replica=name, reason=reason)
        answer = await self._call(self._stub.UndrainReplica, request)
        return wire.read(UndrainedReplica, answer)


def _duration(seconds: float) -> Duration:
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)
