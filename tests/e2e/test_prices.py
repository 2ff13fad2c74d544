"""Customer prices and the batch tier: listed, quoted, charged, withdrawn, and as a document."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from weir_client import AsyncAdminClient, InvalidRequest, NotFound

from tests.metering.usage import Rates
from tests.service import INPUT_PICOS, MODEL, OUTPUT_PICOS, PLAIN_IDS, Service

TIERS: tuple[Literal["interactive", "batch"], ...] = ("interactive", "batch")
PROMPT = tuple(PLAIN_IDS[:10])
OWN = Rates(input_picos_per_token=100, cached_input_picos_per_token=100, output_picos_per_token=200)


async def test_a_customer_pays_its_own_price_in_each_tier(service: Service) -> None:
    tenant, other = await service.tenant(scopes=("admin", "inference")), await service.tenant()
    async with (
        AsyncAdminClient(service.address, tenant.secret) as admin,
        service.client(tenant.secret) as client,
        service.client(other.secret) as others,
    ):
        [interactive, batch] = await admin.set_price(
            MODEL, organization=tenant.name, **OWN, batch_multiplier_milli=500
        )
        [model], [model_of_other] = await client.list_models(), await others.list_models()
        listed = await admin.list_prices(tenant.name, model=MODEL)
        request: dict[str, Any] = {"token_ids": PROMPT, "max_output_tokens": 4, "ignore_eos": True}
        quoted = [await client.quote(MODEL, tier=tier, **request) for tier in TIERS]
        ran = [await client.complete(MODEL, tier=tier, **request) for tier in TIERS]
        of_other = await others.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=4, ignore_eos=True
        )
        [ended, _] = await admin.withdraw_price(tenant.name, MODEL)
        with pytest.raises(NotFound):
            await admin.withdraw_price(tenant.name, MODEL)
        afterwards = await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=4, ignore_eos=True
        )
        history = await admin.list_prices(tenant.name, model=MODEL, history=True)

    assert [(each.tier, each.own, each.output_picos_per_token) for each in model.tier_prices] == [
        ("interactive", True, 200),
        ("batch", True, 100),
    ]
    assert model_of_other.price is not None
    assert (model_of_other.price.own, model_of_other.price.output_picos_per_token) == (
        False,
        OUTPUT_PICOS,
    )
    assert [(each.tier, each.source, each.version.version) for each in listed.prices] == [
        ("interactive", "organization", interactive.version),
        ("batch", "organization", batch.version),
    ]
    assert [each.price_version for each in quoted] == [interactive.version, batch.version]
    worst = 10 * 100 + 4 * 200
    assert [each.worst_case_cost.picos for each in quoted] == [worst, worst // 2]
    versions = [each.admitted and each.admitted.price_version for each in ran]
    assert versions == [interactive.version, batch.version]
    assert [each.cost.picos for each in ran] == [1_800, 900]
    assert of_other.cost.picos == afterwards.cost.picos == 10 * INPUT_PICOS + 4 * OUTPUT_PICOS
    assert (ended.withdrawn, ended.organization_name) == (True, tenant.name)
    assert [each.version for each in history.versions if each.organization_name][-1] > ended.version


async def test_wrong_prices_are_refused_by_field(service: Service) -> None:
    tenant = await service.tenant(scopes=("admin",))
    async with AsyncAdminClient(service.address, tenant.secret) as admin:
        with pytest.raises(InvalidRequest, match=r"batch_multiplier_milli: 333 .* use 330 or 340"):
            await admin.set_price(
                MODEL, organization=tenant.name, **OWN, batch_multiplier_milli=333
            )
        with pytest.raises(InvalidRequest, match="currency_code"):
            await admin.set_price(MODEL, organization=tenant.name, currency_code="EUR", **OWN)
        with pytest.raises(NotFound):
            await admin.set_price(MODEL, organization="no-such-customer", **OWN)


async def test_a_document_of_prices_applies_once(service: Service) -> None:
    """List prices and a customer's, with tiers, and one for the future."""
    tenant = await service.tenant(scopes=("admin",))
    model = f"m{uuid.uuid4().hex[:8]}"
    to_come = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)
    dear = {
        "model": model,
        "input_picos_per_token": 2_000,
        "cached_input_picos_per_token": 1_000,
        "output_picos_per_token": 8_000,
    }
    document = {
        "prices": [
            dear | {"batch_multiplier_milli": 500, "embedding_picos_per_token": 1_000},
            {"model": model, **OWN, "organization": tenant.name},
            dear
            | {"output_picos_per_token": 9_000, "effective_time": f"{to_come:%Y-%m-%dT%H:%M:%SZ}"},
        ]
    }
    async with AsyncAdminClient(service.address, tenant.secret) as admin:
        planned = await admin.apply_configuration(document, dry_run=True)
        applied = await admin.apply_configuration(document)
        again = await admin.apply_configuration(document)
        exported = await admin.export_configuration(tenant.name)
        unchanged = await admin.apply_configuration(exported)
        now = await admin.list_prices(tenant.name, model=model)
        then = await admin.list_prices(model=model, time=to_come)
        wrong = await admin.apply_configuration(
            {"prices": [dear | {"organization": "nobody"}, dear | {"batch_multiplier_milli": -1}]}
        )

    assert [each.path for each in applied.changes] == [each.path for each in planned.changes]
    assert [change.path for change in applied.changes] == [
        f"{model} in USD",
        f"{model} in USD of {tenant.name}",
        f"{model} in USD from {to_come:%Y-%m-%d %H:%M:%S}Z",
    ]
    assert again.changes == unchanged.changes == ()
    assert [each["organization"] for each in exported["prices"]] == [tenant.name]
    assert [
        (each.tier, each.source, each.version.output_picos_per_token) for each in now.prices
    ] == [("interactive", "organization", 200), ("batch", "organization", 100)]
    assert [(each.tier, each.version.output_picos_per_token) for each in then.prices] == [
        ("interactive", 9_000),
        ("batch", 4_500),
    ]
    fields = [error.field for error in wrong.violations]
    assert fields == ["prices[0].organization", "prices[1].batch_multiplier_milli"]
