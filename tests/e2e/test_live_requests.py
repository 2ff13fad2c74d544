"""Live requests of several api processes on one database: each lists and ends all of them."""

from __future__ import annotations

import asyncio
import json
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import inference_service_pb2
from weir.v1 import live_requests_pb2 as pb

from metering.core.models import QuotaDimension
from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.service import (
    MODEL,
    PATIENCE_S,
    SMALL_WINDOWS,
    Refusal,
    Service,
    cost_picos,
    picos,
    refused,
    running,
    start,
    until,
)

END_WITHIN_S = 0.1
RUNNING_MAX = 64  # sequences that the engine runs at once; others are queued
STALL_S = 60.0  # default timeout of a client that reads nothing
# The quickest round is compared with the promise: a busy machine may delay any single one.
ROUNDS = 5
Pair = tuple[Service, Service]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 3 ms per token, so that answers still run on the quickest machine."""
    directory = tmp_path_factory.mktemp("slow")
    make_checkpoint(directory, shape=LlamaShape(layer_count=120, context_window_tokens=4096))
    return directory


@pytest.fixture(scope="module")
def pair(serve: Serve, slow_model: Path) -> Pair:
    """Return two processes, each with its own engine."""
    return serve(slow_model, is_drained=True), serve(slow_model, is_drained=True)


class Admin:
    """Calls of an admin to one process."""

    def __init__(self, service: Service, secret: str) -> None:
        self._service = service
        self._secret = secret

    async def call(self, name: str, **fields: Any) -> Any:
        """Make one call, on a new connection."""
        async with calls(self._service, self._secret) as call:
            return await call(name, **fields)

    async def live(self, *, complete: bool = True, **fields: Any) -> pb.ListLiveRequestsResponse:
        """Return live requests. complete: repeat until every process has answered in time."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer: pb.ListLiveRequestsResponse
                answer = await self.call("ListLiveRequests", **fields)
                if not (complete and answer.unresponsive_process_ids):
                    return answer

    async def kill(self, request_id: str, **fields: Any) -> pb.KillRequestResponse:
        """End a request."""
        answer: pb.KillRequestResponse
        answer = await self.call("KillRequest", request_id=request_id, **fields)
        return answer

    async def audit(self, **fields: Any) -> list[admin_pb.AuditEntry]:
        """Return entries, newest first."""
        return list((await self.call("ListAuditEntries", **fields)).entries)


def seconds_to_end(service: Service, request_id: str) -> float:
    """Return the time from the command that ended a request to its settlement."""
    query = """SELECT extract(epoch FROM settled_at - created_at)::float8 AS elapsed_s
               FROM usage_events u JOIN cancel_commands o
               ON o.request_id = u.request_id OR o.api_key_id = u.api_key_id
               WHERE u.request_id = %s"""
    [row] = service.database.rows(query, request_id)
    return float(row["elapsed_s"])


async def admin_of(service: Service) -> Admin:
    """Return an admin of this process."""
    tenant = await service.tenant(scopes=("admin",))
    return Admin(service, tenant.secret)


async def test_every_process_shows_what_all_of_them_run(pair: Pair) -> None:
    first, second = pair
    ours, theirs = await first.tenant(), await second.tenant()
    admin = await admin_of(first)
    async with first.stream(ours.secret) as here, second.stream(theirs.secret) as there:
        mine, other = [await each.begin(max_output_tokens=3000) for each in (here, there)]
        await here.received(mine, 20)
        await there.received(other, 20)

        everything = await admin.live()
        of_one = await admin.live(organization=theirs.name, page_size=1)
        await here.cancel(mine)
        await there.cancel(other)
        await here.finished(mine)
        await there.finished(other)

    by_id = {each.request_id: each for each in everything.requests}
    assert by_id.keys() == {mine, other}
    assert not everything.unresponsive_process_ids
    for tenant, request_id, service in ((ours, mine, first), (theirs, other, second)):
        shown = by_id[request_id]
        assert (shown.organization_name, shown.project_name) == (tenant.name, "main")
        assert shown.api_key_prefix == tenant.key.prefix
        assert (shown.model, shown.phase) == (MODEL, pb.REQUEST_PHASE_DECODE)
        assert shown.process_name.endswith(f":{service.pid}")
        assert shown.input_token_count == 10
        assert shown.delivered_token_count >= 20, (
            "as the process tells: its hold knows of none before the first extension"
        )
        assert shown.leased_token_count >= shown.delivered_token_count
        assert shown.tokens_per_second > 0
        assert shown.admit_time.ToDatetime() < shown.expire_time.ToDatetime()
        assert shown.age.ToTimedelta().total_seconds() > 0
    assert [each.request_id for each in of_one.requests] == [other]
    [load] = of_one.organizations
    assert (load.name, load.request_count, load.hold_count) == (theirs.name, 1, 1)
    assert load.held_token_count >= 10 + 128
    assert load.tokens_per_second > 0
    assert everything.request_count == 2
    assert not (await admin.live()).requests, "what has ended is gone at once"


async def test_a_request_elsewhere_ends_in_a_tenth_second(pair: Pair) -> None:
    """From command to settlement by the database's clock; the end names its author."""
    first, second = pair
    tenant = await second.tenant({QuotaDimension.TOKENS_PER_MONTH: 10**9})
    admin = await admin_of(first)
    elapsed_s = []
    async with second.stream(tenant.secret) as stream:
        for _ in range(ROUNDS):
            request_id = await stream.begin(max_output_tokens=3000)
            await stream.received(request_id, 10)

            answer = await admin.kill(request_id, reason="it looped")
            refusal = await stream.failed(request_id)
            elapsed_s.append(seconds_to_end(first, request_id))

            received = len(stream.token_ids(request_id))
            event = second.database.event(tenant, request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.CANCELLED, "CANCELLED_BY_ADMIN")
            assert refusal.status.message == (
                "An administrator has ended your request: it looped. Ask them before you send it"
                " again."
            )
            assert refusal.frame is not None
            usage, cost = refusal.frame.usage, picos(refusal.frame.cost)
            assert usage.delivered_token_count == received == event["delivered_token_count"]
            assert cost == event["cost_picos"] == cost_picos(usage)
            assert event["outcome"] == "cancelled"
            assert answer.result == pb.KillRequestResponse.RESULT_ENDED
            assert answer.generation.usage.delivered_token_count == received
            [entry] = await admin.audit(subject=request_id)
            assert entry.action == "request.kill"
            assert json.loads(entry.after_json)["reason"] == "it looped"
            assert json.loads(entry.before_json)["state"] == "held"
            assert len(stream.ends(request_id)) == 1
    assert min(elapsed_s) < END_WITHIN_S, elapsed_s
    await second.no_hold_left(tenant)


async def test_killing_again_changes_nothing(pair: Pair) -> None:
    first, second = pair
    tenant = await second.tenant()
    admin = await admin_of(first)
    async with second.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=3000)
        await stream.received(request_id, 1)
        once = await admin.kill(request_id)
        again = await admin.kill(request_id)
        done = await stream.begin()
        await stream.finished(done)
        late = await admin.kill(done)

    assert once.result == pb.KillRequestResponse.RESULT_ENDED
    assert again.result == late.result == pb.KillRequestResponse.RESULT_ALREADY_ENDED
    assert again.generation == once.generation
    assert late.generation.usage.delivered_token_count == 20
    assert len(await admin.audit(subject=request_id)) == 1
    unknown: Refusal = await refused(admin.kill(str(uuid.uuid4())))
    assert unknown.code is StatusCode.NOT_FOUND
    for fields, wrong in (
        ({"request_id": "seven"}, "request_id"),
        ({"request_id": done, "reason": "x" * 201}, "reason"),
    ):
        refusal = await refused(admin.call("KillRequest", **fields))
        assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [wrong])


async def test_a_kill_names_the_project_of_a_shared_id(pair: Pair) -> None:
    first, second = pair
    ours, theirs = await first.tenant(), await second.tenant()
    admin = await admin_of(first)
    shared = str(uuid.uuid4())
    async with first.stream(ours.secret) as here, second.stream(theirs.secret) as there:
        for stream in (here, there):
            await stream.begin(request_id=shared, max_output_tokens=3000)
            await stream.received(shared, 1)

        unclear = await refused(admin.kill(shared))
        await admin.kill(shared, project=f"{theirs.name}/main")
        await there.failed(shared)
        before = len(here.token_ids(shared))
        await here.received(shared, before + 20)
        await here.cancel(shared)
        await here.finished(shared)

    assert (unclear.code, unclear.fields) == (StatusCode.INVALID_ARGUMENT, ["project"])
    assert f"{theirs.name}/main" in unclear.status.message


async def test_a_revoked_key_ends_requests_in_every_process(pair: Pair) -> None:
    """And no other requests of its project; each ends with its final usage."""
    first, second = pair
    tenant = await first.tenant()
    admin = await admin_of(first)
    elapsed_s = []
    async with first.stream(tenant.secret) as untouched:
        spared = await untouched.begin(max_output_tokens=4000)
        for _ in range(ROUNDS):
            key, secret = await first.new_key(tenant)
            async with first.stream(secret) as here, second.stream(secret) as there:
                streams = {
                    await stream.begin(max_output_tokens=3000): stream
                    for stream in (here, here, there)
                }
                for request_id, stream in streams.items():
                    await stream.received(request_id, 5)

                await admin.call("RevokeApiKey", api_key=key.prefix)
                refusals = {
                    request_id: await stream.failed(request_id)
                    for request_id, stream in streams.items()
                }
                elapsed_s.append(max(seconds_to_end(first, request_id) for request_id in refusals))

                late = await here.failed(await here.begin())
            for request_id, refusal in refusals.items():
                assert (refusal.code, refusal.reason) == (StatusCode.UNAUTHENTICATED, "KEY_REVOKED")
                assert refusal.frame is not None
                delivered = first.database.event(tenant, request_id)["delivered_token_count"]
                assert refusal.frame.usage.delivered_token_count == delivered
                assert len(streams[request_id].token_ids(request_id)) == delivered
            assert late.code is StatusCode.UNAUTHENTICATED, "its key has ended"
        await untouched.cancel(spared)
        await untouched.finished(spared)
    assert min(elapsed_s) < END_WITHIN_S, elapsed_s
    await first.no_hold_left(tenant)


async def test_a_stalled_request_is_killed_as_quickly(pair: Pair) -> None:
    """Its tokens wait in the transport, maybe forever; they were counted when handed over."""
    first, second = pair
    tenant = await second.tenant()
    admin = await admin_of(first)
    async with second.stream(tenant.secret, reading=False, options=SMALL_WINDOWS) as stream:
        request_id = await stream.begin(max_output_tokens=4000, top_logprobs=20)
        counts: list[int] = []
        while len(counts) < 20 or len(set(counts[-20:])) > 1 or not counts[-1]:
            live = await admin.live(organization=tenant.name)
            counts += [each.delivered_token_count for each in live.requests]

        answer = await admin.kill(request_id)

    assert answer.result == pb.KillRequestResponse.RESULT_ENDED
    assert seconds_to_end(second, request_id) < STALL_S / 10
    assert second.database.event(tenant, request_id)["delivered_token_count"] >= counts[-1]


async def test_a_revoked_key_ends_what_is_queued_too(pair: Pair) -> None:
    """A queued request is billed no tokens, and counts as a request."""
    first, second = pair
    tenant = await second.tenant(
        {QuotaDimension.CONCURRENT_REQUESTS: 1000, QuotaDimension.REQUESTS_PER_MINUTE: 1000}
    )
    admin = await admin_of(first)
    async with second.stream(tenant.secret) as stream:
        crowd = [start(max_output_tokens=3000) for _ in range(RUNNING_MAX + 6)]
        await stream.send(*crowd)
        waiting = crowd[-1].request_id
        await stream.first(waiting, "progress")
        live = await admin.live(organization=tenant.name)
        phases = {each.request_id: each.phase for each in live.requests}

        await admin.call("RevokeApiKey", api_key=tenant.key.prefix)
        refusals = {frame.request_id: await stream.failed(frame.request_id) for frame in crowd}

    assert phases[waiting] == pb.REQUEST_PHASE_QUEUED
    assert {refusal.reason for refusal in refusals.values()} == {"KEY_REVOKED"}
    refused_frame = refusals[waiting].frame
    assert refused_frame is not None
    assert refused_frame.usage.input_token_count == picos(refused_frame.cost) == 0
    await second.no_hold_left(tenant)
    assert second.database.billed(tenant)[waiting] == {}
    counted = {"concurrent_requests": (0, 0), "requests_per_minute": (len(crowd), 0)}
    assert second.database.counters(tenant) == counted


async def test_a_command_needs_no_notification(pair: Pair) -> None:
    """The command is a row that is polled every second; a reopened connection polls at once."""
    first, second = pair
    tenant = await second.tenant()
    admin = await admin_of(first)
    terminate = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid()
                       AND (query LIKE '%%FROM fleet_versions%%' OR query SIMILAR TO
                       '(LISTEN|%%FROM cancel_commands_WHERE id >|%%FROM replica_drains)%%')"""
    order = (
        "INSERT INTO cancel_commands (project_id, request_id, reason) VALUES (%s, %s, '')"
        " RETURNING id"
    )
    async with second.stream(tenant.secret) as stream:
        unheard = await stream.begin(max_output_tokens=4000)
        await stream.received(unheard, 1)
        second.database.rows(order, tenant.project_id, unheard)
        silent = await stream.failed(unheard)
        cut = await stream.begin(max_output_tokens=4000)
        await stream.received(cut, 1)
        [row] = second.database.rows(terminate)
        answer = await admin.kill(cut)
        after_cut = await stream.failed(cut)

    assert silent.reason == after_cut.reason == "CANCELLED_BY_ADMIN"
    assert row["count"] >= 2, "each process has one"
    assert answer.result == pb.KillRequestResponse.RESULT_ENDED


async def test_a_lost_process_is_named_and_its_requests_are_shown_by_their_holds(
    pair: Pair, tmp_path: Path, slow_model: Path
) -> None:
    """A kill cannot end it before its hold expires; the answer contains that time."""
    first, _ = pair
    admin = await admin_of(first)
    with running(Service(tmp_path, first.database_url, slow_model)) as third:
        tenant = await third.tenant()
        async with third.stream(tenant.secret) as stream:
            request_id = await stream.begin(max_output_tokens=4000)
            await stream.received(request_id, 5)
            reported = await admin.live(organization=tenant.name)
            third.kill()
            view = await admin.live(organization=tenant.name, complete=False)
            answer = await admin.kill(request_id)
        third.start()  # settles from the journal of the killed one
        await until(lambda: first.database.holds(tenant) == {"settled": 1}, "the recovery")
        after = await admin.live(organization=tenant.name)

    [running_one] = reported.requests
    assert (running_one.phase, bool(running_one.process_name)) == (pb.REQUEST_PHASE_DECODE, True)
    [shown] = view.requests
    assert (shown.phase, shown.process_name) == (pb.REQUEST_PHASE_UNSPECIFIED, "")
    assert list(view.unresponsive_process_ids) == [shown.process_id]
    assert answer.result == pb.KillRequestResponse.RESULT_PENDING
    assert answer.expire_time == shown.expire_time
    assert answer.generation.state == inference_service_pb2.Generation.STATE_RUNNING
    assert not after.requests
    assert not after.unresponsive_process_ids


async def test_a_stuck_hold_is_found_and_ended(pair: Pair) -> None:
    """No worker runs here. Planted: a hold whose owner has been gone for a minute."""
    first, _ = pair
    admin = await admin_of(first)
    tenant = await first.tenant({QuotaDimension.CONCURRENT_REQUESTS: 5})
    plant = """INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id,
                   payload_hash, model, price_version_id, labels, process_id, input_token_count,
                   leased_token_count, quota_ids, expires_at)
               SELECT gen_random_uuid(), %s, %s, %s, %s, '\\x00', %s,
                   (SELECT max(id) FROM price_versions), '{}', gen_random_uuid(), 7, 9, '{}',
                   now() - %s * interval '1 second' RETURNING id"""
    owner = (tenant.organization_id, tenant.project_id, tenant.key.id)
    stuck, fresh = str(uuid.uuid4()), str(uuid.uuid4())
    assert not (await admin.live(stuck_only=True, complete=False)).requests
    first.database.rows(plant, *owner, stuck, MODEL, 60)
    first.database.rows(plant, *owner, fresh, MODEL, 1)

    found = await admin.live(stuck_only=True, complete=False)
    ended = await admin.call("ExpireOverdueHolds")

    assert [each.request_id for each in found.requests] == [stuck], "the other one has time"
    assert ended.expired_count == 2
    assert not (await admin.live(stuck_only=True, complete=False)).requests
    assert first.database.holds(tenant) == {"expired": 2}


async def test_an_admin_looks_up_requests_of_any_project(pair: Pair) -> None:
    service, _ = pair
    tenant, other, request_id = await service.tenant(), await service.tenant(), str(uuid.uuid4())
    admin = await admin_of(service)

    look_up = partial(admin.call, "GetRequest", request_id=request_id)

    unknown = await refused(look_up())
    async with service.stream(tenant.secret) as stream:
        await stream.send(start(request_id, max_output_tokens=3000))
        await stream.received(request_id, 1)
        running = await look_up()
        await stream.cancel(request_id)
        finished = await stream.finished(request_id)
    ended = await look_up()
    async with service.stream(other.secret) as stream:
        await stream.send(start(request_id))
        await stream.finished(request_id)
    several = await refused(look_up())
    one = await look_up(project=f"{other.name}/main")

    assert unknown.reason == "NOT_FOUND"
    assert running.generation.state == inference_service_pb2.Generation.STATE_RUNNING
    assert (ended.organization_name, ended.project_name) == (tenant.name, "main")
    assert ended.api_key_prefix == tenant.key.prefix
    assert ended.generation.usage == finished.usage
    assert ended.generation.timings.decode_ms == finished.timings.decode_ms
    assert several.fields == ["project"]
    assert f"{other.name}/main" in several.status.message
    assert one.organization_name == other.name
