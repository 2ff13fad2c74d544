"""Names of targets: several addresses are several replicas, followed as DNS answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from api.core.settings import Settings
from api.fleet import target_names
from api.fleet.fleet import FleetBuilder, Serving
from api.fleet.fleet_file import Fleet, parse_document
from api.fleet.target_names import TargetNames, addresses_of
from bench import engine_streams as streams
from inference.adapters.remote_connection import open_channel
from inference.adapters.remote_settings import Service, Target
from inference.engine import SequenceFinished, TokensGenerated
from inference.workers.process import open_worker
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.inference.running import make_request
from tests.inference.worker_engines import prompt, until
from tests.remote_servers.serving import ServerProcess

PODS = "vllm://pods.test:8001"


class Dns:
    """Answers of a name server: addresses by name; a name without any does not exist."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers
        self.queries: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.queries.append(host)
        if host not in self.answers:
            raise OSError(f"{host} is unknown")
        return self.answers[host]


def fleet_of(*targets: str) -> Fleet:
    """Return a fleet of one remote model with these targets."""
    listed = ", ".join(f"'{each}'" for each in targets)
    return parse_document(f"models: {{m: {{engine: remote, targets: [{listed}]}}}}", None)


def document_of(directory: Path, target: str) -> str:
    """Return a document of one remote model with this target."""
    values = f"engine: remote, directory: {directory}, targets: ['{target}']"
    return f"models: {{m: {{{values}}}}}"


async def test_only_names_of_grpc_servers_are_looked_up() -> None:
    dns = Dns(**{"a.test": ["10.0.0.2", "10.0.0.1"]})
    names = TargetNames(dns)
    literal = ["vllm://10.0.0.9:1", "vllm://[::1]:1", "sglang://localhost:1", "openai+http://h:1"]

    assert await names.poll(fleet_of("trtllm://a.test:5", *literal))

    assert dns.queries == ["a.test"]
    assert names.addresses == {"trtllm://a.test:5": ("10.0.0.2:5", "10.0.0.1:5")}
    assert not await names.poll(fleet_of("trtllm://a.test:5")), "nothing has changed"


async def test_a_failed_look_up_keeps_the_last_answer() -> None:
    dns = Dns(**{"pods.test": ["fd00::1", "fd00::2"]})
    names = TargetNames(dns)
    await names.poll(fleet_of(PODS))
    before = names.addresses
    dns.answers = {}

    assert not await names.poll(fleet_of(PODS))
    assert names.addresses == before == {PODS: ("[fd00::1]:8001", "[fd00::2]:8001")}

    dns.answers = {"pods.test": ["fd00::2"]}
    assert await names.poll(fleet_of(PODS)), "one address is looked up by the connection"
    assert names.addresses == {}


async def test_a_look_up_that_hangs_keeps_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_names, "LOOKUP_S", 0.05)
    released = threading.Event()
    names = TargetNames(lambda host, port: ["10.0.0.1"] * released.wait(60))

    assert not await names.poll(fleet_of(PODS))
    released.set()
    names.close()


def test_a_server_with_both_kinds_of_address_is_one_server() -> None:
    assert addresses_of("localhost", 1) == ["127.0.0.1"]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Serving]:
    """Return a function that builds the fleet of a name with these addresses."""
    make_checkpoint(tmp_path / "model")
    builder = FleetBuilder(Settings.of(home=tmp_path), open_worker)
    document = document_of(tmp_path / "model", PODS)

    def build(*addresses: str, running: Serving | None = None) -> Serving:
        fleet = parse_document(document, None)
        return builder.build(fleet, running, {PODS: addresses} if addresses else {})

    return build


async def test_each_address_is_a_replica_and_those_that_stay_are_kept(
    build: Callable[..., Serving],
) -> None:
    one = build()
    two = build("10.0.0.1:8001", "10.0.0.2:8001", running=one)
    two.parts["m"].adjust()
    other = build("10.0.0.2:8001", "[fd00::3]:8001", running=two)

    def names(serving: Serving) -> list[str]:
        return [each.name for each in serving.parts["m"].terms.replicas]

    assert names(one) == [PODS]
    assert names(two) == [f"{PODS}#10.0.0.1", f"{PODS}#10.0.0.2"]
    assert names(other) == [f"{PODS}#10.0.0.2", f"{PODS}#[fd00::3]"]
    assert other.parts["m"].terms.replicas[0] is two.parts["m"].terms.replicas[1]
    assert other.parts["m"].backend is one.parts["m"].backend


def test_a_server_is_called_by_its_name_at_each_address() -> None:
    """Its certificate and a proxy before it know the name, not the address."""

    class Api:
        def __getattr__(self, kind: str) -> Callable[..., tuple[str, object]]:
            return lambda address, *_, options: (address, dict(options)["grpc.default_authority"])

    target = Target(Service.VLLM, "10.0.0.1:8001", name="pods.test:8001")

    assert open_channel(target, None, Api()) == ("10.0.0.1:8001", "pods.test:8001")


async def test_a_sequence_goes_on_while_other_addresses_come_and_go(
    tiny: TinyCheckpoint, remote_server: ServerProcess, tmp_path: Path
) -> None:
    port = remote_server.address.rpartition(":")[2]
    target = f"trtllm://pods.test:{port}"
    document = document_of(tiny.directory, target)
    builder = FleetBuilder(Settings.of(home=tmp_path), open_worker)
    fleet = parse_document(document, None)
    here, gone, new = (f"127.0.0.{number}:{port}" for number in (1, 2, 3))
    serving = builder.build(fleet, None, {target: (here, gone)})
    engine = serving.engines["m"]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        token_count = 0
        async with streams.stream(engine, make_request(prompt(1), 300)) as stream:
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    if not token_count:
                        serving = builder.build(fleet, serving, {target: (new, here)})
                        serving.parts["m"].adjust()
                    token_count += len(event.token_ids)
                elif isinstance(event, SequenceFinished):
                    finished = event
        await until(lambda: not serving.parts["m"].backend._left_out)
        await engine.close()

    assert token_count == finished.generated_token_count == 300
    assert finished.migration_count == 0
