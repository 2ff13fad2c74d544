"""Lists in pages: each row once, whatever is inserted and deleted between two pages."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.webhooks import list_webhooks
from metering.core.errors import InvalidValue, NotFound
from metering.core.pages import page_token as token_of
from metering.invoicing.adjustments import list_adjustments
from metering.plans.plan_admin import list_assignments
from metering.plans.prepaid import list_grants
from metering.quotas.quota_states import list_quotas
from metering.store.db import Sessions
from metering.tenants.api_keys import list_api_keys
from metering.tenants.tenants import list_organizations, list_projects
from metering.tenants.token_issuers import list_token_issuers
from tests.metering.usage import Customer

# Rows `first` to `last` of each list, with equal times, so that only the ids tell some apart.
FILL = {
    "organizations": """
        INSERT INTO organizations (name, currency_code)
        SELECT 'o' || lpad((n * 7919 % 1000)::text, 3, '0'), 'USD'
        FROM generate_series(CAST(:first AS int), :last) n
    """,
    "projects": """
        INSERT INTO projects (organization_id, name)
        SELECT CAST(:acme AS uuid), 'p' || lpad((n * 7919 % 1000)::text, 3, '0')
        FROM generate_series(CAST(:first AS int), :last) n
    """,
    "keys": """
        INSERT INTO api_keys (project_id, name, prefix, scopes, created_at)
        SELECT p.id, 'Key ' || n, 'wk_' || lpad(n::text, 8, '0'), '{inference}',
               timestamptz '2026-01-01' + make_interval(days => n / 3)
        FROM projects p, generate_series(CAST(:first AS int), :last) n WHERE p.name = 'search'
    """,
    "quotas": """
        INSERT INTO quotas (subject, subject_id, dimension, limit_value, model)
        SELECT (array['organization', 'project'])[1 + n % 2],
               CASE n % 2 WHEN 0 THEN CAST(:acme AS uuid) ELSE p.id END,
               (array['tokens_per_day', 'requests_per_minute'])[1 + n / 2 % 2], 5, 'm' || n / 4
        FROM projects p, generate_series(CAST(:first AS int), :last) n WHERE p.name = 'search'
    """,
    "grants": """
        INSERT INTO credit_grants (organization_id, currency_code, amount_picos, first_month,
                                   last_month, reason, granted_by)
        SELECT CAST(:acme AS uuid), 'USD', n, '2026-01-01',
               date '2026-01-01' + make_interval(months => n / 3), 'gift', 'test'
        FROM generate_series(CAST(:first AS int), :last) n
    """,
    "webhooks": """
        WITH made AS (
            INSERT INTO organizations (name, currency_code)
            SELECT 'w' || lpad((n * 7919 % 1000)::text, 3, '0'), 'USD'
            FROM generate_series(CAST(:first AS int), :last) n RETURNING id, name
        )
        INSERT INTO alert_webhooks (organization_id, url, secret)
        SELECT id, 'https://' || name || '.example', 'whsec_' || name FROM made
    """,
    "issuers": """
        WITH made AS (
            INSERT INTO token_issuers (
                organization_id, issuer, audience, algorithms, keys_url, keys, leeway_s,
                lifetime_max_s, token_type, requires_id, project_claim, end_user_claim,
                models_claim, max_output_tokens_claim, label_claims, created_at)
            SELECT CAST(:acme AS uuid), 'https://issuer.example/' || n, 'weir', '{ES256}', '', '',
                   1, 60, '', false, '', '', '', '', '{}',
                   timestamptz '2026-01-01' + make_interval(days => n / 3)
            FROM generate_series(CAST(:first AS int), :last) n RETURNING id, issuer
        ), keys AS (
            INSERT INTO api_keys (project_id, name, prefix, scopes)
            SELECT p.id, m.issuer, 'wi_' || substr(md5(m.issuer), 1, 8), '{inference}'
            FROM made m, projects p WHERE p.name = 'search' RETURNING id, name
        )
        INSERT INTO token_keys (token_issuer_id, claim_value, api_key_id)
        SELECT m.id, '', k.id FROM made m JOIN keys k ON k.name = m.issuer
    """,
    "adjustments": """
        INSERT INTO adjustments (organization_id, currency_code, amount_picos, reason, author,
                                 created_at)
        SELECT CAST(:acme AS uuid), 'USD', 10000000000 * n, 'error', 'test',
               timestamptz '2026-01-01' + make_interval(days => n / 3)
        FROM generate_series(CAST(:first AS int), :last) n
    """,
    "assignments": """
        INSERT INTO plan_assignments (organization_id, first_month, assigned_by)
        SELECT CAST(:acme AS uuid), date '2020-01-01' + make_interval(months => n), 'test'
        FROM generate_series(CAST(:first AS int), :last) n
    """,
}
ROW_COUNT = 24
Read = Callable[..., Awaitable[tuple[Sequence[Any], str]]]


async def own_adjustments(session: AsyncSession, **page: Any) -> tuple[Sequence[Any], str]:
    acme: uuid.UUID = (
        await session.scalars(text("SELECT id FROM organizations WHERE name = 'acme'"))
    ).one()
    return await list_adjustments(session, acme, **page)


async def own_projects(session: AsyncSession, **page: Any) -> tuple[Sequence[Any], str]:
    return await list_projects(session, organization="acme", **page)


async def own_quotas(session: AsyncSession, **page: Any) -> tuple[Sequence[Any], str]:
    return await list_quotas(session, organization="acme", **page)


READS: dict[str, tuple[Read, Callable[[Any], object]]] = {
    "organizations": (list_organizations, lambda each: each.name),
    "projects": (own_projects, lambda each: each.name),
    "keys": (list_api_keys, lambda each: each.prefix),
    "quotas": (own_quotas, lambda each: (each.subject, each.dimension, each.model)),
    "grants": (list_grants, lambda each: each.amount_picos),
    "webhooks": (list_webhooks, lambda each: each.organization.name),
    "issuers": (list_token_issuers, lambda each: each.issuer),
    "adjustments": (own_adjustments, lambda each: each.amount_picos),
    "assignments": (list_assignments, lambda each: each.first_month),
}


async def fill(session: AsyncSession, name: str, first: int, last: int) -> None:
    acme = (await session.scalars(text("SELECT id FROM organizations WHERE name = 'acme'"))).one()
    values = {"first": first, "last": last} | ({"acme": acme} if ":acme" in FILL[name] else {})
    await session.execute(text(FILL[name]), values)


@pytest.mark.parametrize("name", FILL)
async def test_pages_have_each_row_once_although_others_come_between(
    name: str, sessions: Sessions, customer: Customer
) -> None:
    read, shown_of = READS[name]
    async with sessions.begin() as session:
        await fill(session, name, 1, ROW_COUNT)
        before, _ = await read(session)

    async with sessions() as session:
        for page_size in (1, 5, ROW_COUNT + 3):
            found: list[Any] = []
            token = ""
            while True:
                page, token = await read(session, page_size=page_size, page_token=token)
                assert len(page) <= page_size
                found += page
                if not token:
                    break
            assert [shown_of(each) for each in found] == [shown_of(each) for each in before]

    seen, token = [], ""
    for number in range(ROW_COUNT * 3):
        async with sessions.begin() as session:
            page, token = await read(session, page_size=5, page_token=token)
            seen += [shown_of(each) for each in page]
            await fill(session, name, ROW_COUNT + number + 1, ROW_COUNT + number + 1)
        if not token:
            break

    assert token == ""
    assert len(seen) == len(set(seen)), "a row was repeated"
    assert {shown_of(each) for each in before} <= set(seen), "a row was left out"


@pytest.mark.parametrize("name", FILL)
async def test_forged_tokens_are_refused(name: str, sessions: Sessions, customer: Customer) -> None:
    read, _ = READS[name]
    async with sessions.begin() as session:
        await fill(session, name, 1, 3)
        _, token = await read(session, page_size=1)
    assert token

    for forged in ("x", token[:-4], token + "A", token_of(*["x"] * 9), token_of("2026", "\x00", 1)):
        async with sessions() as session:
            with pytest.raises(InvalidValue, match="page_token: must be `next_page_token` of"):
                await read(session, page_size=1, page_token=forged)


async def test_one_of_many_is_found_by_how_its_name_begins(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        for name in ("organizations", "projects", "keys"):
            await fill(session, name, 1, ROW_COUNT)

    async with sessions() as session:
        organizations, _ = await list_organizations(session, search="O0")
        [acme], _ = await list_organizations(session, organization="acme")
        projects, _ = await own_projects(session, search="p0")
        by_name, _ = await list_api_keys(session, search=" kEY 1")
        by_prefix, _ = await list_api_keys(session, search="WK_0000002")
        for nothing in ("%", "_", "ey 1", "\\"):
            assert await list_api_keys(session, search=nothing) == ([], "")
        with pytest.raises(NotFound):
            await list_organizations(session, organization="nobody")

    assert {each.name[:2] for each in organizations} == {"o0"}
    assert acme.name == "acme"
    assert {each.name[:2] for each in projects} == {"p0"}
    assert {each.name for each in by_name} == {f"Key {n}" for n in (1, *range(10, 20))}
    assert {each.prefix for each in by_prefix} == {f"wk_0000002{n}" for n in range(5)}


async def test_keys_are_selected_by_their_state(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await fill(session, "keys", 1, 4)
        for number, change in (
            (1, "revoked_at = now()"),
            (2, "expires_at = now() - interval '1 s'"),
            (3, "expires_at = now() + interval '1 h'"),
        ):
            await session.execute(text(f"UPDATE api_keys SET {change} WHERE name = 'Key {number}'"))

    async with sessions() as session:
        ended, _ = await list_api_keys(session, search="key ", is_ended=True)
        valid, _ = await list_api_keys(session, search="key ", is_ended=False)
        unused, _ = await list_api_keys(session, unused_for=timedelta(days=300), page_size=1)

    assert {each.name for each in ended} == {"Key 1", "Key 2"}
    assert {each.name for each in valid} == {"Key 3", "Key 4"}
    assert unused == []
