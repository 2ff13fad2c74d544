"""Organizations, projects and keys, and their audit log."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

import pytest
from sqlalchemy import text

from metering.core.audit import list_audit_entries
from metering.core.errors import AlreadyExists, InvalidValue, KeyInvalid, NotFound
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key, find_api_key, list_api_keys, revoke_api_key
from metering.tenants.authentication import PREFIX_FORM, SECRET_FORM, authenticate
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import (
    create_organization,
    create_project,
    find_organization,
    find_project,
    list_organizations,
    list_projects,
)
from tests.metering.usage import Customer, new_customer


async def test_a_key_has_its_principal_and_a_hash(sessions: Sessions, customer: Customer) -> None:
    async with sessions() as session:
        principal = await authenticate(session, customer.secret)
        stored = (
            await session.execute(
                text("SELECT to_jsonb(k)::text || secret_hash::text FROM api_keys k")
            )
        ).scalar_one()
        log = (
            await session.execute(text("SELECT string_agg(to_jsonb(a)::text, '') FROM audit_log a"))
        ).scalar_one()

    assert SECRET_FORM.fullmatch(customer.secret)
    assert PREFIX_FORM.fullmatch(customer.key.prefix)
    assert customer.secret.startswith(customer.key.prefix)
    assert principal.api_key_id == customer.key.id
    assert principal.organization_id == customer.organization_id
    assert principal.project_id == customer.key.project_id
    assert principal.currency_code == "USD"
    assert principal.scopes == {"inference", "admin", "billing"}
    assert customer.secret not in stored
    assert customer.secret not in log
    assert "secret_hash" not in log


async def test_unusable_keys_are_refused_alike(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        short_lived, expired = await create_api_key(
            session,
            organization="acme",
            project="search",
            name="short",
            lifetime=timedelta(hours=1),
            actor="test",
        )
        assert (await authenticate(session, expired)).api_key_id == short_lived.id
        await session.execute(text("UPDATE api_keys SET expires_at = now() WHERE name = 'short'"))
        await revoke_api_key(session, api_key=customer.key.prefix, actor="test")
    unknown = customer.secret[:-1] + ("a" if customer.secret[-1] != "a" else "b")

    messages = set()
    async with sessions() as session:
        for secret in (unknown, customer.secret, expired, "", "wk_", "x\0y", "wk_" + "a" * 100_000):
            with pytest.raises(KeyInvalid) as refusal:
                await authenticate(session, secret)
            messages.add(str(refusal.value))

    assert len(messages) == 1


async def test_revoking_twice_changes_nothing(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        first = await revoke_api_key(session, api_key=str(customer.key.id), actor="ann")
    async with sessions.begin() as session:
        second = await revoke_api_key(session, api_key=customer.key.prefix, actor="bob")
        entries = await list_audit_entries(session)

    assert first.revoked_at is not None
    assert first == second
    assert [(entry.actor, entry.action) for entry in entries[:2]] == [
        ("ann", "api_key.revoke"),
        ("test", "api_key.create"),
    ]


async def test_references_are_names_or_ids(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "bolt")
    async with sessions() as session:
        for ref in ("acme", str(customer.organization_id)):
            assert (await find_organization(session, ref)).id == customer.organization_id
        for ref in (
            "acme/search",
            f"{customer.organization_id}/search",
            str(customer.key.project_id),
        ):
            assert (await find_project(session, ref)).id == customer.key.project_id
        assert (
            await find_project(session, "search", organization="bolt")
        ).id == other.key.project_id
        for ref in (customer.key.prefix, str(customer.key.id)):
            assert await find_api_key(session, ref) == customer.key

        for ref in ("", "nobody", "acme/search", "a\0b", "'; DROP TABLE holds", str(uuid.uuid4())):
            with pytest.raises(NotFound, match="organization"):
                await find_organization(session, ref)
        for ref in (
            "",
            "search",
            "acme/",
            "/search",
            "acme/nothing",
            "acme/search/x",
            str(uuid.uuid4()),
        ):
            with pytest.raises(NotFound):
                await find_project(session, ref)
        with pytest.raises(NotFound, match="bolt/"):
            await find_project(session, str(customer.key.project_id), organization="bolt")
        with pytest.raises(NotFound) as refusal:
            await find_api_key(session, customer.secret)

    assert customer.secret not in str(refusal.value)


async def test_lists_are_in_order_by_organization(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await new_customer(session, "aaa")
        await create_project(session, organization="acme", name="chat", actor="test")
    async with sessions.begin() as session:
        newest, _ = await create_api_key(
            session,
            organization="acme",
            project="chat",
            name="new",
            terms=KeyTerms(scopes=()),
            actor="test",
        )
    async with sessions() as session:
        organizations = (await list_organizations(session))[0]
        projects = (await list_projects(session, organization="acme"))[0]
        keys = (await list_api_keys(session, organization="acme"))[0]
        every_key = (await list_api_keys(session))[0]

    assert [organization.name for organization in organizations] == ["aaa", "acme"]
    assert [project.name for project in projects] == ["chat", "search"]
    assert keys == [newest, customer.key]
    assert newest.scopes == ("inference",)
    assert (newest.organization_name, newest.project_name) == ("acme", "chat")
    assert len(every_key) == 3


async def test_names_are_unique_also_for_two_at_once(sessions: Sessions) -> None:
    async def create() -> bool:
        try:
            async with sessions.begin() as session:
                await create_organization(session, name="acme", actor="test")
        except AlreadyExists:
            return False
        return True

    created = await asyncio.gather(*(create() for _ in range(5)))

    assert sorted(created) == [False] * 4 + [True]
    async with sessions() as session:
        assert len(await list_audit_entries(session)) == 1


async def test_bad_values_are_named(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        for name in (
            "",
            "Acme",
            "1st",
            "a" * 64,
            "a_b",
            "ä",
            "a\n",
            str(uuid.UUID(int=0xABCDEF << 104)),
            "-",
        ):
            with pytest.raises(InvalidValue, match="name"):
                await create_organization(session, name=name, actor="test")
        with pytest.raises(InvalidValue, match="currency_code"):
            await create_organization(session, name="fine", currency_code="usd", actor="test")
        for lifetime in (timedelta(0), timedelta(seconds=-1), timedelta.max):
            with pytest.raises(InvalidValue, match="lifetime"):
                await create_api_key(
                    session,
                    organization="acme",
                    project="search",
                    name="k",
                    lifetime=lifetime,
                    actor="test",
                )
        with pytest.raises(InvalidValue, match="'root' is not one of admin, billing, inf"):
            await create_api_key(
                session,
                organization="acme",
                project="search",
                name="k",
                terms=KeyTerms(scopes=("root",)),
                actor="test",
            )
        for name in ("", "k" * 101, "a\0b"):
            with pytest.raises(InvalidValue, match="name"):
                await create_api_key(
                    session, organization="acme", project="search", name=name, actor="test"
                )


async def test_the_audit_log_pages_backwards_and_cannot_be_changed(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions() as session:
        first = await list_audit_entries(session, page_size=2)
        rest = await list_audit_entries(session, page_size=2, before_entry_id=first[-1].id)
        for size in (0, 1001):
            with pytest.raises(InvalidValue, match="page_size"):
                await list_audit_entries(session, page_size=size)

    assert [entry.action for entry in (*first, *rest)] == [
        "api_key.create",
        "project.create",
        "organization.create",
    ]
    assert rest[0].before is None
    assert rest[0].after == {
        "id": str(customer.organization_id),
        "name": "acme",
        "currency_code": "USD",
        "created_at": rest[0].created_at.isoformat(),
    }


async def test_a_change_that_is_rolled_back_leaves_no_audit_entry(sessions: Sessions) -> None:
    async with sessions() as session:
        await create_organization(session, name="acme", actor="test")
        await session.rollback()

        assert list(await list_audit_entries(session)) == []
