"""Random sequences of fleets in one process, with streams under way: nothing is lost or left."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from api.core.settings import bundled_models
from api.fleet import running_fleet
from api.fleet.fleet import FleetBuilder, Part, Serving
from api.fleet.fleet_file import parse_document
from api.fleet.running_fleet import RunningFleet
from inference.adapters.remote_engine import RemoteEngine
from inference.routing.encoder_set import EncoderSet
from inference.routing.on_demand import ManagedEngine
from inference.routing.replica_set import ReplicaSet
from inference.routing.scaling import ScaledReplicaSet
from inference.workers.process import open_worker
from tests.calls import Calls, calls
from tests.conftest import new_database
from tests.service import (
    MODEL,
    PATIENCE_S,
    Inside,
    Service,
    Stream,
    Tenant,
    make_model,
    price_model,
    run_inside,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = (MODEL, "second", "third")
CHANGE_COUNT = 12
Values = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inside(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> AsyncIterator[Inside]:
    """Yield a process that was started with a file of one simulated model."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        make_model(directory / name)
    file = directory / "fleet.yaml"
    file.write_text(f"models: {{{MODEL}: {{directory: one, engine: simulated}}}}")
    with (
        new_database(postgres_server, template=template_database) as url,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        home = tmp_path_factory.mktemp("home")
        service = Service(home, url, directory / "one", models=bundled_models(), fleet=str(file))
        async with run_inside(service, monkeypatch) as found:
            async with service.session() as session:
                for name in NAMES:
                    await price_model(session, name)
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def admin(inside: Inside) -> AsyncIterator[Calls]:
    """Yield calls of an administrator, after the file is stored."""
    tenant = await inside.service.tenant(scopes=("admin",))
    await until(lambda: inside.fleet.state[0] >= 1, "the file to be stored")
    async with calls(inside.service, tenant.secret) as call:
        yield call


def any_fleet(draw: random.Random, folder: Path) -> Values:
    """Draw a valid fleet, which always has the first model."""

    def version() -> Values:
        count_min = draw.choice([0, 1, 1, 2])
        found: Values = {
            "engine": "simulated",
            "directory": str(folder / draw.choice(["one", "one", "one", "two"])),
            "replicas": {"min": count_min, "max": max(count_min, draw.choice([1, 2]))},
        }
        if draw.random() < 0.3:
            found["idle_timeout_s"] = draw.choice([0, 600])
        return found

    def model() -> Values:
        found: Values = {"policy": draw.choice(["prefix_aware", "round_robin", "least_loaded"])}
        if draw.random() < 0.4:
            return found | version()
        labels = draw.sample(["v1", "v2", "v3"], draw.choice([1, 2]))
        versions = {each: version() | {"weight": draw.choice([0, 1, 20])} for each in labels}
        versions[labels[0]]["weight"] = 1
        return found | {"versions": versions, "recovery_wait_s": draw.choice([1, 10])}

    names = [NAMES[0], *draw.sample(NAMES[1:], draw.choice([0, 1, 2]))]
    fleet: Values = {"models": {name: model() for name in names}}
    if draw.random() < 0.5:
        fleet["aliases"] = {"latest": draw.choice(names)}
    if draw.random() < 0.3:
        fleet["regions"] = {"eu": ["us"], "us": []}
    return fleet


def names_of(fleet: Values) -> list[str]:
    """List all names that clients can request."""
    names = [*fleet["models"], *fleet.get("aliases", {})]
    for model, found in fleet["models"].items():
        names += [f"{model}@{version}" for version in found.get("versions", {})]
    return names


def described(serving: Serving) -> dict[str, Any]:
    """Describe all that routing and engines follow, without identities and loads."""

    def set_of(part: Part) -> dict[str, Any]:
        found, terms = part.backend, part.terms
        managed = [
            (each.needs.is_pinned, each._terms.idle_timeout_s, each.needs.memory_bytes)
            for each, _ in terms.managed()
        ]
        shared = {
            "kind": type(found),
            "replicas": [(each.name, each.region, each.is_drained) for each in found._replicas],
            "warm": found._warm_count,
            "managed": managed,
            "directory": found.model.directory,
        }
        if isinstance(found, EncoderSet):
            return shared
        scaler = found.scaler if isinstance(found, ScaledReplicaSet) else None
        return shared | {
            "policy": type(found._policy),
            "wait": found.recovery_wait_s,
            "breakers": [each.breaker.limits for each in found.replicas],
            "scaling": scaler and (scaler.min_count, scaler.idle_timeout_s),
        }

    return {
        "sets": {name: set_of(part) for name, part in serving.parts.items()},
        "catalog": serving.catalog,
        "tokenizers": set(serving.tokenizers),
        "budget": serving.budget,
    }


class Clients:
    """Clients that keep requests under way, by names of the fleets before and now."""

    def __init__(self, inside: Inside, tenant: Tenant, draw: random.Random) -> None:
        self.names = [MODEL]
        self.admitted_count = self.unknown_count = 0
        self.is_over = False
        self._inside, self._tenant, self._draw = inside, tenant, draw

    async def run(self) -> None:
        """Send requests until told to stop, one after the other."""
        async with self._inside.service.stream(self._tenant.secret) as stream:
            while not self.is_over:
                await self._one(stream)

    async def _one(self, stream: Stream) -> None:
        count = self._draw.choice([1, 20, 200])
        request_id = await stream.begin(
            model=self._draw.choice(self.names), max_output_tokens=count
        )
        end = await stream.end(request_id)
        if stream.of(request_id, "admitted"):
            assert end.HasField("finished"), end
            assert end.finished.usage.billed_token_count == count
            self.admitted_count += 1
        else:
            assert "MODEL_UNKNOWN" in str(end.failed), end
            self.unknown_count += 1


async def applied(inside: Inside, admin: Calls, fleet: Values) -> None:
    """Apply a fleet and wait until the process serves it."""
    answer = await admin("ApplyFleet", document=yaml.safe_dump(fleet, sort_keys=False))
    assert not answer.violations, answer.violations
    number = answer.version.number
    await until(lambda: inside.fleet.state == (number, ""), f"version {number}")


async def nothing_leaves(inside: Inside) -> None:
    """Wait until all that left the fleet is closed."""
    await until(lambda: not inside.fleet._leaving, "all that left to be closed")
    backends = inside.process.router.backends()
    assert set(inside.process.queue_of) == set(backends)
    await until(lambda: not any(each._left_out for each in backends), "replicas to be closed")  # type: ignore[attr-defined]


async def test_no_accepted_request_is_lost_while_the_fleet_changes(
    inside: Inside, admin: Calls
) -> None:
    print("seed", seed := random.randrange(1 << 30))
    draw = random.Random(seed)
    folder = Path(inside.fleet._settings.models.fleet_file).parent
    clients = Clients(inside, await inside.service.tenant(), draw)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(clients.run())
        for _ in range(CHANGE_COUNT):
            fleet = any_fleet(draw, folder)
            clients.names = clients.names[-3:] + names_of(fleet)
            await applied(inside, admin, fleet)
            clients.names = names_of(fleet)
            await asyncio.sleep(draw.choice([0.0, 0.05]))
        clients.is_over = True

    assert clients.admitted_count > CHANGE_COUNT
    fresh = FleetBuilder(inside.fleet._settings, open_worker)
    document = (await admin("GetFleet")).version.document
    expected = fresh.build(parse_document(document, None))
    assert described(inside.fleet.serving) == described(expected)
    assert inside.process.router._catalog == expected.catalog
    await nothing_leaves(inside)
    await inside.check_empty()


async def test_the_addresses_of_a_name_are_followed_without_a_new_version(
    inside: Inside, admin: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_fleet, "INTERVAL_S", 0.05)
    folder = Path(inside.fleet._settings.models.fleet_file).parent
    answers = ["127.0.0.2", "127.0.0.3"]
    monkeypatch.setattr(inside.fleet.names, "lookup", lambda host, port: list(answers))
    local = {"engine": "simulated", "directory": str(folder / "one")}
    target = "vllm://pods.test:9"
    pods = local | {"engine": "remote", "targets": [target]}

    def replicas() -> set[str]:
        return {each.name for model, each in inside.process.router.reports() if model == "second"}

    await applied(inside, admin, {"models": {MODEL: local, "second": pods}})
    assert replicas() == {f"{target}#127.0.0.2", f"{target}#127.0.0.3"}
    version = inside.fleet.state
    answers[:] = ["127.0.0.3", "127.0.0.4"]
    expected = {f"{target}#127.0.0.3", f"{target}#127.0.0.4"}
    await until(lambda: replicas() == expected, "the new addresses")
    answers.clear()
    await until(lambda: replicas() == {target}, "the name itself")

    assert inside.fleet.state == version
    await applied(inside, admin, {"models": {MODEL: local}})
    await nothing_leaves(inside)


async def test_many_changes_leave_no_engine_task_or_channel(inside: Inside, admin: Calls) -> None:
    """Versions come and go 200 times: remote ones, whose servers are away, and idle local ones."""
    folder = Path(inside.fleet._settings.models.fleet_file).parent
    local = {"engine": "simulated", "directory": str(folder / "one")}
    base: Values = {"models": {MODEL: local}}
    await applied(inside, admin, base)
    await nothing_leaves(inside)
    gc.collect()
    before = leftovers()

    for number in range(200):
        away: Values = {"directory": str(folder / "one"), "engine": "remote"}
        away["targets"] = [f"vllm://127.0.0.1:{port}" for port in (1 + number // 20, 99)]
        cold = local | {"replicas": {"min": 0, "max": 1 + number % 2}, "idle_timeout_s": number}
        models = base["models"] | {"second": away, f"third{number % 3}": cold}
        await change(inside, yaml.safe_dump({"models": models}))
    await applied(inside, admin, base | {"aliases": {"last": MODEL}})
    await nothing_leaves(inside)

    await asyncio.sleep(0.5)  # cancelled tasks end
    gc.collect()
    assert leftovers() == before


async def test_a_process_stops_while_a_replacement_is_being_loaded(
    tmp_path: Path, postgres_server: str, template_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = asyncio.Event()

    async def load(fleet: RunningFleet, replacing: Sequence[Part]) -> Sequence[Part]:
        if not replacing:
            return ()
        for part in replacing:
            fleet._serve(part)
        loading.set()
        await asyncio.Event().wait()
        return replacing

    monkeypatch.setattr(RunningFleet, "_load", load)
    for name in ("one", "two"):
        make_model(tmp_path / name)
    (tmp_path / "fleet.yaml").write_text(f"models: {{{MODEL}: {{directory: one}}}}")
    usual: Values = {"models": bundled_models(), "fleet": str(tmp_path / "fleet.yaml")}
    with new_database(postgres_server, template=template_database) as url:
        service = Service(tmp_path / "home", url, tmp_path / "one", **usual)
        async with asyncio.timeout(PATIENCE_S), run_inside(service, monkeypatch) as inside:
            tenant = await service.tenant(scopes=("admin",))
            await until(lambda: inside.fleet.state[0] == 1, "the file to be stored")
            async with calls(service, tenant.secret) as admin:
                document = f"models: {{{MODEL}: {{directory: {tmp_path / 'two'}}}}}"
                await admin("ApplyFleet", document=document)
                await loading.wait()

    assert inside.fleet.state[0] == 1


async def change(inside: Inside, document: str) -> None:
    """Change the fleet without storing it."""
    fleet = inside.fleet
    serving = await asyncio.to_thread(
        fleet._builder.build, parse_document(document, None), fleet.serving
    )
    fresh = [part for name, part in serving.parts.items() if fleet._is_new(name, part)]
    fleet._install(fleet.state[0], serving, fresh)
    await asyncio.sleep(0)


def leftovers() -> dict[str, int]:
    """Count objects and tasks that belong to engines."""
    kinds = (ManagedEngine, ReplicaSet, RemoteEngine)
    counts = {kind.__name__: 0 for kind in kinds}
    counts["channels"] = 0
    for each in gc.get_objects():
        if isinstance(each, kinds):
            name = next(kind.__name__ for kind in kinds if isinstance(each, kind))
            counts[name] += 1
        elif type(each).__module__ == "grpc.aio._channel" and type(each).__name__ == "Channel":
            counts["channels"] += 1
    words = ("engine", "replica", "end of", "scaling", "start", "remote")
    counts["tasks"] = sum(task.get_name().startswith(words) for task in asyncio.all_tasks())
    return counts
