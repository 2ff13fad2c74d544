"""`weir replicas`: listed engines, drain requests, and exit codes for missing answers."""

from __future__ import annotations

import json

from google.protobuf.duration_pb2 import Duration
from weir.v1 import replicas_pb2 as pb

from tests.cli.conftest import Run, ScriptedWeir
from tests.cli.scripted_weir import NOON

DRAIN = pb.ReplicaDrain(
    model="chat",
    replica="chat#0",
    reason="new disks",
    drain_time=NOON,
    move_after=Duration(seconds=90),
)
REPLICAS = [
    pb.Replica(
        model="chat",
        replica="chat#0",
        region="eu",
        state=pb.REPLICA_STATE_DRAINING,
        reason="2 sequences running",
        drained=True,
        request_count=2,
        outstanding_token_count=1500,
        process_name="node-3:4711",
    ),
    pb.Replica(
        model="chat",
        replica="chat#0",
        state=pb.REPLICA_STATE_COLD,
        drained=True,
        process_name="node-4:12",
    ),
]


def test_the_engines_are_a_table_with_the_orders_below(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["ListReplicas"] = pb.ListReplicasResponse(
        replicas=REPLICAS, drains=[DRAIN]
    )

    reported = weir("replicas list --model chat")
    document = json.loads(weir("replicas list --json").stdout)

    assert reported.exit_code == 0
    assert "chat chat#0 eu draining 2 1,500 node-3:4711" in " ".join(reported.stdout.split())
    assert "chat#0 in node-3:4711: 2 sequences running" in reported.stderr
    assert "cold, drained" in reported.stdout
    assert (
        "is drained since 2026-11-20 12:00:00Z (new disks), running requests move after 90 s"
        in reported.stderr
    )
    assert server.accounts.requests[0] == pb.ListReplicasRequest(model="chat")
    assert document["replicas"][0]["request_count"] == 2
    assert document["drains"][0]["move_after_s"] == 90


def test_a_command_lists_processes_and_fails_without_all(weir: Run, server: ScriptedWeir) -> None:
    silent = ["6b0f2f0e-0000-0000-0000-000000000001"]
    server.accounts.replies["DrainReplica"] = pb.DrainReplicaResponse(
        drain=DRAIN, replicas=REPLICAS
    )
    server.accounts.replies["UndrainReplica"] = pb.UndrainReplicaResponse(
        undrained=True, unresponsive_process_ids=silent
    )

    drained = weir("replicas drain chat chat#0 --move-after 90 --reason 'new disks'")
    undrained = weir("replicas undrain chat chat#0 --json")

    assert drained.exit_code == 0
    assert "applied by node-3:4711, node-4:12, 2 requests still run in it" in drained.stderr
    assert undrained.exit_code == 3
    assert json.loads(undrained.stdout) == {
        "undrained": True,
        "replicas": [],
        "unresponsive_process_ids": silent,
    }
    assert server.accounts.requests == [
        pb.DrainReplicaRequest(
            model="chat", replica="chat#0", reason="new disks", move_after=Duration(seconds=90)
        ),
        pb.UndrainReplicaRequest(model="chat", replica="chat#0"),
    ]
