"""Preview of a limit: it refuses what the limit would have refused, to the request."""

from __future__ import annotations

from typing import Any

import pytest
from weir_client import (
    AsyncAdminClient,
    InvalidRequest,
    NotFound,
    QuotaDimension,
    QuotaExceeded,
    QuotaPreview,
    QuotaSubject,
)

from metering.core.models import QuotaDimension as Dimension
from tests.service import MODEL, PLAIN_IDS, Service, Tenant

# Input and output tokens of requests that run one after the other.
REQUESTS = [(10, 6), (3, 1), (40, 2), (1, 8), (25, 4), (2, 2), (7, 7), (1, 1), (5, 40)]
USERS = ("ann", "bob", "")
LIMITS = [
    (Dimension.TOKENS_PER_DAY, 60),
    (Dimension.TOKENS_PER_DAY, 41),
    (Dimension.INPUT_TOKENS_PER_DAY, 50),
    (Dimension.OUTPUT_TOKENS_PER_LIFETIME, 20),
    (Dimension.REQUESTS_PER_DAY, 5),
    (Dimension.CONCURRENT_REQUESTS, 1),
    (Dimension.CONCURRENT_REQUESTS, 0),
    (Dimension.TOKENS_PER_DAY, 150),  # which leaves 25 tokens to the output of the last request
    (Dimension.TOKENS_PER_DAY, 10_000),
]


async def run(service: Service, tenant: Tenant) -> tuple[int, int]:
    """Send the requests, and return how many were refused, and how many ended early."""
    refused_count = shortened_count = 0
    async with service.client(tenant.secret) as client:
        for index, (sent, output) in enumerate(REQUESTS):
            try:
                result = await client.complete(
                    MODEL,
                    token_ids=PLAIN_IDS[:sent],
                    max_output_tokens=output,
                    ignore_eos=True,
                    end_user=USERS[index % len(USERS)],
                )
            except QuotaExceeded:
                refused_count += 1
            else:
                shortened_count += result.usage.delivered_token_count < output
    return refused_count, shortened_count


async def preview(
    admin: AsyncAdminClient, tenant: Tenant, limit: tuple[Dimension, int], **terms: Any
) -> QuotaPreview:
    dimension = QuotaDimension(limit[0].spelling)
    subject = QuotaSubject.ORGANIZATION
    return await admin.preview_quota(subject, tenant.name, dimension, limit[1], **terms)


@pytest.fixture
async def free(service: Service) -> Tenant:
    """Return a customer without limits, after it has sent the requests."""
    tenant = await service.tenant(scopes=("admin", "inference"))
    assert await run(service, tenant) == (0, 0)
    await service.no_hold_left(tenant)
    return tenant


async def test_a_preview_refuses_what_the_limit_refuses(service: Service, free: Tenant) -> None:
    async with AsyncAdminClient(service.address, free.secret) as admin:
        for limit in LIMITS:
            limited = await service.tenant(dict([limit]))
            refused_count, shortened_count = await run(service, limited)

            found = await preview(admin, free, limit)

            assert (found.refused_count, found.shortened_count) == (
                refused_count,
                shortened_count,
            ), limit
            assert found.request_count == len(REQUESTS)
            assert sum(each.refused_count for each in found.days) == refused_count
            assert sum(each.request_count for each in found.days) == len(REQUESTS)
            assert (found.first_refusal_time is None) == (refused_count == 0)


async def test_a_selector_is_previewed_by_member(service: Service, free: Tenant) -> None:
    async with AsyncAdminClient(service.address, free.secret) as admin:
        found = await preview(admin, free, (Dimension.REQUESTS_PER_DAY, 2), for_each="end_user")
        ann = await preview(admin, free, (Dimension.REQUESTS_PER_DAY, 0), end_user="ann")
        nobody = await preview(admin, free, (Dimension.REQUESTS_PER_DAY, 0), end_user="nobody")
        of_key = await admin.preview_quota(
            QuotaSubject.API_KEY, free.key.prefix, QuotaDimension("requests-per-day"), 0
        )

    assert [(each.name, each.request_count, each.refused_count) for each in found.members] == [
        ("ann", 3, 1),
        ("bob", 3, 1),
    ]
    assert (found.member_count, found.refused_member_count) == (2, 2)
    assert (ann.request_count, ann.refused_count, ann.members) == (3, 3, ())
    assert nobody.request_count == 0
    assert of_key.refused_count == len(REQUESTS)


async def test_a_preview_names_what_it_cannot_take(service: Service, free: Tenant) -> None:
    limit = (Dimension.REQUESTS_PER_DAY, 5)
    async with AsyncAdminClient(service.address, free.secret) as admin:
        before = (
            [quota async for quota in admin.list_quotas(free.name)],
            len([e async for e in admin.list_audit_entries()]),
        )
        await preview(admin, free, limit)
        with pytest.raises(InvalidRequest, match="limit_value"):
            await preview(admin, free, (Dimension.REQUESTS_PER_DAY, -1))
        with pytest.raises(InvalidRequest, match="window_minutes"):
            await preview(admin, free, limit, window_minutes=5)
        with pytest.raises(NotFound):
            await preview(admin, free, limit, model="nothing")
        after = (
            [quota async for quota in admin.list_quotas(free.name)],
            len([e async for e in admin.list_audit_entries()]),
        )

    assert before == after, "a preview changes nothing"
