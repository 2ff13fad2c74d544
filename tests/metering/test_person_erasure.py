"""Erasure of a person: nothing that describes it is left, and nothing that refers to it is lost."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering.core.errors import InvalidValue, KeyInvalid, LastOwner, NotFound
from metering.store.db import Sessions
from metering.tenants.api_keys import KeyOwner, create_api_key
from metering.tenants.authentication import authenticate
from metering.tenants.invitations import invite
from metering.tenants.members import deactivate_person, find_person, reactivate_person
from metering.tenants.person_erasure import erase_person
from metering.tenants.provisioning import create_user, delete_user
from metering.tenants.sign_in import (
    Identity,
    SessionTerms,
    begin_session,
    create_link,
    identify,
    signed_in,
)
from metering.tenants.tenants import create_organization, create_project
from tests.metering.test_members import WITHIN, joined
from tests.metering.test_provisioning import ANN, BOB, member, terms
from tests.metering.usage import Customer

HOUR = SessionTerms(timedelta(hours=1), timedelta(hours=1))
NAME, SUBJECT = "Annabel Lee", "subject-of-ann"
TABLES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = 'public' AND table_type = 'BASE TABLE'
"""


async def tables_with(sessions: Sessions, *words: str) -> set[tuple[str, str]]:
    """Return which tables contain which words."""
    found = set()
    async with sessions() as session:
        for name in list(await session.scalars(text(TABLES))):
            rows = list(await session.scalars(text(f"SELECT t::text FROM public.{name} t")))
            content = "".join(rows).lower()
            found |= {(name, word) for word in words if word.lower() in content}
    return found


async def ann_of(sessions: Sessions, customer: Customer) -> uuid.UUID:
    """Create a person with everything that a person can have, in two organizations."""
    async with sessions.begin() as session:
        await joined(session, BOB, "owner")
        await create_organization(session, name="bolt", actor="test")
        await create_project(session, organization="bolt", name="main", actor="test")
        made = await joined(session, ANN, "admin", create_key=True, display_name=NAME)
        await joined(session, ANN, "viewer", organization="bolt")
        person = await identify(session, Identity("corp", "https://idp", SUBJECT, ANN), ())
        await begin_session(session, person.id, HOUR, address="192.0.2.77")
        await create_link(session, person, actor="test")
        await create_organization(session, name="cask", actor="test")
        await create_project(session, organization="cask", name="main", actor="test")
        await invite(session, organization="cask", email=ANN, role="viewer", actor="test")
        provider = customer.organization_id
        user = await create_user(session, provider, terms(ANN, displayName=NAME), "wk_provider")
        await delete_user(session, provider, user.id, lambda _: None, "wk_provider")
        await create_user(session, provider, terms(ANN, displayName=NAME), "wk_provider")
        await joined(session, ANN, "admin")
        await create_api_key(
            session, **WITHIN, name="program", owner=KeyOwner(creator_id=person.id)
        )
        assert made.secret
        return person.id


async def test_nothing_describes_an_erased_person(
    sessions: Sessions, application: Sessions, customer: Customer
) -> None:
    person_id = await ann_of(sessions, customer)
    words = (ANN, NAME, SUBJECT, "192.0.2.77")
    assert {word for _, word in await tables_with(sessions, *words)} == set(words)
    async with sessions() as session:
        count = await session.scalar(text("SELECT count(*) FROM audit_log"))

    async with application.begin() as session:
        erased = await erase_person(session, person=ANN, actor="operator")

    assert await tables_with(sessions, *words) == set()
    assert erased.person_id == person_id
    assert sorted(erased.organizations) == ["acme", "bolt"]
    assert (erased.session_count, erased.invitation_count) == (1, 4)
    assert erased.provisioned_user_count == 1
    assert erased.audit_entry_count > 10
    async with sessions() as session:
        of_person = text("SELECT count(*) FROM audit_log WHERE subject_id = :id")
        assert await session.scalar(of_person, {"id": str(person_id)}), "the trail stays"
        assert await session.scalar(text("SELECT count(*) FROM audit_log")) > count
        owned = text("SELECT count(*) FROM api_key_owners WHERE creator_id = :id")
        assert await session.scalar(owned, {"id": person_id})
        found = await find_person(session, str(person_id))
        assert (found.email, found.display_name) == (f"{person_id}@erased.invalid", "erased")
        for table in ("sign_in_sessions", "sign_in_links", "scim_users"):
            assert await session.scalar(text(f"SELECT count(*) FROM {table}")) == 0

    async with application.begin() as session:
        again = await erase_person(session, person=str(person_id), actor="operator")
        with pytest.raises(NotFound):
            await erase_person(session, person=ANN, actor="operator")
        with pytest.raises(InvalidValue, match="erased for ever"):
            await reactivate_person(session, person=str(person_id), actor="operator")
    assert (again.organizations, again.key_count, again.audit_entry_count) == ([], 0, 0)


async def test_the_address_of_an_erased_person_is_free_for_another(
    sessions: Sessions, customer: Customer
) -> None:
    person_id = await ann_of(sessions, customer)
    async with sessions.begin() as session:
        await erase_person(session, person=ANN, actor="operator")
        other = await joined(session, ANN, "viewer", create_key=True)
        assert other.member.person_id != person_id
        again = await identify(session, Identity("corp", "https://idp", "other", ANN), ())
        assert again.id == other.member.person_id


async def test_keys_and_sessions_of_an_erased_person_end(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        made = await joined(session, ANN, "viewer", create_key=True)
        secret = await begin_session(session, made.member.person_id, HOUR)
        erased = await erase_person(session, person=ANN, actor="operator")
        assert erased.key_count == 2
        with pytest.raises(KeyInvalid):
            await authenticate(session, made.secret)
        with pytest.raises(KeyInvalid):
            await signed_in(session, secret)


async def test_the_last_owner_is_not_erased(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await joined(session, ANN, "owner", display_name=NAME)
    with pytest.raises(LastOwner):
        async with sessions.begin() as session:
            await erase_person(session, person=ANN, actor="operator")
    assert (await member(sessions, ANN)).display_name == NAME


FORBIDDEN: dict[str, Any] = {
    "a person that is not erased": "UPDATE audit_log SET after = without_person(after)"
    " WHERE after ->> 'email' = 'bob@example.com'",
    "more than words": "UPDATE audit_log SET after = without_person(after) || '{\"id\": 1}'"
    " WHERE action = 'person.erase' OR subject_id IN (SELECT id::text FROM persons)",
    "another column": "UPDATE audit_log SET before = without_person(before), actor_role = 'x'",
    "an entry": "DELETE FROM audit_log",
}


@pytest.mark.parametrize("statement", FORBIDDEN)
async def test_the_log_loses_nothing_else(
    sessions: Sessions, customer: Customer, statement: str
) -> None:
    await ann_of(sessions, customer)
    async with sessions.begin() as session:
        await erase_person(session, person=ANN, actor="operator")
    with pytest.raises(DBAPIError, match="append-only"):
        async with sessions.begin() as session:
            await session.execute(text(FORBIDDEN[statement]))


async def test_a_deactivated_person_can_be_erased(sessions: Sessions, customer: Customer) -> None:
    await ann_of(sessions, customer)
    async with sessions.begin() as session:
        await deactivate_person(session, person=ANN, actor="operator")
    async with sessions.begin() as session:
        await erase_person(session, person=ANN, actor="operator")
    assert await tables_with(sessions, ANN, NAME) == set()
