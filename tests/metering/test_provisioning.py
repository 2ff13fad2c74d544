"""Provisioned users and groups: roles, suspension, admission of persons, and the border."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import AlreadyExists, InvalidValue, KeyInvalid, LastOwner, NotFound
from metering.core.models import AuditEntry, ScimGroup, ScimUser
from metering.store.border import Actor, acting
from metering.store.db import Sessions
from metering.tenants.authentication import authenticate, authenticate_bound
from metering.tenants.members import MemberRecord, find_member, find_person, list_members
from metering.tenants.provisioning import (
    GroupTerms,
    MemberChange,
    UserTerms,
    create_group,
    create_user,
    delete_group,
    delete_user,
    find_user,
    list_groups,
    list_users,
    set_group_role,
    terms_of_user,
    update_group,
    update_user,
)
from metering.tenants.scim_filters import FilterInvalid, parse_filter, to_sql
from metering.tenants.sign_in import Identity, Refusal, SignInRefused, identify
from metering.tenants.tenants import create_organization, create_project
from tests.metering.test_members import joined
from tests.metering.usage import Customer

Terms = TypeVar("Terms")
ANN, BOB = "ann@example.com", "bob@example.com"
ISSUER = "https://login.example.com"
ACTOR = "wk_provider"


def terms(address: str, *, is_active: bool = True, **attributes: Any) -> UserTerms:
    emails = [{"value": address, "type": "work", "primary": True}]
    return UserTerms(address, None, is_active, {"emails": emails} | attributes)


def to(wanted: Terms) -> Callable[[object], Awaitable[Terms]]:
    """Return a change that has these terms as its result."""

    async def changed(_: object) -> Terms:
        return wanted

    return changed


class Provider:
    """Identity provider of an organization, with transactions of its key."""

    def __init__(self, sessions: Sessions, organization_id: uuid.UUID) -> None:
        self.organization_id = organization_id
        self.sessions = acting(sessions, Actor("scim", organization_id, is_bound=True))

    async def act(self, act: Callable[..., Any], *arguments: Any) -> Any:
        async with self.sessions.begin() as session:
            return await act(session, self.organization_id, *arguments, ACTOR)

    async def user(self, address: str, **options: Any) -> ScimUser:
        made: ScimUser = await self.act(create_user, terms(address, **options))
        return made

    async def activate(self, user: ScimUser, *, is_active: bool) -> None:
        wanted = replace(terms_of_user(user), is_active=is_active)
        await self.act(update_user, user.id, to(wanted))

    async def group(self, name: str, *users: ScimUser) -> uuid.UUID:
        ids = frozenset(str(each.id) for each in users)
        made = await self.act(create_group, GroupTerms(name, None, [MemberChange("add", ids)]))
        found: uuid.UUID = made.id
        return found

    async def change(self, group_id: uuid.UUID, *changes: MemberChange) -> None:
        async def changed(group: ScimGroup) -> GroupTerms:
            return GroupTerms(group.display_name, None, changes)

        await self.act(update_group, group_id, changed)


@pytest.fixture
def provider(application: Sessions, customer: Customer) -> Provider:
    return Provider(application, customer.organization_id)


async def role(sessions: Sessions, group: str, role: str, project: str = "") -> None:
    async with sessions.begin() as session:
        await set_group_role(
            session, organization="acme", group=group, role=role, project=project, actor="test"
        )


async def sign_in(sessions: Sessions, address: str, subject: str = "1") -> uuid.UUID:
    identity = Identity("corp", ISSUER, subject, address, "Name of the provider")
    async with sessions.begin() as session:
        return (await identify(session, identity, ())).id


async def member(sessions: Sessions, address: str, organization: str = "acme") -> MemberRecord:
    async with sessions() as session:
        return await find_member(session, organization, address)


async def test_a_person_becomes_a_member_by_its_groups_once_it_signs_in(
    sessions: Sessions, provider: Provider
) -> None:
    await role(sessions, "Engineers", "developer")
    ann = await provider.user("Ann@Example.com")
    with pytest.raises(SignInRefused) as refused:
        await sign_in(sessions, ANN)
    assert refused.value.why is Refusal.NOT_A_MEMBER
    group = await provider.group("engineers", ann)
    with pytest.raises(NotFound):
        await member(sessions, ANN)

    await sign_in(sessions, ANN)

    found = await member(sessions, ANN)
    assert (found.role, found.display_name) == ("developer", "Name of the provider")
    await role(sessions, "ENGINEERS", "viewer")
    assert (await member(sessions, ANN)).role == "viewer"
    await provider.change(group, MemberChange("remove", frozenset({str(ann.id)})))
    with pytest.raises(NotFound):
        await member(sessions, ANN)
    await provider.change(group, MemberChange("add", frozenset({str(ann.id)})))
    assert (await member(sessions, ANN)).membership_id != found.membership_id


async def test_the_widest_role_of_several_groups_counts(
    sessions: Sessions, provider: Provider
) -> None:
    await role(sessions, "a", "viewer")
    await role(sessions, "b", "admin")
    ann = await provider.user(ANN)
    _, b, c = [await provider.group(name, ann) for name in "abc"]
    await sign_in(sessions, ANN)
    assert (await member(sessions, ANN)).role == "admin"

    await provider.act(delete_group, b, lambda _: None)
    assert (await member(sessions, ANN)).role == "viewer"
    await provider.act(update_group, c, to(GroupTerms("B", None)))
    assert (await member(sessions, ANN)).role == "admin"
    await provider.act(update_group, c, to(GroupTerms("d", None)))
    await role(sessions, "a", "")
    with pytest.raises(NotFound):
        await member(sessions, ANN)


async def test_a_suspended_member_is_out_and_comes_back_with_its_keys(
    sessions: Sessions, provider: Provider
) -> None:
    async with sessions.begin() as session:
        await joined(session, BOB, "owner")
        accepted = await joined(session, ANN, "developer", create_key=True)
    ann = await provider.user(ANN)
    assert ann.person_id == accepted.member.person_id

    await provider.activate(ann, is_active=False)
    await provider.activate(ann, is_active=False)

    async with sessions() as session:
        for attempt in (
            authenticate(session, accepted.secret),
            authenticate_bound(session, accepted.member.api_key_id),
        ):
            with pytest.raises(KeyInvalid):
                await attempt
        commands = await session.scalar(text("SELECT count(*) FROM cancel_commands"))
        log = list(await session.scalars(select(AuditEntry.action).order_by(AuditEntry.id)))
    assert commands == 2, "running requests of both keys end"
    assert (await member(sessions, ANN)).deactivated_at is not None
    assert log.count("member.suspend") == 1

    await provider.activate(ann, is_active=True)
    async with sessions() as session:
        assert (await authenticate(session, accepted.secret)).person_id == ann.person_id
        await authenticate_bound(session, accepted.member.api_key_id)
    found = await member(sessions, ANN)
    assert (found.role, found.deactivated_at) == ("developer", None), "an invitation gave it"

    await provider.act(delete_user, ann.id, lambda _: None)
    with pytest.raises(NotFound):
        await member(sessions, ANN)
    async with sessions() as session:
        with pytest.raises(KeyInvalid):
            await authenticate(session, accepted.secret)


async def end(provider: Provider, ann: ScimUser, group: uuid.UUID, way: str) -> None:
    match way:
        case "deactivated":
            await provider.activate(ann, is_active=False)
        case "deleted":
            await provider.act(delete_user, ann.id, lambda _: None)
        case "out of the group":
            await provider.change(group, MemberChange("replace", frozenset()))
        case "without the group":
            await provider.act(delete_group, group, lambda _: None)
        case _:
            await provider.act(update_group, group, to(GroupTerms("other", None)))


WAYS = ["deactivated", "deleted", "out of the group", "without the group", "renamed group"]


@pytest.mark.parametrize("way", WAYS)
async def test_the_last_owner_stays(sessions: Sessions, provider: Provider, way: str) -> None:
    await role(sessions, "owners", "owner")
    ann = await provider.user(ANN)
    group = await provider.group("owners", ann)
    await sign_in(sessions, ANN)

    with pytest.raises(LastOwner):
        await end(provider, ann, group, way)
    found = await member(sessions, ANN)
    assert (found.role, found.deactivated_at) == ("owner", None)

    async with sessions.begin() as session:
        await joined(session, BOB, "owner")
    await end(provider, ann, group, way)


async def test_a_suspended_owner_is_not_the_remaining_one(
    sessions: Sessions, provider: Provider
) -> None:
    await role(sessions, "owners", "owner")
    ann, bob = await provider.user(ANN), await provider.user(BOB)
    await provider.group("owners", ann, bob)
    await sign_in(sessions, ANN)
    await sign_in(sessions, BOB, "2")

    results = await asyncio.gather(
        provider.activate(ann, is_active=False),
        provider.activate(bob, is_active=False),
        return_exceptions=True,
    )

    assert [type(each) for each in results].count(LastOwner) == 1


async def test_a_provider_changes_nothing_of_a_person_elsewhere(
    sessions: Sessions, application: Sessions, provider: Provider
) -> None:
    async with sessions.begin() as session:
        await create_organization(session, name="bolt", actor="test")
        await create_project(session, organization="bolt", name="main", actor="test")
        there = await joined(session, ANN, "owner", organization="bolt", display_name="Ann of Bolt")
    await role(sessions, "everyone", "viewer")
    before = await member(sessions, ANN, "bolt")
    shown = await provider.user(ANN, displayName="Mallory")
    await provider.group("everyone", shown)

    assert shown.person_id is None, "whether the service knows an address is not shown"
    async with provider.sessions() as session:
        with pytest.raises(NotFound):
            await find_person(session, ANN)
    await sign_in(sessions, ANN)
    await provider.activate(shown, is_active=False)

    assert await member(sessions, ANN, "bolt") == before
    async with sessions() as session:
        assert (await authenticate_bound(session, there.member.api_key_id)).scopes
    assert (await member(sessions, ANN)).deactivated_at is not None
    await provider.act(delete_user, shown.id, lambda _: None)
    assert await member(sessions, ANN, "bolt") == before


async def test_a_provider_reads_and_changes_its_own_organization_only(
    sessions: Sessions, application: Sessions, provider: Provider
) -> None:
    async with sessions.begin() as session:
        bolt = await create_organization(session, name="bolt", actor="test")
        await create_project(session, organization="bolt", name="main", actor="test")
    other = Provider(application, bolt.id)
    ann = await provider.user(ANN)
    group = await provider.group("engineers", ann)

    same = await other.user(ANN)
    assert same.id != ann.id
    everything: dict[str, Any] = {"where": None, "order": (), "offset": 0, "limit": 10}
    async with other.sessions() as session:
        assert (await list_users(session, bolt.id, **everything))[0] == 1
        assert await list_groups(session, bolt.id, **everything) == (0, [])
        found = await list_users(session, provider.organization_id, **everything)
        assert found == (0, []), "the border holds whatever the id"
    for act, arguments in (
        (update_user, (ann.id, to(terms(BOB)))),
        (delete_user, (ann.id, lambda _: None)),
        (update_group, (group, to(GroupTerms("theirs", None)))),
        (delete_group, (group, lambda _: None)),
    ):
        with pytest.raises(NotFound):
            await other.act(act, *arguments)
    with pytest.raises(InvalidValue, match="there is no user"):
        await other.group("theirs", ann)


async def test_only_a_verified_address_admits(sessions: Sessions, provider: Provider) -> None:
    await role(sessions, "everyone", "viewer")
    await provider.group("everyone", await provider.user(ANN))

    with pytest.raises(SignInRefused) as refused:
        await sign_in(sessions, "")
    assert refused.value.why is Refusal.NO_EMAIL
    with pytest.raises(NotFound):
        await member(sessions, ANN)


async def test_an_operator_is_not_provisioned(sessions: Sessions, provider: Provider) -> None:
    async with sessions.begin() as session:
        await joined(session, ANN, "operator")
    await role(sessions, "everyone", "viewer")
    ann = await provider.user(ANN)
    await provider.group("everyone", ann)
    assert (await member(sessions, ANN)).role == "operator"

    with pytest.raises(InvalidValue, match="operator of the service"):
        await provider.activate(ann, is_active=False)
    with pytest.raises(InvalidValue, match="operator of the service"):
        await provider.act(delete_user, ann.id, lambda _: None)
    assert (await member(sessions, ANN)).deactivated_at is None


async def test_a_developer_moves_to_the_project_of_its_group(
    sessions: Sessions, provider: Provider
) -> None:
    async with sessions.begin() as session:
        await create_project(session, organization="acme", name="other", actor="test")
    await role(sessions, "a", "developer")
    await role(sessions, "b", "developer", "other")
    ann = await provider.user(ANN)
    group = await provider.group("a", ann)
    await sign_in(sessions, ANN)
    assert (await member(sessions, ANN)).project_name == "search"

    await provider.act(update_group, group, to(GroupTerms("b", None)))
    assert (await member(sessions, ANN)).project_name == "other"


async def test_names_and_addresses_are_unique_without_regard_to_case(
    sessions: Sessions, provider: Provider
) -> None:
    ann = await provider.user(ANN)
    bob = await provider.user(BOB)
    for taken in (terms("ANN@example.com"), replace(terms(ANN), user_name="other")):
        with pytest.raises(AlreadyExists):
            await provider.act(create_user, taken)
        with pytest.raises(AlreadyExists):
            await provider.act(update_user, bob.id, to(taken))
    await provider.group("Engineers")
    with pytest.raises(AlreadyExists):
        await provider.group("ENGINEERS", ann)


async def test_changes_of_one_group_at_once_are_all_kept(
    sessions: Sessions, provider: Provider
) -> None:
    users = [await provider.user(f"u{number}@example.com") for number in range(8)]
    group = await provider.group("everyone", *users[4:])

    await asyncio.gather(
        *(
            provider.change(
                group, MemberChange("add" if at < 4 else "remove", frozenset({str(user.id)}))
            )
            for at, user in enumerate(users)
        )
    )

    async with sessions() as session:
        rows = await session.execute(text("SELECT user_id FROM scim_group_members"))
        found = {row[0] for row in rows}
    assert found == {each.id for each in users[:4]}
    async with sessions() as session:
        version = await session.scalar(text("SELECT version FROM scim_groups"))
        entries = await session.scalar(
            text("SELECT count(*) FROM audit_log WHERE action = 'scim_group.update'")
        )
    assert (version, entries) == (9, 8), "one entry for each change"


async def test_a_change_that_changes_nothing_leaves_no_trace(
    sessions: Sessions, provider: Provider
) -> None:
    ann = await provider.user(ANN)
    group = await provider.group("everyone", ann)
    same = frozenset({str(ann.id)})
    count = text("SELECT count(*) FROM audit_log")
    async with sessions() as session:
        before = await session.scalar(count)

    await provider.act(update_user, ann.id, to(terms(ANN)))
    for changes in (
        [MemberChange("add", same)],
        [MemberChange("replace", same)],
        [MemberChange("remove", same), MemberChange("add", same)],
        [MemberChange("remove", frozenset({str(uuid.uuid4())}))],
    ):
        await provider.change(group, *changes)

    async with sessions() as session:
        assert await session.scalar(count) == before
        assert (await find_user(session, provider.organization_id, ann.id)).version == 1


FILTERS = {
    f'userName eq "{ANN.upper()}"': "a",
    'userName ne "ann@example.com"': "bc",
    'userName sw "ann" or userName co "OB@"': "ab",
    'not (userName sw "ann") and active eq true': "b",
    "active eq false": "c",
    'externalId eq "X-1"': "a",
    'externalId eq "x-1"': "",
    "externalId pr": "a",
    "externalId eq null": "bc",
    "not (externalId pr)": "bc",
    'displayName eq "änn"': "a",
    'displayName ew "bee"': "c",
    'name.familyName gt "k"': "b",
    "name pr": "b",
    "emails pr": "abc",
    'emails eq "bob@example.com"': "b",
    'emails.value co "100%_\\\\"': "",
    'emails[type eq "work" and value sw "c"]': "c",
    'emails[type eq "home"]': "",
    "emails[primary eq true]": "abc",
    'urn:ietf:params:scim:schemas:core:2.0:User:userName sw "a"': "a",
    'meta.created gt "2020-01-01T00:00:00Z" and (userName sw "a" or userName sw "b")': "ab",
    "groups pr": "a",
    'id eq "no id"': "",
}


async def test_filters_select_the_same_as_their_meaning(
    sessions: Sessions, provider: Provider
) -> None:
    async def found(session: AsyncSession, query: str) -> str:
        condition = to_sql(parse_filter(query), ScimUser)
        count, users = await list_users(
            session, provider.organization_id, where=condition, order=(), offset=0, limit=10
        )
        assert count == len(users)
        return "".join(sorted(each.user_name[0] for each in users))

    a = await provider.user(ANN, displayName="änn")
    await provider.user(BOB, name={"familyName": "Lee"})
    await provider.user("cat@example.com", is_active=False, displayName="Bumble Bee")
    await provider.group("everyone", a)
    async with sessions.begin() as session:
        await session.execute(update(ScimUser).where(ScimUser.id == a.id).values(external_id="X-1"))

    async with provider.sessions() as session:
        shown = {query: await found(session, query) for query in FILTERS}
    assert shown == FILTERS


@pytest.mark.parametrize(
    "query",
    [
        *("", "userName", "userName eq", 'userName is "a"', "userName eq a", 'eq "a"', "not x pr"),
        *('userName eq "a', "(userName pr", "userName pr)", "userName pr and", "active gt true"),
        *('emails[type eq "work"', "password pr", "userName eq 1", 'meta.created gt "now"'),
        *("(" * 30 + "id pr" + ")" * 30, " or ".join(["id pr"] * 101), "id pr" + " " * 5000 + "x"),
        *('members[emails[type eq "x"]]', 'groups.display eq "x"', "userName gt null"),
    ],
)
def test_what_is_no_filter_is_refused(query: str) -> None:
    with pytest.raises(FilterInvalid):
        to_sql(parse_filter(query), ScimUser)


async def test_members_list_shows_the_state(sessions: Sessions, provider: Provider) -> None:
    async with sessions.begin() as session:
        await joined(session, ANN, "viewer")
    await provider.activate(await provider.user(ANN), is_active=False)

    async with provider.sessions() as session:
        [[found], _] = await list_members(session, organization="acme")
    assert found.deactivated_at is not None
