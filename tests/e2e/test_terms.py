"""Plans, prepaid credit and simulations through the API."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from grpc import StatusCode
from weir_client import AsyncAdminClient, InvalidRequest, NotFound, QuotaDimension

from tests.metering.usage import Rates
from tests.service import INPUT_PICOS, MODEL, OUTPUT_PICOS, PLAIN_IDS, Service

PROMPT = tuple(PLAIN_IDS[:10])
NOW = datetime.now(UTC)
THIS_MONTH = f"{NOW:%Y-%m}"
NEXT_MONTH = f"{NOW.replace(day=1) + timedelta(days=32):%Y-%m}"
COST = 10 * INPUT_PICOS + 4 * OUTPUT_PICOS


def plan(name: str, **rules: object) -> dict[str, object]:
    return {
        "name": name,
        "allowances": [{"selector": {"token_kind": "output"}, "token_count": 3}],
        **rules,
    }


async def test_plans_have_versions_and_apply_from_a_month(service: Service) -> None:
    tenant = await service.tenant(scopes=("admin",))
    name = f"p{uuid.uuid4().hex[:8]}"
    steps = [{"up_to_token_count": 100, "price_milli": 900}, {"price_picos": 5}]
    tiered = {
        "selector": {"model": MODEL, "token_kind": "input", "tier": "SERVICE_TIER_BATCH"},
        "kind": "volume",
        "steps": steps,
    }
    async with AsyncAdminClient(service.address, tenant.secret) as admin:
        first = await admin.create_plan(plan(name))
        same = await admin.create_plan(plan(name))
        changed = plan(name, tiered_prices=[tiered], commitment_picos=10**12)
        second = await admin.create_plan(changed)
        assigned = await admin.assign_plan(tenant.name, name, version=1)
        again = await admin.assign_plan(tenant.name, name, version=1)
        later = await admin.assign_plan(tenant.name, name, first_month=NEXT_MONTH)
        listed = await admin.list_plans(name, organization=tenant.name)
        with pytest.raises(NotFound):
            await admin.assign_plan(tenant.name, "no-such-plan")
        with pytest.raises(InvalidRequest, match="first_month"):
            await admin.assign_plan(tenant.name, name, first_month="2026-13")
        with pytest.raises(
            InvalidRequest, match=r"plan.tiered_prices\[0\].kind: must be graduated or volume"
        ):
            await admin.create_plan(plan(name, tiered_prices=[tiered | {"kind": "cheap"}]))
        with pytest.raises(InvalidRequest, match=r"has the plan"):
            await admin.set_prepaid(tenant.name, True)
        entries = [
            each
            async for each in admin.list_audit_entries(subject=tenant.name, action_prefix="plan.")
        ]

    assert (first.version, first.existed, same.version, same.existed, second.version) == (
        1,
        False,
        1,
        True,
        2,
    )
    assert (assigned.first_month, assigned.existed, again.existed, later.version) == (
        THIS_MONTH,
        False,
        True,
        2,
    )
    assert [each.version for each in listed.plans] == [2, 1]
    assert listed.plans[0].configuration["tiered_prices"][0]["steps"][1] == {"price_picos": "5"}
    assert [(each.first_month, each.version) for each in listed.assignments] == [
        (THIS_MONTH, 1),
        (NEXT_MONTH, 2),
    ]
    assert [entry.action for entry in entries] == ["plan.assign"] * 2


async def test_credit_beyond_the_greatest_limit_is_refused(service: Service) -> None:
    """A currency of small units can reach the limit: 9,223,372 units of total usage."""
    tenant = await service.tenant(scopes=("admin", "inference"))
    async with AsyncAdminClient(service.address, tenant.secret) as admin:

        async def grant(picos: int, first_month: str = "") -> None:
            await admin.grant_credit(
                tenant.name, picos, first_month=first_month, last_month=NEXT_MONTH, reason="paid"
            )

        await admin.set_prepaid(tenant.name, True)
        for _ in range(9):
            await grant(10**18)
        for first_month in ("", NEXT_MONTH):
            with pytest.raises(
                InvalidRequest,
                match=r"amount_picos.*must be at most 223,372\.036854775807 USD, got 1,000,000",
            ):
                await grant(10**18, first_month)
        await grant(2**63 - 1 - 9 * 10**18)
        with pytest.raises(
            InvalidRequest,
            match=r"must be at most 0\.0* USD, got 0\.000000000001: .*; end prepaid mode",
        ):
            await grant(1)
        balance = await admin.get_credit_balance(tenant.name)

        await admin.set_prepaid(tenant.name, False)
        await grant(10**18)
        with pytest.raises(InvalidRequest, match=r"is 1,000,000\.0* USD above the maximum"):
            await admin.set_prepaid(tenant.name, True)

    assert balance.available.picos == 2**63 - 1


async def test_a_prepaid_organization_is_admitted_within_its_credit(service: Service) -> None:
    tenant = await service.tenant(scopes=("admin", "inference"))
    request = {"token_ids": list(PROMPT), "max_output_tokens": 4, "ignore_eos": True}
    async with (
        AsyncAdminClient(service.address, tenant.secret) as admin,
        service.client(tenant.secret) as client,
    ):
        assert not await admin.set_prepaid(tenant.name, True)
        assert await admin.set_prepaid(tenant.name, True)
        async with service.stream(tenant.secret) as stream:
            refused = (
                await stream.failed(
                    await stream.begin(token_ids={"ids": PROMPT}, max_output_tokens=4)
                )
            ).status
        request_id = str(uuid.uuid4())
        grants = [
            await admin.grant_credit(
                tenant.name, 5 * COST, last_month=NEXT_MONTH, reason="paid", request_id=request_id
            )
            for _ in "12"
        ]
        [credit] = await client.get_quota()
        ran = await client.complete(MODEL, **request)  # type: ignore[arg-type]
        balance = await admin.get_credit_balance(tenant.name)
        longer = await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=400, ignore_eos=True
        )
        spent = await admin.get_credit_balance(tenant.name)
        with pytest.raises(InvalidRequest, match="last_month"):
            await admin.grant_credit(tenant.name, 1, last_month="2026-01", reason="late")
        assert await admin.set_prepaid(tenant.name, False) is False
        free = await client.complete(MODEL, **request)  # type: ignore[arg-type]

    assert refused.code == StatusCode.FAILED_PRECONDITION.value[0]
    assert [each.type_url.rpartition(".")[2] for each in refused.details] == [
        "ErrorInfo",
        "QuotaFailure",
        "Help",
    ], "no RetryInfo"
    assert "Add credit" in refused.message
    assert grants[0] == grants[1]
    assert (credit.dimension, credit.remaining_value) == (QuotaDimension.PREPAID_CREDIT, 5 * COST)
    assert ran.cost.picos == COST
    assert (
        balance.prepaid,
        balance.remaining.picos,
        balance.unbilled.picos,
        balance.available.picos,
    ) == (True, 5 * COST, COST, 4 * COST)
    assert longer.finish_reason == "QUOTA_EXHAUSTED"
    assert 0 <= spent.available.picos < OUTPUT_PICOS
    assert free.cost.picos == COST


async def test_a_simulation_rates_the_month_again_and_changes_nothing(service: Service) -> None:
    tenant = await service.tenant(scopes=("admin", "inference"))
    own = Rates(
        input_picos_per_token=100, cached_input_picos_per_token=100, output_picos_per_token=200
    )
    listed = Rates(
        input_picos_per_token=2, cached_input_picos_per_token=2, output_picos_per_token=4
    )
    async with (
        AsyncAdminClient(service.address, tenant.secret) as admin,
        service.client(tenant.secret) as client,
    ):
        await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=4, ignore_eos=True)
        await admin.set_price(MODEL, organization=tenant.name, **own, batch_multiplier_milli=500)
        for tier in ("interactive", "batch"):
            await client.complete(
                MODEL, token_ids=PROMPT, max_output_tokens=4, ignore_eos=True, tier=tier
            )

        async def simulated(**proposal: object) -> tuple[int, int]:
            [customer] = await admin.simulate_prices(THIS_MONTH, proposal, organization=tenant.name)
            difference = customer.new_amount.picos - customer.old_amount.picos
            assert customer.difference.picos == difference
            for name in ("old_amount", "new_amount", "difference"):
                parts = sum(getattr(each, name).picos for each in customer.models)
                assert parts == getattr(customer, name).picos
            assert {each.model for each in customer.models} <= {MODEL, ""}
            return customer.old_amount.picos, customer.new_amount.picos

        old, cheap = COST + 1_800 + 900, 10 * 2 + 4 * 4
        assert await simulated() == (old, old)
        half = {"model": MODEL, **listed, "batch_multiplier_milli": 500}
        assert await simulated(prices=[half]) == (old, cheap + 1_800 + 900), (
            "an own price stays where the list's is proposed"
        )
        assert await simulated(prices=[half | {"organization": tenant.name}]) == (
            old,
            2 * cheap + cheap // 2,
        )
        committed = plan("tryout", commitment_picos=10**12)
        assert await simulated(plans=[committed]) == (old, 10**12)
        # Of three free output tokens two go to the interactive requests, and one to the batch
        # request.
        free = 2 * OUTPUT_PICOS + 100
        tried = plan("tryout", organizations=[tenant.name])
        assert await simulated(plans=[tried]) == (old, old - free)
        with pytest.raises(InvalidRequest, match="month"):
            await admin.simulate_prices("2026", {})
        with pytest.raises(NotFound):
            await admin.simulate_prices(THIS_MONTH, {"prices": [half | {"organization": "nobody"}]})
        [price] = [
            each
            for each in (await admin.list_prices(model=MODEL)).prices
            if each.tier == "interactive"
        ]

    assert price.version.output_picos_per_token == OUTPUT_PICOS
