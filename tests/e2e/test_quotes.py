"""Quotes predict requests without a trace; limits are raised, shadowed and listed in one call."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from weir_client import (
    AsyncAdminClient,
    InvalidRequest,
    NotFound,
    QuotaDimension,
    QuotaExceeded,
    QuotaSubject,
)

from metering.core.models import QuotaDimension as Dimension
from tests.service import MODEL, PLAIN_IDS, Service

PROMPT = tuple(PLAIN_IDS[:10])


async def test_a_quote_is_what_the_request_then_is(service: Service) -> None:
    tenant = await service.tenant(
        {Dimension.TOKENS_PER_MONTH: 1_000, Dimension.CONCURRENT_REQUESTS: 5}
    )
    async with service.client(tenant.secret) as client:
        quote = await client.quote(MODEL, token_ids=PROMPT, max_output_tokens=24, ignore_eos=True)
        result = await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=24, ignore_eos=True
        )
        later = await client.quote(MODEL, token_ids=PROMPT, max_output_tokens=100)

    assert quote.would_admit
    assert quote.input_token_count == result.usage.input_token_count
    assert quote.max_output_token_count == 24
    assert quote.expected_output_token_count == 24  # the worst case, as nothing is known yet
    assert result.cost <= quote.worst_case_cost
    assert result.admitted is not None
    assert quote.price_version == result.admitted.price_version
    assert [each.used_value + each.held_value for each in quote.quotas] == [0, 0]
    assert all(each.binding for each in quote.quotas)
    assert later.expected_output_token_count == 24  # like the project's earlier requests
    assert later.worst_case_cost > later.expected_cost


async def test_a_quote_names_the_limits_and_leaves_no_trace(service: Service) -> None:
    tenant = await service.tenant({Dimension.TOKENS_PER_DAY: 40, Dimension.CONCURRENT_REQUESTS: 0})
    async with service.client(tenant.secret) as client:
        refused = await client.quote(MODEL, token_ids=PROMPT, max_output_tokens=24)
        with pytest.raises(QuotaExceeded) as caught:
            await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=24)
        quotas = await client.get_quota()

    assert not refused.would_admit
    [failing] = refused.failing_quotas
    assert failing.dimension == QuotaDimension.CONCURRENT_REQUESTS
    assert (refused.retry_helps, refused.retry_after_s) == (False, None)
    assert not caught.value.retry_helps
    assert [(each.used_value, each.held_value) for each in quotas] == [(0, 0), (0, 0)]


async def test_a_quote_of_what_fits_later_says_when(service: Service) -> None:
    tenant = await service.tenant({Dimension.TOKENS_PER_DAY: 40})
    async with service.client(tenant.secret) as client:
        await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=20, ignore_eos=True)
        refused = await client.quote(MODEL, token_ids=PROMPT, max_output_tokens=24)
        with pytest.raises(NotFound):
            await client.quote("nothing", token_ids=PROMPT)
        with pytest.raises(InvalidRequest):
            await client.quote(MODEL, token_ids=PROMPT, max_output_tokens=0)

    [quota] = refused.failing_quotas
    assert quota.remaining_value == 10
    assert refused.retry_helps
    assert refused.retry_after_s is not None
    assert quota.reset_delay_s is not None
    # Midnight, plus some of the random spread of retries.
    assert 0 <= refused.retry_after_s - quota.reset_delay_s <= 6


async def test_an_admin_raises_watches_and_sees_what_binds(service: Service) -> None:
    tenant = await service.tenant(scopes=("admin", "inference"))
    async with (
        AsyncAdminClient(service.address, tenant.secret) as admin,
        service.client(tenant.secret) as client,
    ):
        organization = await admin.set_quota(
            QuotaSubject.ORGANIZATION, tenant.name, QuotaDimension.TOKENS_PER_DAY, 20
        )
        of_key = await admin.set_quota(
            QuotaSubject.API_KEY, tenant.key.prefix, QuotaDimension.TOKENS_PER_DAY, 90
        )
        watching = await admin.set_quota(
            QuotaSubject.API_KEY,
            tenant.key.prefix,
            QuotaDimension.CONCURRENT_REQUESTS,
            0,
            enforced=False,
        )
        with pytest.raises(QuotaExceeded):
            await client.complete(MODEL, token_ids=PROMPT, max_output_tokens=40)
        until = datetime.now(UTC) + timedelta(hours=1)
        raised = await admin.override_quota(organization.quota_id, 100, until, "a launch")
        result = await client.complete(
            MODEL, token_ids=PROMPT, max_output_tokens=40, ignore_eos=True
        )
        met = {
            each.quota_id: each for each in await admin.list_key_quotas(tenant.key.prefix, MODEL)
        }
        own = await client.get_quota(MODEL)
        ended = await admin.end_quota_override(organization.quota_id)

    assert of_key.narrowed_by_quota_id == organization.quota_id
    assert (raised.limit_value, raised.base_limit_value) == (100, 20)
    assert raised.override_reason == "a launch"
    assert result.usage.billed_token_count == 40
    ids = {organization.quota_id, of_key.quota_id, watching.quota_id}
    assert set(met) == ids == {each.quota_id for each in own}
    assert met[watching.quota_id].would_refuse_count == 1
    assert [each.quota_id for each in met.values() if each.binding] == [of_key.quota_id]
    # during the hour in which the organization has 100
    assert met[of_key.quota_id].remaining_value == 40
    assert (ended.limit_value, ended.remaining_value, ended.override_end_time) == (20, -30, None)
