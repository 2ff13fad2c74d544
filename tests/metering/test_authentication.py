"""Invalid secrets: the same answer at the same cost, whatever the reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, func, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.configuration.configuration import present_state
from metering.core.errors import InvalidValue, KeyInvalid
from metering.core.models import ApiKey, Person
from metering.store.db import Sessions
from metering.tenants.admin_requests import ensure_api_key
from metering.tenants.api_keys import (
    KeyOwner,
    KeyRecord,
    create_api_key,
    list_api_keys,
    revoke_api_key,
    rotate_api_key,
    update_api_key,
)
from metering.tenants.authentication import authenticate, authenticate_bound, new_secret
from metering.tenants.key_terms import KeyTerms
from metering.tenants.suspensions import suspend_organization
from metering.tenants.tenants import create_organization, create_project
from tests.metering.usage import Customer


@pytest.fixture
async def secrets(sessions: Sessions) -> dict[str, str]:
    """Create one secret of each kind."""
    async with sessions.begin() as session:
        await create_organization(session, name="acme", actor="test")
        await create_project(session, organization="acme", name="main", actor="test")
        made = {}
        for name in ("good", "revoked", "expired", "replaced"):
            key, secret = await create_api_key(
                session, organization="acme", project="main", name=name, actor="test"
            )
            made[name] = secret
            if name == "revoked":
                await revoke_api_key(session, api_key=str(key.id), actor="test")
            elif name == "expired":
                ended = func.now() - timedelta(hours=1)
                await session.execute(
                    update(ApiKey).where(ApiKey.id == key.id).values(expires_at=ended)
                )
            elif name == "replaced":
                await rotate_api_key(
                    session, api_key=str(key.id), overlap=timedelta(0), actor="test"
                )
    prefix = made["good"][:11]
    return made | {"of a known prefix": new_secret(prefix), "unknown": new_secret()}


async def test_every_secret_is_answered_by_the_same_statement_and_the_same_words(
    sessions: Sessions, secrets: dict[str, str]
) -> None:
    seen: list[str] = []
    reported: dict[str, str] = {}
    async with sessions() as session:
        engine: Any = (await session.connection()).engine

        @event.listens_for(engine.sync_engine, "before_cursor_execute")
        def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            seen.append(statement)

        statements = {}
        for name, secret in secrets.items():
            seen.clear()
            try:
                await authenticate(session, secret)
            except KeyInvalid as refusal:
                reported[name] = str(refusal)
            statements[name] = tuple(seen)
        event.remove(engine.sync_engine, "before_cursor_execute", note)

    assert reported.keys() == secrets.keys() - {"good"}
    assert len(set(reported.values())) == 1
    assert len(set(statements.values())) == 1
    assert [len(each) for each in statements.values()] == [1] * len(secrets)


async def bound_key(session: AsyncSession, **terms: Any) -> KeyRecord:
    """Create a bound key in the project of the customer."""
    key, secret = await create_api_key(
        session,
        organization="acme",
        project="search",
        name="bound",
        terms=KeyTerms(**terms),
        is_bound=True,
        actor="test",
    )
    assert secret == ""
    return key


async def test_a_bound_key_acts_with_its_terms_and_no_secret_authenticates_it(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        key = await bound_key(session, role="owner", allowed_networks=("192.0.2.0/24",))

    async with sessions() as session:
        principal = await authenticate_bound(session, key.id)
        [listed] = (await list_api_keys(session, api_key=key.prefix))[0]
        for secret in (new_secret(key.prefix), new_secret(), ""):
            with pytest.raises(KeyInvalid):
                await authenticate(session, secret)
        with pytest.raises(KeyInvalid):
            await authenticate_bound(session, customer.key.id)  # it has a secret

    assert (principal.api_key_id, principal.organization_id) == (key.id, customer.organization_id)
    assert principal.scopes == {"role:owner"}
    assert principal.terms.allowed_networks == ("192.0.2.0/24",)
    assert principal.secret_hash == b""
    assert listed.is_bound


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_a_bound_key_ends_like_others(
    sessions: Sessions, customer: Customer, end: str
) -> None:
    async with sessions.begin() as session:
        key = await bound_key(session)
        before = await authenticate_bound(session, key.id)
        if end == "revoked":
            await revoke_api_key(session, api_key=key.prefix, actor="test")
        else:
            past = datetime.now(UTC) - timedelta(days=1)
            await update_api_key(session, api_key=key.prefix, expires_at=past, actor="test")
        with pytest.raises(KeyInvalid, match="Ask an administrator of the organization"):
            await authenticate_bound(session, key.id)

    assert before.secret_lifetime_s is None


async def test_a_bound_key_is_suspended_with_its_organization(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        key = await bound_key(session)
        await suspend_organization(session, organization="acme", reason="unpaid", actor="test")

        principal = await authenticate_bound(session, key.id)

    assert principal.suspended is not None
    assert principal.suspended.reason == "unpaid"


async def test_a_bound_key_has_no_secret_to_replace(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        key = await bound_key(session)
        with pytest.raises(InvalidValue, match="has no secret"):
            await rotate_api_key(session, api_key=key.prefix, actor="test")


async def test_a_bound_key_is_not_found_by_name(sessions: Sessions, customer: Customer) -> None:
    """A script that ensures a key of the name gets one with a secret; a file does not export it."""
    async with sessions.begin() as session:
        key = await bound_key(session)

        made, secret, existed = await ensure_api_key(
            session, organization="acme", project="search", name="bound", actor="test"
        )
        exported = await present_state(session, organization="acme")

    assert (made.id != key.id, bool(secret), existed) == (True, True, False)
    [project] = exported.organizations[0].projects
    assert sorted(each.name for each in project.keys) == sorted([customer.key.name, "bound"])


async def test_keys_of_a_deactivated_person_are_refused(
    sessions: Sessions, customer: Customer
) -> None:
    """Both its bound keys and those with a secret, while others go on."""
    async with sessions.begin() as session:
        person = Person(email="ann@example.com", display_name="Ann")
        session.add(person)
        await session.flush()
        owner = KeyOwner(person_id=person.id, creator_id=person.id)
        within: dict[str, Any] = {"organization": "acme", "project": "search", "actor": "test"}
        bound, _ = await create_api_key(session, **within, name="b", is_bound=True, owner=owner)
        _, secret = await create_api_key(session, **within, name="s", owner=owner)
        assert (await authenticate_bound(session, bound.id)).person_id == person.id
        assert (await authenticate(session, secret)).person_id == person.id
        assert (await authenticate(session, customer.secret)).person_id is None

        await session.execute(update(Person).values(deactivated_at=func.now()))

        for refused in (authenticate_bound(session, bound.id), authenticate(session, secret)):
            with pytest.raises(KeyInvalid):
                await refused
        assert (await authenticate(session, customer.secret)).api_key_id == customer.key.id
