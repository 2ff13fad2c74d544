"""Model with two versions, several names and two regions: billed by its canonical name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import grpc
import httpx2
import pytest

from api.core.settings import bundled_models
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.quotas.quota_admin import set_quota
from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.service import MODEL, Service, cost_picos, kernels_of_this_machine, picos, wait_for

FLEET = """
regions: {{eu: [us], us: []}}
models:
  {model}:
    versions:
      v1: {{directory: {directory}, region: eu}}
      v2: {{directory: {directory}, region: eu, weight: 1}}
aliases: {{latest: {model}, next: {model}@v2}}
"""


@pytest.fixture(scope="module")
def fleet(serve: Serve, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Service:
    """Return a separate service in the region eu."""
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    file.write_text(FLEET.format(model=MODEL, directory=model))
    service = serve(model, is_drained=True, models=bundled_models(), fleet=str(file), region="eu")
    wait_for(
        lambda: service.serving(f"engine/{MODEL}@v1") and service.serving(f"engine/{MODEL}@v2"),
        "both versions to load",
    )
    return service


@pytest.mark.parametrize("name", [MODEL, "latest", "next", f"{MODEL}@v1"])
async def test_a_request_by_an_alias_is_billed_as_the_model(fleet: Service, name: str) -> None:
    tenant = await fleet.tenant()
    async with fleet.stream(tenant.secret) as stream:
        request_id = await stream.begin(model=name)
        finished = await stream.finished(request_id)
        count = len(stream.token_ids(request_id))
    async with calls(fleet, tenant.secret) as call:
        answer = await call("GetGeneration", request_id=request_id)

    assert answer.generation.model == MODEL
    assert fleet.database.event(tenant, request_id)["model"] == MODEL
    assert (finished.usage.billed_token_count, finished.migration_count) == (count, 0)
    assert picos(finished.cost) == picos(answer.generation.cost) == cost_picos(finished.usage)


async def test_a_quota_for_a_model_applies_to_its_aliases(fleet: Service) -> None:
    tenant = await fleet.tenant()
    async with fleet.session() as session:
        await set_quota(
            session,
            subject=QuotaSubject.ORGANIZATION,
            subject_ref=tenant.name,
            key=QuotaKey(QuotaDimension.REQUESTS_PER_MINUTE, MODEL),
            terms=QuotaTerms(3),
            actor="test",
        )
    async with fleet.stream(tenant.secret) as stream:
        for name in ("latest", "next", f"{MODEL}@v1"):
            await stream.finished(await stream.begin(model=name, max_output_tokens=1))
        refusal = await stream.failed(await stream.begin(model="latest", max_output_tokens=1))

    assert refusal.reason == "QUOTA_EXCEEDED"


async def test_a_key_limited_to_a_model_may_use_all_its_names(fleet: Service) -> None:
    tenant = await fleet.tenant()
    _, secret = await fleet.new_key(tenant, models=[MODEL])
    _, other = await fleet.new_key(tenant, models=["another"])
    async with fleet.stream(secret) as stream:
        for name in (MODEL, "latest", f"{MODEL}@v2"):
            await stream.finished(await stream.begin(model=name, max_output_tokens=1))
    async with fleet.stream(other) as stream:
        for name in (MODEL, "latest", f"{MODEL}@v2"):
            refusal = await stream.failed(await stream.begin(model=name))
            assert refusal.reason == "MODEL_NOT_ALLOWED"


async def test_unknown_names_and_regions_are_reported_with_the_known_ones(fleet: Service) -> None:
    tenant = await fleet.tenant()
    async with fleet.stream(tenant.secret) as stream:
        unknown = await stream.failed(await stream.begin(model=f"{MODEL}@v9"))
        nowhere = await stream.failed(await stream.begin(region="mars"))
        away = await stream.failed(await stream.begin(region="us"))
        near = await stream.finished(await stream.begin(region="eu"))

    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_UNKNOWN")
    assert "latest, next, tiny" in unknown.status.message
    assert (nowhere.code, nowhere.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["region"])
    assert "choose one of eu, us" in nowhere.status.message
    assert away.code == grpc.StatusCode.UNAVAILABLE, "what is to run in us must not run elsewhere"
    assert near.usage.billed_token_count == 20


async def test_every_name_that_a_key_may_ask_for_is_listed_over_http(fleet: Service) -> None:
    tenant = await fleet.tenant()
    _, secret = await fleet.new_key(tenant, models=[MODEL])
    _, other = await fleet.new_key(tenant, models=["another"])
    stands_for = {
        MODEL: {},
        "latest": {"alias_of": MODEL},
        "next": {"alias_of": f"{MODEL}@v2"},
        f"{MODEL}@v1": {"version_of": MODEL},
        f"{MODEL}@v2": {"version_of": MODEL},
    }

    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {secret}"}) as client:
        listed = (await client.get(f"{fleet.openai_url}/models")).json()["data"]
        found = [
            (await client.get(f"{fleet.openai_url}/models/{quote(name, safe='')}")).json()
            for name in stands_for
        ]
        unknown = await client.get(f"{fleet.openai_url}/models/{MODEL}%40v3")
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {other}"}) as client:
        nothing = (await client.get(f"{fleet.openai_url}/models")).json()["data"]
        hidden = await client.get(f"{fleet.openai_url}/models/latest")

    assert listed == found
    assert [each["id"] for each in found] == [*stands_for]
    for each in found:
        marks = {name: each["weir"].get(name) for name in ("alias_of", "version_of")}
        assert {name: mark for name, mark in marks.items() if mark} == stands_for[each["id"]]
        assert each["max_model_len"] == each["weir"]["context_window_tokens"]
    assert nothing == []
    assert unknown.status_code == hidden.status_code == 404


async def test_the_list_of_models_reports_names_versions_and_replicas(fleet: Service) -> None:
    tenant = await fleet.tenant()
    async with fleet.client(tenant.secret) as client:
        [listed] = await client.list_models()
        counted = await client.count_tokens("latest", "Hi")
        result = await client.complete("next", "Hi", max_output_tokens=3, region="eu")

    assert (listed.name, listed.aliases) == (MODEL, ("latest", "next"))
    assert [(each.version, each.share) for each in listed.versions] == [("v1", 0.5), ("v2", 0.5)]
    assert (listed.ready_replica_count, listed.replica_count) == (2, 2)
    assert listed.kernels == (kernels_of_this_machine(),)
    assert listed.price is not None
    assert counted.input_token_count > 0
    assert (result.usage.delivered_token_count > 0, result.migration_count) == (True, 0)
