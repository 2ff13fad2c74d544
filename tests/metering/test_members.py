"""Members and invitations: roles and keys, the last owner, tokens, and races."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import list_audit_entries
from metering.core.errors import (
    AlreadyExists,
    InvalidValue,
    InvitationInvalid,
    KeyInvalid,
    LastOwner,
    MeteringError,
    NotFound,
)
from metering.store.border import Actor, acting
from metering.store.db import Sessions
from metering.tenants.api_keys import (
    KeyOwner,
    create_api_key,
    find_api_key,
    revoke_api_key,
    update_api_key,
)
from metering.tenants.authentication import authenticate, authenticate_bound
from metering.tenants.invitations import (
    Accepted,
    accept_invitation,
    invite,
    list_invitations,
    resend_invitation,
    revoke_invitation,
)
from metering.tenants.key_terms import KeyTerms
from metering.tenants.members import (
    MEMBER_ROLES,
    MemberRecord,
    bound_key_of,
    change_role,
    deactivate_person,
    find_member,
    list_members,
    list_persons,
    reactivate_person,
    remove_member,
)
from metering.tenants.service_accounts import (
    change_service_account,
    create_service_account,
    delete_service_account,
    list_service_accounts,
)
from metering.tenants.tenants import create_organization, create_project
from tests.metering.usage import Customer

WITHIN: dict[str, Any] = {"organization": "acme", "project": "search", "actor": "test"}
ANN, BOB = "ann@example.com", "bob@example.com"


async def joined(
    session: AsyncSession, email: str, role: str, organization: str = "acme", **options: Any
) -> Accepted:
    """Invite a person and accept."""
    _, token = await invite(
        session, organization=organization, email=email, role=role, actor="test"
    )
    return await accept_invitation(session, token=token, **options)


async def member(session: AsyncSession, email: str, role: str) -> MemberRecord:
    return (await joined(session, email, role)).member


async def token_for(sessions: Sessions, email: str = ANN, **options: Any) -> str:
    async with sessions.begin() as session:
        values = {"organization": "acme", "role": "viewer", "actor": "test"} | options
        return (await invite(session, email=email, **values))[1]


async def outcomes(*attempts: Awaitable[object]) -> list[object]:
    """Run transactions at once; return the results and the errors of metering."""
    found = await asyncio.gather(*attempts, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, MeteringError):
            raise each
    return list(found)


async def in_transaction(
    sessions: Sessions, act: Callable[..., Awaitable[object]], *arguments: Any, **named: Any
) -> object:
    async with sessions.begin() as session:
        return await act(session, *arguments, **named)


@pytest.mark.parametrize("role", MEMBER_ROLES)
async def test_a_member_acts_with_a_bound_key_of_its_role(
    sessions: Sessions, customer: Customer, role: str
) -> None:
    async with sessions.begin() as session:
        made = await member(session, " Ann@Example.com ", role)
        key_id = await bound_key_of(
            session, person_id=made.person_id, organization_id=customer.organization_id
        )
        assert key_id is not None
        principal = await authenticate_bound(session, key_id)

    expected = {"admin"} if role == "operator" else {f"role:{role}"}
    assert principal.scopes - {"inference"} == expected
    assert ("inference" in principal.scopes) == (role in ("owner", "admin", "developer"))
    assert (principal.person_id, made.email, made.role) == (made.person_id, ANN, role)


async def test_a_token_is_used_once_and_never_stored(
    sessions: Sessions, customer: Customer
) -> None:
    token = await token_for(sessions)
    results = await outcomes(
        *(in_transaction(sessions, accept_invitation, token=token) for _ in range(5))
    )

    assert [type(each) for each in results].count(InvitationInvalid) == 4
    async with sessions() as session:
        members, _ = await list_members(session, organization="acme")
        log = await session.scalar(
            text("SELECT string_agg(to_jsonb(a)::text, '') FROM audit_log a")
        )
        stored = await session.scalar(text("SELECT string_agg(i::text, '') FROM invitations i"))
    assert [each.email for each in members] == [ANN]
    assert token not in str(log) + str(stored)
    assert "token_hash" not in str(log)


@pytest.mark.parametrize(
    "end", ["expired", "revoked", "resent", "accepted", "unknown", "malformed"]
)
async def test_unusable_tokens_are_refused_alike(
    sessions: Sessions, customer: Customer, end: str
) -> None:
    token = await token_for(sessions)
    async with sessions.begin() as session:
        [[pending], _] = await list_invitations(session, organization="acme")
        ref = str(pending.invitation_id)
        match end:
            case "expired":
                await session.execute(text("UPDATE invitations SET expires_at = now()"))
            case "revoked":
                await revoke_invitation(session, invitation=ref, actor="test")
            case "resent":
                _, newer = await resend_invitation(session, invitation=ref, actor="test")
            case "accepted":
                await accept_invitation(session, token=token)
            case "unknown":
                token = token[:-1] + ("A" if token[-1] != "A" else "B")
            case _:
                token = "wi_'; DROP TABLE persons"

    for _ in range(2):
        with pytest.raises(InvitationInvalid) as refused:
            await in_transaction(sessions, accept_invitation, token=token)
        assert str(refused.value) == str(InvitationInvalid())
    if end == "resent":
        assert isinstance(await in_transaction(sessions, accept_invitation, token=newer), Accepted)


async def test_an_invitation_that_expires_while_its_acceptance_waits_is_refused(
    sessions: Sessions, customer: Customer
) -> None:
    token = await token_for(sessions, lifetime=timedelta(milliseconds=300))
    async with sessions.begin() as session:
        await session.execute(text("SELECT FROM organizations FOR NO KEY UPDATE"))
        waiting = asyncio.create_task(in_transaction(sessions, accept_invitation, token=token))
        await asyncio.sleep(0.5)  # beyond the lifetime, whether it waits for the lock or not yet

    with pytest.raises(InvitationInvalid):
        await waiting


async def test_inviting_twice_at_once_leaves_one_invitation(
    sessions: Sessions, customer: Customer
) -> None:
    one = {"organization": "acme", "email": ANN, "role": "viewer", "actor": "test"}
    results = await outcomes(*(in_transaction(sessions, invite, **one) for _ in range(4)))

    assert [type(each) for each in results].count(AlreadyExists) == 3
    async with sessions.begin() as session:
        await session.execute(text("UPDATE invitations SET expires_at = now()"))
    assert isinstance(await in_transaction(sessions, invite, **one), tuple), (
        "the expired one is replaced"
    )


async def test_an_invitation_does_not_reveal_known_persons(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        await create_organization(session, name="bolt", actor="test")
        await create_project(session, organization="bolt", name="main", actor="test")
        await joined(session, ANN, "owner", organization="bolt", display_name="Ann of Bolt")
    of_acme = acting(sessions, Actor("owner", customer.organization_id, is_bound=True))

    async with of_acme.begin() as session:
        for email in (ANN, "nobody@example.com"):
            made, _ = await invite(
                session, organization="acme", email=email, role="viewer", actor="test"
            )
            assert (made.email, made.role, made.organization_name) == (email, "viewer", "acme")
            with pytest.raises(NotFound):
                await find_member(session, "acme", email)
        assert (await list_persons(session))[0] == [], "persons of others are beyond the border"


async def test_the_presenter_of_a_token_does_not_rename_a_known_person(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        await create_organization(session, name="bolt", actor="test")
        await create_project(session, organization="bolt", name="main", actor="test")
        await joined(session, ANN, "owner", organization="bolt", display_name="Ann")

        again = await joined(session, ANN, "viewer", display_name="Mallory")

        assert again.member.display_name == "Ann"
        assert len((await list_persons(session))[0]) == 1


async def owners(session: AsyncSession, *emails: str) -> None:
    for email in emails:
        await member(session, email, "owner")


LEAVING: dict[str, Callable[[AsyncSession, str], Awaitable[object]]] = {
    "demoted": lambda session, email: change_role(
        session, organization="acme", member=email, role="admin", actor="test"
    ),
    "removed": lambda session, email: remove_member(
        session, organization="acme", member=email, actor="test"
    ),
    "deactivated": lambda session, email: deactivate_person(session, person=email, actor="test"),
}


@pytest.mark.parametrize("way", LEAVING)
async def test_the_last_owner_stays(sessions: Sessions, customer: Customer, way: str) -> None:
    async with sessions.begin() as session:
        await owners(session, ANN, BOB)
        await LEAVING[way](session, ANN)
    with pytest.raises(LastOwner, match="Make another member owner first"):
        await in_transaction(sessions, LEAVING[way], BOB)

    async with sessions.begin() as session:
        assert (await find_member(session, "acme", BOB)).role == "owner"
        await reactivate_person(session, person=ANN, actor="test")
        await owners(session, "cat@example.com")
        await LEAVING[way](session, BOB)


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize("other", LEAVING)
async def test_two_owners_cannot_leave_at_once(
    sessions: Sessions, customer: Customer, way: str, other: str
) -> None:
    async with sessions.begin() as session:
        await owners(session, ANN, BOB)

    results = await outcomes(
        in_transaction(sessions, LEAVING[way], ANN), in_transaction(sessions, LEAVING[other], BOB)
    )

    assert [type(each) for each in results].count(LastOwner) == 1


async def test_a_membership_key_changes_with_the_member_only(
    sessions: Sessions, customer: Customer
) -> None:
    """Otherwise the last owner could be revoked or demoted as a key."""
    async with sessions.begin() as session:
        made = await member(session, ANN, "owner")
        key = made.key_prefix
        with pytest.raises(InvalidValue, match="change or remove the member"):
            await revoke_api_key(session, api_key=key, actor="test")
        with pytest.raises(InvalidValue, match="change or remove the member"):
            await update_api_key(session, api_key=key, never_expires=True, actor="test")
        with pytest.raises(InvalidValue, match="change that of the member"):
            await update_api_key(
                session, api_key=key, terms=lambda _: KeyTerms(role="viewer"), actor="test"
            )
        narrowed = await update_api_key(
            session,
            api_key=key,
            terms=lambda _: KeyTerms(("inference",), role="owner", models=("demo",)),
            actor="test",
        )

    assert narrowed.models == ("demo",)


async def test_a_role_reaches_all_own_keys(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await owners(session, BOB)
        ann = await joined(session, ANN, "owner", create_key=True)
        mine = KeyOwner(person_id=ann.member.person_id, creator_id=ann.member.person_id)
        await create_project(session, organization="acme", name="other", actor="test")
        _, models = await create_api_key(session, **WITHIN, name="models", owner=mine)
        _, elsewhere = await create_api_key(
            session,
            **WITHIN | {"project": "other"},
            name="elsewhere",
            terms=KeyTerms(role="owner"),
            owner=mine,
        )

        await change_role(session, organization="acme", member=ANN, role="developer", actor="test")

        assert (await authenticate(session, ann.secret)).terms.role == "developer"
        assert (await authenticate_bound(session, ann.member.api_key_id)).terms.role == "developer"
        assert (await authenticate(session, models)).scopes == {"inference"}
        with pytest.raises(KeyInvalid):  # a developer has one project
            await authenticate(session, elsewhere)


@pytest.mark.parametrize("revoke", [True, False])
async def test_a_removal_ends_own_keys_and_asks_about_created_ones(
    sessions: Sessions, customer: Customer, revoke: bool
) -> None:
    async with sessions.begin() as session:
        ann = await joined(session, ANN, "admin", create_key=True)
        account = await create_service_account(
            session, organization="acme", name="ci", actor="test"
        )
        by_ann = KeyOwner(creator_id=ann.member.person_id)
        made, secret = await create_api_key(session, **WITHIN, name="program", owner=by_ann)
        owned = KeyOwner(
            service_account_id=account.service_account_id, creator_id=ann.member.person_id
        )
        _, of_account = await create_api_key(session, **WITHIN, name="ci", owner=owned)
        leave: dict[str, Any] = {"organization": "acme", "member": ANN, "actor": "test"}
        with pytest.raises(InvalidValue, match=f"created keys that are active: .*{made.prefix}"):
            await remove_member(session, **leave)

        removal = await remove_member(session, **leave, revoke_keys=revoke)

        for ended in (authenticate(session, ann.secret), revoked(session, ann.member.api_key_id)):
            with pytest.raises(KeyInvalid):
                await ended
        for each in (secret, of_account):
            if revoke:
                with pytest.raises(KeyInvalid):
                    await authenticate(session, each)
            else:
                await authenticate(session, each)
        assert len(removal.revoked) == (4 if revoke else 2)
        assert len(removal.kept) == (0 if revoke else 2)
        assert (
            await bound_key_of(
                session, person_id=ann.member.person_id, organization_id=customer.organization_id
            )
            is None
        )
        again = await joined(session, ANN, "viewer")
        assert again.member.api_key_id != ann.member.api_key_id


async def revoked(session: AsyncSession, key_id: uuid.UUID) -> None:
    await authenticate_bound(session, key_id)


async def test_a_deactivated_person_is_out_everywhere_and_comes_back_as_before(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        await create_organization(session, name="bolt", actor="test")
        await create_project(session, organization="bolt", name="main", actor="test")
        here = await joined(session, ANN, "viewer", create_key=True)
        there = await joined(session, ANN, "viewer", organization="bolt")
        await session.execute(text("DELETE FROM cancel_commands"))

        await deactivate_person(session, person=ANN, actor="test")

        for ended in (
            authenticate(session, here.secret),
            authenticate_bound(session, here.member.api_key_id),
            authenticate_bound(session, there.member.api_key_id),
        ):
            with pytest.raises(KeyInvalid):
                await ended
        commands = await session.scalar(text("SELECT count(api_key_id) FROM cancel_commands"))
        assert commands == 3, "every server forgets the keys and ends their requests"
        await reactivate_person(session, person=ANN, actor="test")
        await authenticate(session, here.secret)
        await authenticate_bound(session, there.member.api_key_id)


async def test_a_service_account_outlives_its_creator_and_ends_with_its_keys(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        account = await create_service_account(
            session, organization="acme", name="ci", role="admin", actor="test"
        )
        owner = KeyOwner(service_account_id=account.service_account_id)
        key, secret = await create_api_key(
            session, **WITHIN, name="ci", terms=KeyTerms(role="admin"), owner=owner
        )
        with pytest.raises(InvalidValue, match="service account"):
            await update_api_key(
                session, api_key=key.prefix, terms=lambda _: KeyTerms(role="owner"), actor="test"
            )
        with pytest.raises(AlreadyExists):
            await create_service_account(session, organization="acme", name="ci", actor="test")
        named = {"organization": "acme", "service_account": "ci", "actor": "test"}
        for role, scopes in (("viewer", {"role:viewer"}), ("", {"inference"})):
            changed = await change_service_account(session, **named, role=role)
            assert (changed.role, changed.key_count) == (role, 1)
            assert (await authenticate(session, secret)).scopes == scopes

        assert await delete_service_account(session, **named) == 1

        with pytest.raises(KeyInvalid):
            await authenticate(session, secret)
        assert (await list_service_accounts(session, organization="acme"))[0] == []
        await create_service_account(session, organization="acme", name="ci", actor="test")


async def test_every_change_has_an_entry_with_both_states(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        await owners(session, BOB)
        _, token = await invite(
            session, organization="acme", email=ANN, role="viewer", actor="test"
        )
        [[pending], _] = await list_invitations(session, organization="acme")
        _, token = await resend_invitation(
            session, invitation=str(pending.invitation_id), actor="test"
        )
        made = (await accept_invitation(session, token=token)).member
        await change_role(session, organization="acme", member=ANN, role="admin", actor="test")
        await deactivate_person(session, person=ANN, actor="test")
        await reactivate_person(session, person=ANN, actor="test")
        await remove_member(session, organization="acme", member=ANN, actor="test")
        entries = await list_audit_entries(session)

    of_members = [each for each in reversed(entries) if not each.action.startswith("api_key.")]
    by_action = {each.action: each for each in of_members}
    changes = {
        action: {
            name
            for name in {*(each.before or {}), *(each.after or {})}
            if (each.before or {}).get(name) != (each.after or {}).get(name)
        }
        for action, each in by_action.items()
        if each.before is not None
    }
    assert changes == {
        "invitation.resend": {"expires_at"},
        "invitation.accept": {"accepted_at", "person_id"},
        "member.update": {"role"},
        "member.remove": {"removed_at"},
        "person.deactivate": {"deactivated_at"},
        "person.reactivate": {"deactivated_at"},
    }
    assert by_action["invitation.accept"].actor == made.key_prefix
    assert by_action["member.update"].before == {
        "person_id": str(made.person_id),
        "organization_id": str(customer.organization_id),
        "role": "viewer",
    }


async def test_members_are_listed_by_pages_and_found_by_their_beginning(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        for name in ("eva", "bob", "ann", "bo", "dan"):
            await member(session, f"{name}@example.com", "viewer")
        found: list[str] = []
        token = ""
        while token or not found:
            page, token = await list_members(
                session, organization="acme", page_size=2, page_token=token
            )
            found += [each.email for each in page]
            assert len(page) <= 2
        begins = (await list_members(session, organization="acme", search="BO"))[0]

    assert found == sorted(f"{name}@example.com" for name in ("ann", "bo", "bob", "dan", "eva"))
    assert [each.email for each in begins] == ["bo@example.com", "bob@example.com"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("email", "nobody"),
        ("email", "a@b\0.example"),
        ("role", "god"),
        ("lifetime", timedelta(days=31)),
        ("lifetime", timedelta(0)),
    ],
)
async def test_an_invalid_invitation_names_its_field(
    sessions: Sessions, customer: Customer, field: str, value: object
) -> None:
    values = {"organization": "acme", "email": ANN, "role": "viewer", field: value}
    async with sessions.begin() as session:
        with pytest.raises(InvalidValue) as refused:
            await invite(session, **values, actor="test")  # type: ignore[arg-type]
        assert refused.value.field == field
        assert (await list_invitations(session, organization="acme"))[0] == []


async def test_a_created_key_names_owner_and_creator(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        ann = await joined(session, ANN, "developer", create_key=True)
        key = await find_api_key(session, ann.secret[:11])

    assert key.owner == KeyOwner(ann.member.person_id, None, ann.member.person_id)
    assert not key.is_bound
