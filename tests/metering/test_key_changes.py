"""Keys after creation: rotation, changes, revocation, repetition, audit log."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering.core import errors
from metering.core.audit import list_audit_entries
from metering.store.db import Sessions
from metering.tenants import admin_requests
from metering.tenants.admin_requests import ensure_api_key, ensure_organization, ensure_project
from metering.tenants.api_keys import (
    OVERLAP,
    find_api_key,
    list_api_keys,
    revoke_api_key,
    rotate_api_key,
    update_api_key,
)
from metering.tenants.authentication import authenticate
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import create_organization
from tests.metering.queries import execute
from tests.metering.usage import Customer


async def is_good(sessions: Sessions, secret: str) -> bool:
    """Return whether a secret leads to its key."""
    async with sessions() as session:
        try:
            await authenticate(session, secret)
        except errors.KeyInvalid:
            return False
        return True


async def pass_time(sessions: Sessions, interval: str) -> None:
    """Let the replaced secrets age."""
    await execute(
        sessions,
        "UPDATE superseded_secrets SET expires_at = expires_at - CAST(:by AS interval)",
        {"by": interval},
    )


async def test_a_rotated_key_is_the_same_key_with_two_secrets_for_a_day(
    sessions: Sessions, customer: Customer
) -> None:
    """A quota on the key counts requests with either secret."""
    async with sessions.begin() as session:
        rotated, secret, ends_at = await rotate_api_key(
            session, api_key=customer.key.prefix, actor="ann"
        )
        now = (await session.scalars(text("SELECT now()"))).one()
    async with sessions() as session:
        by_old, by_new = (
            await authenticate(session, customer.secret),
            await authenticate(session, secret),
        )
        [listed] = (await list_api_keys(session))[0]

    assert ends_at - now == OVERLAP == timedelta(hours=24)
    assert rotated.overlap_ends_at == listed.overlap_ends_at == ends_at
    assert rotated.id == customer.key.id
    assert rotated.prefix == customer.key.prefix
    assert rotated.scopes == customer.key.scopes
    assert secret.startswith(customer.key.prefix + "_")
    assert secret != customer.secret
    assert by_old.api_key_id == by_new.api_key_id == customer.key.id
    assert by_new.secret_lifetime_s is None
    assert by_old.secret_lifetime_s == pytest.approx(OVERLAP.total_seconds(), abs=60)


async def test_the_old_secret_ends_with_its_overlap(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        _, secret, _ = await rotate_api_key(
            session, api_key=customer.key.prefix, overlap=timedelta(hours=2), actor="ann"
        )

    await pass_time(sessions, "119 minutes")
    assert await is_good(sessions, customer.secret)
    await pass_time(sessions, "2 minutes")
    assert not await is_good(sessions, customer.secret)
    assert await is_good(sessions, secret)
    async with sessions() as session:
        assert (await find_api_key(session, customer.key.prefix)).overlap_ends_at is None


async def test_no_overlap_ends_old_secrets_at_once(sessions: Sessions, customer: Customer) -> None:
    """The old secret may have leaked: an earlier overlap must not keep an even older one valid."""
    secrets = [customer.secret]
    for overlap in (timedelta(days=2), timedelta(days=1), timedelta(0)):
        async with sessions.begin() as session:
            assert [await is_good(sessions, each) for each in secrets] == [True] * len(secrets)
            _, secret, _ = await rotate_api_key(
                session, api_key=customer.key.prefix, overlap=overlap, actor="ann"
            )
            secrets.append(secret)

    assert [await is_good(sessions, each) for each in secrets] == [False, False, False, True]


async def test_revoking_ends_all_secrets_for_good(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        _, secret, _ = await rotate_api_key(session, api_key=customer.key.prefix, actor="ann")
        await revoke_api_key(session, api_key=customer.key.prefix, actor="ann")

    assert not await is_good(sessions, customer.secret)
    assert not await is_good(sessions, secret)
    async with sessions.begin() as session:
        for change in (rotate_api_key, update_api_key):
            with pytest.raises(errors.KeyRevoked, match="Create another"):
                await change(session, api_key=customer.key.prefix, actor="ann")
        order = (
            await session.execute(
                text(
                    "SELECT api_key_id, request_id FROM cancel_commands"
                    " WHERE changed_key_id IS NULL"
                )
            )
        ).one()
    assert order == (customer.key.id, None)


async def test_an_expired_key_refuses_both_secrets(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        _, secret, _ = await rotate_api_key(session, api_key=customer.key.prefix, actor="ann")
        past = datetime.now(UTC) - timedelta(minutes=1)
        await update_api_key(session, api_key=customer.key.prefix, expires_at=past, actor="ann")
    assert not await is_good(sessions, customer.secret)
    assert not await is_good(sessions, secret)

    async with sessions.begin() as session:
        changed = await update_api_key(
            session, api_key=customer.key.prefix, never_expires=True, actor="ann"
        )
    assert changed.expires_at is None
    assert await is_good(sessions, secret)


async def test_two_rotations_at_once_leave_one_new_secret_and_no_lost_one(
    sessions: Sessions, customer: Customer
) -> None:
    async def rotate() -> str:
        async with sessions.begin() as session:
            return (await rotate_api_key(session, api_key=customer.key.prefix, actor="ann"))[1]

    secrets = await asyncio.gather(*(rotate() for _ in range(4)))

    assert [await is_good(sessions, each) for each in (customer.secret, *secrets)] == [True] * 5
    async with sessions() as session:
        lifetimes = [(await authenticate(session, each)).secret_lifetime_s for each in secrets]
    assert lifetimes.count(None) == 1, "one is the newest, the others are in their overlap"


async def test_unset_fields_stay_bad_ones_are_named(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        renamed = await update_api_key(
            session, api_key=customer.key.prefix, name="new", actor="ann"
        )
        narrowed = await update_api_key(
            session,
            api_key=customer.key.prefix,
            terms=lambda old: replace(old, scopes=("inference",)),
            actor="ann",
        )
        await update_api_key(
            session,
            api_key=customer.key.prefix,
            terms=lambda old: replace(old, scopes=("inference",)),
            actor="ann",
        )
        entries = await list_audit_entries(session, action_prefix="api_key.update")
        for values, wrong in (
            ({"name": ""}, "name"),
            ({"terms": lambda _: KeyTerms(scopes=("root",))}, "scopes"),
            ({"expires_at": datetime(1970, 1, 1, tzinfo=UTC)}, "expire_time"),
            (
                {"expires_at": datetime(2100, 1, 1, tzinfo=UTC), "never_expires": True},
                "never_expires",
            ),
        ):
            with pytest.raises(errors.InvalidValue, match=wrong):
                await update_api_key(session, api_key=customer.key.prefix, actor="ann", **values)
        for overlap in (timedelta(seconds=-1), timedelta(days=31)):
            with pytest.raises(errors.InvalidValue, match="overlap"):
                await rotate_api_key(
                    session, api_key=customer.key.prefix, overlap=overlap, actor="ann"
                )
        with pytest.raises(errors.NotFound):
            await rotate_api_key(session, api_key="wk_nothing0", actor="ann")

    assert (renamed.name, renamed.scopes) == ("new", customer.key.scopes)
    assert (narrowed.name, narrowed.scopes) == ("new", ("inference",))
    assert len(entries) == 2, "saying it again changed nothing"
    assert entries[0].before is not None
    assert entries[0].after is not None
    assert entries[0].before["scopes"] == ["admin", "billing", "inference"]
    assert entries[0].after["scopes"] == ["inference"]


async def test_saying_it_again_makes_nothing_new(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        organization, existed = await ensure_organization(session, name="acme", actor="ann")
        project, project_existed = await ensure_project(
            session, organization="acme", name="web", actor="ann"
        )
        key, secret, key_existed = await ensure_api_key(
            session, organization="acme", project="web", name="bot", actor="ann"
        )
    async with sessions.begin() as session:
        assert (await ensure_project(session, organization="acme", name="web", actor="ann"))[
            0
        ].id == project.id
        again = await ensure_api_key(
            session, organization="acme", project="web", name="bot", actor="ann"
        )
        with pytest.raises(errors.AlreadyExists, match="currency USD"):
            await ensure_organization(session, name="acme", currency_code="EUR", actor="ann")
        with pytest.raises(errors.AlreadyExists, match="scopes inference"):
            await ensure_api_key(
                session,
                organization="acme",
                project="web",
                name="bot",
                terms=KeyTerms(scopes=("admin",)),
                actor="ann",
            )
        await revoke_api_key(session, api_key=key.prefix, actor="ann")
        new, new_secret, _ = await ensure_api_key(
            session, organization="acme", project="web", name="bot", actor="ann"
        )

    assert organization.id == customer.organization_id
    assert existed is True
    assert project_existed is False
    assert key_existed is False
    assert again == (key, "", True)
    assert new.id != key.id
    assert new_secret not in ("", secret)


async def test_a_strict_key_is_strict_with_every_secret_until_it_is_relaxed(
    sessions: Sessions, customer: Customer
) -> None:
    prefix = customer.key.prefix
    async with sessions.begin() as session:
        await update_api_key(
            session,
            api_key=prefix,
            terms=lambda old: replace(old, strict_parameters=True),
            actor="ann",
        )
        _, secret, _ = await rotate_api_key(session, api_key=prefix, actor="ann")
        renamed = await update_api_key(session, api_key=prefix, name="new", actor="ann")
        strict = [
            (await authenticate(session, each)).terms.strict_parameters
            for each in (customer.secret, secret)
        ]
        relaxed = await update_api_key(
            session,
            api_key=prefix,
            terms=lambda old: replace(old, strict_parameters=False),
            actor="ann",
        )
        after = await authenticate(session, secret)
        entry = (await list_audit_entries(session, action_prefix="api_key.update"))[0]

    assert customer.key.strict_parameters is False, "the default"
    assert (strict, renamed.strict_parameters) == ([True, True], True)
    assert (relaxed.strict_parameters, after.terms.strict_parameters) == (False, False)
    assert entry.before is not None
    assert entry.after is not None
    assert (entry.before["strict_parameters"], entry.after["strict_parameters"]) == (True, False)


async def test_a_key_with_other_terms_is_not_found_again_and_the_term_is_named(
    sessions: Sessions, customer: Customer
) -> None:
    named: dict[str, Any] = {
        "organization": "acme",
        "project": "web",
        "name": "bot",
        "actor": "ann",
    }
    terms = KeyTerms(
        allowed_networks=("203.0.113.7", "192.0.2.0/24"),
        max_output_tokens=9,
        strict_parameters=True,
    )
    others: dict[str, tuple[dict[str, Any], str]] = {
        "strict_parameters": ({"strict_parameters": False}, "true"),
        "models": ({"models": ("demo",)}, "unset"),
        "allowed_networks": ({"allowed_networks": ()}, "192.0.2.0/24, 203.0.113.7/32"),
        "max_output_tokens": ({"max_output_tokens": 0}, "9"),
    }
    async with sessions.begin() as session:
        await ensure_project(session, organization="acme", name="web", actor="ann")
        key, _, _ = await ensure_api_key(session, **named, terms=terms)
        again, _, existed = await ensure_api_key(session, **named, terms=terms)
        for term, (other, present) in others.items():
            found = f"'bot' already exists with {term} {present}: change that with UpdateApiKey"
            with pytest.raises(errors.AlreadyExists, match=found):
                await ensure_api_key(session, **named, terms=replace(terms, **other))

    assert (again.id, existed, key.strict_parameters) == (key.id, True, True)


async def test_calls_with_one_id_make_one_thing(sessions: Sessions, customer: Customer) -> None:
    request_id = uuid.uuid4()

    async def create(payload: bytes = b"new") -> str | None:
        async with sessions.begin() as session:
            earlier = await admin_requests.earlier_subject(
                session, request_id, "CreateOrganization", payload
            )
            if earlier is None:
                made = await create_organization(session, name="once", actor="ann")
                await admin_requests.made(session, request_id, str(made.id))
            return earlier

    answers = await asyncio.gather(*(create() for _ in range(5)))

    assert answers.count(None) == 1
    assert len(set(answers) - {None}) == 1
    with pytest.raises(errors.RequestIdReused):
        await create(b"other")
    await execute(sessions, "UPDATE admin_requests SET created_at = created_at - interval '8 days'")
    with pytest.raises(errors.AlreadyExists):  # the id is forgotten, but not the name
        await create()


async def test_a_failed_calls_id_may_be_used_again(sessions: Sessions, customer: Customer) -> None:
    request_id = uuid.uuid4()
    async with sessions() as session:
        assert (
            await admin_requests.earlier_subject(session, request_id, "CreateProject", b"") is None
        )
        await session.rollback()

    async with sessions.begin() as session:
        assert (
            await admin_requests.earlier_subject(session, request_id, "CreateProject", b"") is None
        )


async def test_the_log_is_read_by_its_four_filters(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await create_organization(session, name="bolt", actor="bob")
        middle = (await session.scalars(text("SELECT now()"))).one()
    async with sessions.begin() as session:
        await rotate_api_key(session, api_key=customer.key.prefix, actor="ann")

    async with sessions() as session:

        async def actions(**values: object) -> list[str]:
            return [entry.action for entry in await list_audit_entries(session, **values)]  # type: ignore[arg-type]

        assert await actions(actor="bob") == ["organization.create"]
        assert await actions(action_prefix="api_key.") == ["api_key.rotate", "api_key.create"]
        assert await actions(subject_ids=[str(customer.key.id)]) == [
            "api_key.rotate",
            "api_key.create",
        ]
        of_project = await actions(subject_ids=[str(customer.key.project_id)])
        assert of_project == ["api_key.rotate", "api_key.create", "project.create"], (
            "what hangs on it too"
        )
        assert await actions(subject_ids=[]) == []
        assert await actions(start_at=middle + timedelta(microseconds=1)) == ["api_key.rotate"]
        assert await actions(end_at=middle) == [
            "api_key.create",
            "project.create",
            "organization.create",
        ]
        assert await actions(start_at=middle, actor="bob", action_prefix="organization") == [
            "organization.create"
        ]
        assert await actions(action_prefix="%") == []


async def test_the_log_says_when_a_secret_ends(sessions: Sessions, customer: Customer) -> None:
    for overlap in (timedelta(hours=2), timedelta(hours=1)):
        async with sessions.begin() as session:
            *_, ends_at = await rotate_api_key(
                session, api_key=customer.key.prefix, overlap=overlap, actor="ann"
            )

    async with sessions() as session:
        latest, first = await list_audit_entries(session, action_prefix="api_key.rotate")

    assert first.before is not None
    assert first.after is not None
    assert latest.after is not None
    assert first.before["replaced_secret_ends_at"] is None
    assert latest.before == first.after
    assert latest.after["replaced_secret_ends_at"] == ends_at.isoformat()
    assert not any("hash" in name for name in latest.after)


@pytest.mark.parametrize(
    "statement",
    ["UPDATE audit_log SET actor = 'me'", "DELETE FROM audit_log", "TRUNCATE audit_log CASCADE"],
)
async def test_the_log_cannot_be_rewritten(
    sessions: Sessions, customer: Customer, statement: str
) -> None:
    async with sessions() as session:
        with pytest.raises(DBAPIError, match="append-only"):
            await session.execute(text(statement))
