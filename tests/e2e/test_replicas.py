"""Drain of a replica by an admin: in all processes, also later ones, while its requests finish."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import inference_service_pb2 as inference_pb
from weir.v1 import replicas_pb2 as pb
from weir_client import Model

from api.core.settings import bundled_models
from inference.routing.replica import DRAINED_RETRY_S
from tests.calls import calls
from tests.conftest import new_database
from tests.e2e.conftest import Serve
from tests.e2e.encoders import price_encoders
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.inference.encoder_checkpoints import make_random_encoder
from tests.service import MODEL, PATIENCE_S, Service, refused, running, wait_for

FLEET = """
models:
  {model}: {{directory: {directory}, replicas: {{min: 2, max: 2}}}}
"""
DRAWN = inference_pb.Sampling(temperature=0.9, seed=11, presence_penalty=0.8, frequency_penalty=0.4)
Pair = tuple[Service, Service]
FIRST, SECOND = f"{MODEL}#0", f"{MODEL}#1"


@pytest.fixture(scope="module")
def pair(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return two processes with the same file: two replicas each, and some ms per token."""
    directory = tmp_path_factory.mktemp("slow")
    make_checkpoint(directory, shape=LlamaShape(layer_count=120, context_window_tokens=4096))
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    file.write_text(FLEET.format(model=MODEL, directory=directory))
    first, second = (
        serve(directory, is_drained=True, models=bundled_models(), fleet=str(file))
        for _ in range(2)
    )
    for service in (first, second):
        wait_for(lambda service=service: service.serving(f"engine/{MODEL}"), "the engines")  # type: ignore[misc]
    return first, second


class Admin:
    """Calls of an admin to one process."""

    def __init__(self, service: Service, secret: str) -> None:
        self._service, self._secret = service, secret

    async def call(self, request: Any) -> Any:
        """Make one call, chosen by its request."""
        async with calls(self._service, self._secret) as call:
            return await call(type(request).__name__.removesuffix("Request"), request)

    async def complete(self, request: Any) -> Any:
        """Make a call repeatedly until every process has answered in time."""
        while True:
            answer = await self.call(request)
            if not answer.unresponsive_process_ids:
                return answer

    async def replicas(self) -> dict[str, list[pb.Replica]]:
        """Return all listed replicas by name."""
        found: dict[str, list[pb.Replica]] = {}
        for each in (await self.complete(pb.ListReplicasRequest(model=MODEL))).replicas:
            found.setdefault(each.replica, []).append(each)
        return found

    async def drain(self, replica: str = FIRST, **fields: Any) -> pb.DrainReplicaResponse:
        """Drain the replica."""
        answer: pb.DrainReplicaResponse = await self.complete(
            pb.DrainReplicaRequest(model=MODEL, replica=replica, **fields)
        )
        return answer

    async def undrain(self, replica: str = FIRST) -> pb.UndrainReplicaResponse:
        """Put the replica back into use."""
        answer: pb.UndrainReplicaResponse = await self.call(
            pb.UndrainReplicaRequest(model=MODEL, replica=replica)
        )
        return answer


def replica_counts(model: Model) -> tuple[int, int, int]:
    """Return the counts of ready, drained and all replicas."""
    return model.ready_replica_count, model.drained_replica_count, model.replica_count


async def admin_of(service: Service) -> Admin:
    return Admin(service, (await service.tenant(scopes=("admin",))).secret)


async def test_a_drained_replica_is_unused_until_put_back(pair: Pair) -> None:
    first, second = pair
    admin, ours = await admin_of(first), await second.tenant()
    await until_all_are_ready(admin)
    async with second.stream(ours.secret) as stream:
        request_ids = [await stream.begin(max_output_tokens=3000, sampling=DRAWN) for _ in range(2)]
        for request_id in request_ids:
            await stream.received(request_id, 5)
        before = await admin.replicas()
        counts = sorted(each.request_count for reported in before.values() for each in reported)
        assert counts == [0, 0, 1, 1], "one in each of the second"

        drained = await admin.drain(reason="new disks")
        again = await admin.drain(reason="new disks")

        assert again.drain == drained.drain
        assert (drained.drain.reason, drained.drain.HasField("move_after")) == ("new disks", False)
        assert [each.drained for each in drained.replicas] == [True, True], "both apply it"
        assert {each.state for each in drained.replicas} == {pb.REPLICA_STATE_DRAINING}
        later = await stream.begin(max_output_tokens=5)
        await stream.finished(later)
        now = await admin.replicas()
        assert sum(each.request_count for each in now[FIRST]) == 1, "what runs there is left there"
        async with second.client(ours.secret) as client:
            [listed] = await client.list_models()
        assert replica_counts(listed) == (1, 1, 2)

        await admin.drain(move_after=Duration(seconds=0))
        await until_moved(admin)
        counts = [len(stream.token_ids(request_id)) for request_id in request_ids]
        for request_id, count in zip(request_ids, counts, strict=True):
            await stream.received(request_id, count + 20)
        for request_id in request_ids:
            await stream.cancel(request_id)
        ends = [await stream.finished(request_id) for request_id in request_ids]
        assert sorted(end.migration_count for end in ends) == [0, 1]
        stayed, moved = sorted((stream.token_ids(each) for each in request_ids), key=len)
        assert stayed == moved[: len(stayed)], "one seed, one answer"
        async with second.client(ours.secret) as client:
            recorded = [await client.get_generation(request_id) for request_id in request_ids]
        assert [each.migration_count for each in recorded] == [end.migration_count for end in ends]

    assert second.stop() == 0
    second.start()
    wait_for(lambda: second.serving(f"engine/{MODEL}"), "the engines")
    restarted = await admin.replicas()
    assert [each.drained for each in restarted[FIRST]] == [True, True], "also in a later one"

    assert (await admin.undrain()).undrained
    assert not (await admin.undrain()).undrained
    replicas = (await admin.replicas()).values()
    assert [each.drained for reported in replicas for each in reported] == [False] * 4
    entries = (await admin.call(admin_pb.ListAuditEntriesRequest(action_prefix="replica."))).entries
    actions = [each.action for each in reversed(entries)]
    assert actions == ["replica.drain", "replica.drain", "replica.undrain"]
    assert '"move_after_ms": 0' in entries[0].before_json


async def test_the_one_engine_of_a_model_is_drained_like_one_of_several(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> None:
    """Its requests finish, new ones get a retry-after, and putting it back takes no time."""
    directory = tmp_path_factory.mktemp("slow")
    make_checkpoint(directory, shape=LlamaShape(layer_count=120, context_window_tokens=4096))
    encoders = {"encoder": make_random_encoder(tmp_path_factory.mktemp("encoder"))}
    home = tmp_path_factory.mktemp("lone")
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(home, url, directory, encoders=encoders)) as lone,
    ):
        for name in (MODEL, "encoder"):
            wait_for(lambda name=name: lone.serving(f"engine/{name}"), "the engines")  # type: ignore[misc]
        admin, ours = await admin_of(lone), await lone.tenant()
        await price_encoders(lone, "encoder")
        texts = [
            inference_pb.EmbedRequest(
                request_id=str(uuid.uuid4()),
                model="encoder",
                inputs=[inference_pb.EmbedInput(text="sea")],
            )
            for _ in range(2)
        ]
        async with lone.stream(ours.secret) as stream, calls(lone, ours.secret) as call:
            running_one = await stream.begin(max_output_tokens=3000)
            await stream.received(running_one, 5)
            [before] = (await admin.replicas())[FIRST]
            await admin.drain(move_after=Duration(seconds=0))
            await admin.complete(pb.DrainReplicaRequest(model="encoder", replica="encoder#0"))

            refusal = await stream.failed(await stream.begin(max_output_tokens=5))
            text_refusal = await call.refused("Embed", texts[0])
            [drained] = (await admin.replicas())[FIRST]
            async with lone.client(ours.secret) as client:
                listed = {each.name: each for each in await client.list_models()}
            await stream.received(running_one, len(stream.token_ids(running_one)) + 20)
            await admin.undrain()
            await admin.call(pb.UndrainReplicaRequest(model="encoder", replica="encoder#0"))
            await stream.finished(await stream.begin(max_output_tokens=5))
            await call("Embed", texts[1])
            await stream.cancel(running_one)
            end = await stream.finished(running_one)

        assert (before.state, before.request_count) == (pb.REPLICA_STATE_READY, 1)
        assert before.outstanding_token_count > 0
        assert (drained.state, drained.request_count) == (pb.REPLICA_STATE_DRAINING, 1)
        assert drained.drained
        for reported in (refusal, text_refusal):
            assert reported.code is StatusCode.UNAVAILABLE
            assert reported.reason == "ENGINE_UNAVAILABLE"
            assert "The engine is being drained. Try again" in reported.status.message
            assert reported.retry_after_s == DRAINED_RETRY_S
        for name in (MODEL, "encoder"):
            assert replica_counts(listed[name]) == (0, 1, 1)
        assert end.migration_count == 0
        assert lone.stop() == 0, lone.log[-4000:]
        assert lone.database.held_hold_count() == 0


async def until_all_are_ready(admin: Admin) -> None:
    """Wait for both replicas of both processes."""
    async with asyncio.timeout(PATIENCE_S):
        while {
            each.state for reported in (await admin.replicas()).values() for each in reported
        } != {pb.REPLICA_STATE_READY}:
            pass


async def until_moved(admin: Admin) -> None:
    """Wait until both requests run in the remaining replica."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(each.request_count for each in (await admin.replicas())[SECOND]) < 2:
            pass


async def test_an_invalid_command_is_reported_by_field(pair: Pair) -> None:
    admin = await admin_of(pair[0])
    unknown = [
        pb.DrainReplicaRequest(model="nothing", replica=FIRST),
        pb.DrainReplicaRequest(model=MODEL, replica="tiny#7"),
        pb.UndrainReplicaRequest(model=MODEL, replica="tiny#7"),
        pb.ListReplicasRequest(model="nothing"),
    ]
    for request in unknown:
        assert (await refused(admin.call(request))).code is StatusCode.NOT_FOUND
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("reason", {"reason": "x" * 201}),
        ("move_after", {"move_after": Duration(seconds=-1)}),
        ("move_after", {"move_after": Duration(seconds=2**40)}),
    ]
    for field, message in wrong:
        refusal = await refused(
            admin.call(pb.DrainReplicaRequest(model=MODEL, replica=FIRST, **message))
        )
        assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [field])
    user = await pair[0].tenant()
    for name in ("ListReplicas", "DrainReplica", "UndrainReplica"):
        refusal = await refused(
            Admin(pair[0], user.secret).call(getattr(pb, f"{name}Request")(model=MODEL))
        )
        assert refusal.code is StatusCode.PERMISSION_DENIED
