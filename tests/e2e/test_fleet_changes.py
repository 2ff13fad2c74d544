"""Fleet as rows: applied by a call, followed by all processes, while requests run."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc import StatusCode

from api.core.settings import bundled_models
from tests.api.test_kubernetes_launcher import config
from tests.calls import Calls, calls
from tests.conftest import new_database
from tests.e2e.conftest import Serve
from tests.kubernetes_double import SlicesApi, endpoint, endpoint_slice, served
from tests.service import MODEL, Service, log_events, price_model, running, wait_for

FLEET = """
models:
  {model}:
    versions:
      v1: {{directory: {directory}, engine: simulated}}
      v2: {{directory: {directory}, engine: simulated, weight: 0}}
"""
PODS = "vllm://vllm.models.svc:8001"
Pair = tuple[Service, Service]


@pytest.fixture(scope="module")
def pair(serve: Serve, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Pair:
    """Return two processes that were started with the same file."""
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    file.write_text(FLEET.format(model=MODEL, directory=model))
    first, second = (
        serve(model, is_drained=True, models=bundled_models(), fleet=str(file)) for _ in range(2)
    )
    return first, second


@pytest.fixture
async def admin(pair: Pair) -> Any:
    """Yield calls of an administrator to the first process."""
    tenant = await pair[0].tenant(scopes=("admin",))
    async with calls(pair[0], tenant.secret) as call:
        yield call


async def stored(admin: Calls) -> Any:
    """Return the version in force, once the file is stored."""
    for _ in range(100):
        found = await admin("GetFleet")
        if found.version.number:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError("the file is not stored")


async def applied(admin: Calls, document: str, **fields: Any) -> Any:
    """Apply a document, and wait until both processes serve it."""
    answer = await admin("ApplyFleet", document=document, **fields)
    assert not answer.violations, answer.violations
    number = answer.version.number

    async def all_serve() -> bool:
        found = await admin("GetFleet")
        faults = [each.fault for each in found.processes if each.fault]
        assert not faults, faults
        return all(each.number == number for each in found.processes)

    async with asyncio.timeout(20):
        while not await all_serve():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return answer


async def test_the_file_is_the_first_version(pair: Pair, admin: Calls, model: Path) -> None:
    found = await stored(admin)
    first = await admin("GetFleet", number=1)

    assert str(model) in first.version.document, "paths are absolute"
    assert (first.version.number, first.version.actor) == (1, "system")
    assert first.version.reason == "first version, from fleet.yaml"
    assert len(found.processes) == 2


async def test_a_new_version_is_served_by_all_processes_and_the_old_one_ends(
    pair: Pair, admin: Calls, model: Path
) -> None:
    document = (await stored(admin)).version.document
    tenant = await pair[0].tenant()
    async with pair[0].session() as session:
        await price_model(session, "second")
    added = document + f"  second: {{directory: {model}, engine: simulated}}\n"
    added = added.replace("    versions:", "    recovery_wait_s: 3\n    versions:")

    async with pair[0].stream(tenant.secret) as stream:
        under_way = await stream.begin(max_output_tokens=400, model=f"{MODEL}@v2")
        await stream.received(under_way, 1)
        answer = await applied(admin, added, reason="more")
        changes = {each.path: each.after_json for each in answer.changes}
        for service in pair:
            async with service.stream(tenant.secret) as other:
                await other.finished(await other.begin(model="second"))
        removed = document.replace("      v2:", "      v3:") + "aliases: {other: " + MODEL + "}\n"
        await applied(admin, removed, base_directory="/")
        finished = await stream.finished(under_way)
        gone = await stream.failed(await stream.begin(model="second"))
        old = await stream.failed(await stream.begin(model=f"{MODEL}@v2"))
        await stream.finished(await stream.begin(model=f"{MODEL}@v3"))
        await stream.finished(await stream.begin(model="other"))

    assert finished.usage.billed_token_count == 400
    assert changes[f"models.{MODEL}.recovery_wait_s"] == "3.0"
    assert json.loads(changes["models.second"])["directory"] == str(model)
    assert (gone.reason, old.reason) == ("MODEL_UNKNOWN", "MODEL_UNKNOWN")
    async with calls(pair[1], admin.secret) as call:
        replicas = (await call("ListReplicas")).replicas
    assert {each.model for each in replicas} == {f"{MODEL}@v1", f"{MODEL}@v3"}
    wait_for(lambda: not pair[1].serving("engine/second"), "the health of a removed model to end")


async def test_only_one_of_two_administrators_follows_a_version(pair: Pair, admin: Calls) -> None:
    before = (await stored(admin)).version
    documents = [before.document + f"memory_bytes: {count}GiB\n" for count in (64, 65)]

    results = await asyncio.gather(
        *(admin("ApplyFleet", document=each, expected_number=before.number) for each in documents),
        return_exceptions=True,
    )

    [lost] = [each for each in results if isinstance(each, grpc.aio.AioRpcError)]
    [won] = [each for each in results if not isinstance(each, BaseException)]
    assert won.version.number == before.number + 1
    assert lost.code() == StatusCode.INVALID_ARGUMENT, lost
    assert f"version {won.version.number} is in force" in str(lost.details())


async def test_the_same_call_adds_one_version(pair: Pair, admin: Calls) -> None:
    present = (await stored(admin)).version
    document = present.document.partition("aliases:")[0] + f"aliases: {{again: {MODEL}}}\n"
    request = {"document": document, "request_id": str(uuid.uuid4())}

    first, second = [await admin("ApplyFleet", **request) for _ in range(2)]
    same = await admin("ApplyFleet", document=document)
    entries = await admin("ListAuditEntries", action_prefix="fleet.", page_size=1)
    listed = (await admin("ListFleetVersions", page_size=2)).versions

    assert first.version.number == second.version.number == same.version.number
    assert not same.changes
    [entry] = entries.entries
    assert "aliases" in entry.after_json
    assert str(first.version.number) == entry.subject_id
    assert json.loads(entry.before_json)["number"] == first.version.number - 1
    assert [each.number for each in listed] == [first.version.number, first.version.number - 1]
    assert listed[0].document == ""


async def test_a_document_with_errors_changes_nothing(pair: Pair, admin: Calls) -> None:
    before = (await stored(admin)).version

    wrong = await admin("ApplyFleet", document="models:\n  chat: {directry: d}\n")
    absent = await admin("ApplyFleet", document="models: {chat: {directory: /nowhere}}")
    relative = await admin("ApplyFleet", document="models: {chat: {directory: here}}")
    key = "key_file: /etc/passwd"
    stolen = await admin(
        "ApplyFleet",
        document="models: {m: {engine: remote, directory: /m, targets: "
        f"[{{address: 'vllm://a:1', {key}}}]}}}}",
    )
    read = await admin(
        "ApplyFleet",
        document="models: {m: {directory: /m, engine: tensorrt, engine_config: /etc/passwd}}",
    )
    stale = await admin.refused(
        "ApplyFleet", document=before.document, expected_number=before.number - 1
    )

    assert [(each.line, each.location) for each in wrong.violations] == [
        (2, "models.chat.directory"),
        (2, "models.chat.directry"),
    ]
    assert "/nowhere" in absent.violations[0].message
    assert "must be absolute" in relative.violations[0].message
    assert "must be in" in stolen.violations[0].message
    assert "only a server's own file" in read.violations[0].message
    assert stale.fields == ["expected_number"]
    assert (await stored(admin)).version == before


async def test_a_dry_run_returns_the_changes_and_makes_none(pair: Pair, admin: Calls) -> None:
    before = (await stored(admin)).version

    answer = await admin("ApplyFleet", document=before.document + "gpus: [0]\n", dry_run=True)
    own = await admin("ApplyFleet", from_settings=True, dry_run=True)

    assert [(each.path, each.after_json) for each in answer.changes] == [("gpus", '["0"]')]
    assert answer.version.number == before.number
    assert own.changes, "the file is the first version, which is not in force any more"
    assert (await stored(admin)).version == before


async def test_a_process_that_cannot_serve_a_version_keeps_the_last_one_and_says_so(
    postgres_server: str, template_database: str, tmp_path: Path, model: Path
) -> None:
    """A killed process serves the newest version when it is back, and says its file differs."""
    file = tmp_path / "fleet.yaml"
    regions = "regions: {eu: [], us: []}\n"
    file.write_text(regions + FLEET.format(model=MODEL, directory=model))
    with new_database(postgres_server, template=template_database) as url:
        usual = {"models": bundled_models(), "fleet": str(file)}
        first = Service(tmp_path / "first", url, model, **usual)
        second = Service(tmp_path / "second", url, model, region="us", **usual)
        with running(first), running(second):
            tenant = await first.tenant(scopes=("inference", "admin"))
            async with calls(first, tenant.secret) as admin:
                document = (await stored(admin)).version.document
                without_us = document.replace("  us: []\n", "")
                answer = await admin("ApplyFleet", document=without_us)
                late = await fault_of(admin, second)
                async with second.stream(tenant.secret) as stream:
                    await stream.finished(await stream.begin())
                again = await applied(admin, document + f"aliases: {{more: {MODEL}}}\n")
                second.kill()
                moved = f"aliases: {{last: {MODEL}}}\n"
                newest = await admin("ApplyFleet", document=document + moved)
            second.start()
            async with second.stream(tenant.secret) as stream:
                await stream.finished(await stream.begin(model="last"))
            warnings = log_events(second.log, "fleet_file_not_used")

    assert not answer.violations, "the process that answered has no region"
    assert late.number == 1
    assert "WEIR_REGION='us'" in late.fault
    assert newest.version.number == again.version.number + 1 == 4
    [warning] = warnings[-1:]
    assert "weir fleet apply" in warning["remedy"]


async def fault_of(admin: Calls, service: Service) -> Any:
    """Wait until a process reports a fault; return what it reports."""
    async with asyncio.timeout(20):
        while True:
            for each in (await admin("GetFleet")).processes:
                if each.process_name.endswith(f":{service.pid}") and each.fault:
                    return each
            await asyncio.sleep(0.05)


async def test_a_replacement_that_does_not_load_leaves_the_old_engine_serving(
    postgres_server: str, template_database: str, tmp_path: Path, model: Path
) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{{MODEL}: {{directory: {model}}}}}")
    with new_database(postgres_server, template=template_database) as url:
        service = Service(tmp_path / "home", url, model, models=bundled_models(), fleet=str(file))
        with running(service):
            tenant = await service.tenant(scopes=("inference", "admin"))
            async with calls(service, tenant.secret) as admin:
                await stored(admin)
                answer = await admin(
                    "ApplyFleet", document=f"models: {{{MODEL}: {{directory: {broken}}}}}"
                )
                late = await fault_of(admin, service)
                async with service.stream(tenant.secret) as stream:
                    await stream.finished(await stream.begin())
                back = await applied(admin, f"models: {{{MODEL}: {{directory: {model}}}}}")

    assert not answer.violations
    assert late.number == 1
    assert back.version.number == 3


async def test_the_endpoints_of_a_service_are_followed_at_once(
    pair: Pair, admin: Calls, model: Path
) -> None:
    document = (await stored(admin)).version.document
    keys = pair[0].home / "keys"
    keys.mkdir(exist_ok=True)
    api = SlicesApi()
    api.put(endpoint_slice("a", endpoint("127.0.0.2"), endpoint("127.0.0.3", ready=False)))
    async with served(api.handle) as url:
        slices = {"namespace": "models", "service": "vllm", "kubeconfig": str(config(keys, url))}
        targets = [{"address": PODS, "endpoint_slices": slices}]
        fleet = yaml.safe_load(document)
        fleet["models"]["pods"] = {
            "engine": "remote",
            "directory": str(model),
            "targets": targets,
        }
        text = yaml.safe_dump(fleet)
        stolen = await admin("ApplyFleet", document=text.replace(str(keys), "/etc"))
        await applied(admin, text)
        await until_replicas(pair, "127.0.0.2")
        api.put(endpoint_slice("b", endpoint("127.0.0.4")))
        api.put(endpoint_slice("a", endpoint("127.0.0.3")))
        await until_replicas(pair, "127.0.0.3", "127.0.0.4")
        api.delete("a")
        api.delete("b")
        await until_replicas(pair)
        api.put(endpoint_slice("c", endpoint("fd00::1"), family="IPv6"))
        await until_replicas(pair, "[fd00::1]")
        await applied(admin, document)

    assert "must be in" in stolen.violations[0].message


async def until_replicas(services: Pair, *hosts: str) -> None:
    """Wait until all processes have a replica for each host, or one of that name without any."""
    expected = {f"{PODS}#{host}" for host in hosts} or {PODS}
    async with asyncio.timeout(20):
        for service in services:
            while True:
                async with calls(service, (await service.tenant(scopes=("admin",))).secret) as call:
                    found = (await call("ListReplicas")).replicas
                names = {each.replica for each in found if each.model == "pods"}
                if names == expected:
                    break
                await asyncio.sleep(0.05)
