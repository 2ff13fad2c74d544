"""Approval by a second person: which keys count as the same hands, and the one cause that is named.

Each story is a text table: one act per line, by the key that acts. `root` makes the keys of ann and
bob before anything else; ann proposes at the line `propose`, and bob approves at the end.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from metering.alerts.alerts import fire_due_alerts, latest_key_change, list_alerts
from metering.alerts.webhooks import body_of
from metering.core.errors import ApprovalRefused, KeyInvalid
from metering.core.money import PICOS_PER_UNIT
from metering.invoicing.adjustments import approve, create_adjustment
from metering.store.db import Sessions, psycopg_conninfo
from metering.tenants.api_keys import (
    KeyOwner,
    create_api_key,
    find_api_key,
    revoke_api_key,
    rotate_api_key,
    update_api_key,
)
from metering.tenants.authentication import hash_of
from metering.tenants.invitations import accept_invitation, invite
from metering.tenants.key_terms import KeyTerms
from metering.tenants.members import remove_member
from tests.metering.usage import Customer
from tests.metering.workers import wait_until

UNRELATED = "Approve it with an unrelated, older key."
LATER = datetime(2090, 1, 1, tzinfo=UTC)


WIDENINGS: dict[str, dict[str, object]] = {
    "scopes": {"scopes": ("admin", "billing", "inference")},
    "networks": {"allowed_networks": ("10.0.0.0/8", "192.168.0.0/16")},
    "all_networks": {"allowed_networks": ()},
    "longer": {"expires_at": LATER + timedelta(days=1)},
    "for_ever": {"never_expires": True},
}
NARROWINGS: dict[str, dict[str, object]] = {
    "name": {"name": "another name"},
    "fewer": {"scopes": ("admin",)},
    "shorter": {"expires_at": LATER - timedelta(days=1)},
    "one_network": {"allowed_networks": ("10.1.0.0/16",)},
    "models": {"models": ("demo",)},
}

# Acts, and the cause that is named. The approver is bob, with his present secret.
REFUSED: dict[str, tuple[str, str]] = {
    "created": (
        "ann creates bob; ann proposes",
        "{bob} was created by {ann}, which proposed adjustment {id}.",
    ),
    "rotated": (
        "ann rotates bob; ann proposes",
        "{bob} was rotated by {ann}, which proposed adjustment {id}.",
    ),
    "rotated after the proposal": (
        "ann proposes; ann rotates bob",
        "{bob} was rotated by {ann}, which proposed adjustment {id}.",
    ),
    "rotated, then by bob himself": (
        "ann rotates bob; bob rotates bob; ann proposes",
        "{bob} was rotated by {ann}, which proposed adjustment {id}.",
    ),
    **{
        f"widened: {how}": (
            f"ann widens bob {how}; ann proposes",
            "{bob} was given more rights by {ann}, which proposed adjustment {id}.",
        )
        for how in WIDENINGS
    },
    "created, over another key": (
        "ann creates cat; cat creates bob; ann proposes",
        "{bob} was created by {cat}, which was created by {ann}, which proposed adjustment {id}.",
    ),
    "a rotated key rotates another": (
        "root creates cat; ann rotates cat; cat rotates bob; ann proposes",
        "{bob} was rotated by {cat}, which was rotated by {ann}, which proposed adjustment {id}.",
    ),
    "the approver made the author": (
        "bob creates ann; ann proposes",
        "{bob} created {ann}, which proposed adjustment {id}.",
    ),
    "the approver rotated the author": (
        "bob rotates ann; ann proposes",
        "{bob} rotated {ann}, which proposed adjustment {id}.",
    ),
    "the approver widened a key that made the author": (
        "root creates cat; bob widens cat scopes; cat creates ann; ann proposes",
        "{bob} gave more rights to {cat}, which created {ann}, which proposed adjustment {id}.",
    ),
    "newer than the proposal": (
        "root creates cat; ann proposes; cat creates bob",
        "{bob} was created by {cat} after adjustment {id} was proposed.",
    ),
    "the secret is newer than the proposal": (
        "ann proposes; bob rotates bob",
        "{bob} was rotated after adjustment {id} was proposed.",
    ),
    "the rights are newer than the proposal": (
        "ann proposes; bob widens bob scopes",
        "{bob} was given more rights after adjustment {id} was proposed.",
    ),
    "a common maker after the proposal": (
        "ann proposes; root rotates bob",
        "{bob} was rotated by root, which also created {ann}, after adjustment {id} was proposed.",
    ),
}
ACCEPTED = {
    "a third person made both keys": "ann proposes",
    "a third person rotated both": "root rotates ann; root rotates bob; ann proposes",
    "bob rotated his own key before": "bob rotates bob; ann proposes",
    **{
        f"ann narrowed bob's key: {how}": f"ann narrows bob {how}; ann proposes"
        for how in NARROWINGS
    },
    "both made other keys": "ann creates cat; bob creates dan; ann proposes",
}


class Story:
    """Keys by name, their secrets in order, and the proposal."""

    def __init__(self, sessions: Sessions, url: str) -> None:
        self.sessions, self.url = sessions, psycopg_conninfo(url)
        self.keys = {"root": "root"}
        self.secrets: dict[str, list[str]] = {}
        self.adjustment_id = ""

    async def create(self, actor: str, name: str) -> None:
        async with self.sessions.begin() as session:
            key, secret = await create_api_key(
                session,
                organization="acme",
                project="search",
                name=name,
                terms=KeyTerms(scopes=("admin", "billing"), allowed_networks=("10.0.0.0/8",)),
                lifetime=LATER - datetime.now(UTC),
                actor=self.keys[actor],
            )
        self.keys[name], self.secrets[name] = key.prefix, [secret]

    async def rotate(self, actor: str, name: str, overlap: timedelta = timedelta(hours=1)) -> None:
        async with self.sessions.begin() as session:
            _, secret, _ = await rotate_api_key(
                session, api_key=self.keys[name], overlap=overlap, actor=self.keys[actor]
            )
        self.secrets[name].append(secret)

    async def update(self, actor: str, key: str, /, **changes: Any) -> None:
        terms = {
            each.name: changes.pop(each.name) for each in fields(KeyTerms) if each.name in changes
        }
        async with self.sessions.begin() as session:
            await update_api_key(
                session,
                api_key=self.keys[key],
                terms=lambda old: replace(old, **terms),
                actor=self.keys[actor],
                **changes,
            )

    async def propose(self, actor: str) -> None:
        async with self.sessions.begin() as session:
            made = await create_adjustment(
                session,
                organization="acme",
                amount_picos=PICOS_PER_UNIT,
                currency_code="USD",
                reason="an outage",
                actor=self.keys[actor],
            )
        self.adjustment_id = str(made.id)

    async def approve(self, actor: str, secret: int = -1) -> None:
        async with self.sessions.begin() as session:
            await approve(
                session,
                adjustment_id=self.adjustment_id,
                actor=self.keys[actor],
                secret_hash=hash_of(self.secrets[actor][secret]),
            )

    async def emit(self, *lines: str) -> None:
        for line in lines:
            actor, act, *rest = line.split()
            match act:
                case "creates":
                    await self.create(actor, rest[0])
                case "rotates":
                    await self.rotate(actor, rest[0])
                case "widens":
                    await self.update(actor, rest[0], **WIDENINGS[rest[1]])
                case "narrows":
                    await self.update(actor, rest[0], **NARROWINGS[rest[1]])
                case "proposes":
                    await self.propose(actor)
                case _:
                    raise AssertionError(line)


@pytest.fixture
async def story(sessions: Sessions, database_url: str, customer: Customer) -> Story:
    made = Story(sessions, database_url)
    await made.emit("root creates ann", "root creates bob")
    return made


@pytest.mark.parametrize("case", REFUSED)
async def test_keys_of_the_same_hands_cannot_approve_the_change(story: Story, case: str) -> None:
    acts, cause = REFUSED[case]
    await story.emit(*acts.split("; "))

    with pytest.raises(ApprovalRefused) as refusal:
        await story.approve("bob")

    expected = cause.format(id=story.adjustment_id, **story.keys)
    assert str(refusal.value) == f"{expected} {UNRELATED}"


async def test_the_key_of_the_proposal_cannot_approve_it(story: Story) -> None:
    await story.propose("ann")

    with pytest.raises(ApprovalRefused, match=r"proposed .*\. Another person has to approve it"):
        await story.approve("ann")


@pytest.mark.parametrize("case", ACCEPTED)
async def test_keys_of_two_persons_approve(story: Story, case: str) -> None:
    await story.emit(*ACCEPTED[case].split("; "))

    await story.approve("bob")


@pytest.mark.parametrize(
    "rotation", ["ann proposes; ann rotates bob", "ann proposes; bob rotates bob"]
)
async def test_a_replaced_secret_that_is_older_still_approves(story: Story, rotation: str) -> None:
    """The secret that bob holds was neither made by ann nor after the proposal."""
    await story.emit(*rotation.split("; "))

    with pytest.raises(ApprovalRefused):
        await story.approve("bob")
    await story.approve("bob", secret=0)


async def test_an_older_secret_of_another_rotation_is_judged_by_its_own_maker(story: Story) -> None:
    """Ann made the second of three secrets; the third came from it."""
    await story.emit("ann rotates bob", "bob rotates bob", "ann proposes")

    for secret in (1, 2):
        with pytest.raises(ApprovalRefused, match="rotated by"):
            await story.approve("bob", secret)
    await story.approve("bob", secret=0)


async def test_a_revoked_or_ended_secret_approves_nothing(story: Story) -> None:
    """The check of the caller may be some seconds old."""
    await story.emit("ann proposes")
    await story.rotate("bob", "bob", overlap=timedelta(0))
    with pytest.raises(KeyInvalid):
        await story.approve("bob", secret=0)
    async with story.sessions.begin() as session:
        await revoke_api_key(session, api_key=story.keys["bob"], actor=story.keys["bob"])
    with pytest.raises(KeyInvalid):
        await story.approve("bob")


async def test_a_rotation_beside_an_approval_comes_before_or_after_it(story: Story) -> None:
    """The approval waits for the uncommitted rotation, and then judges by it."""
    await story.propose("ann")

    async with story.sessions.begin() as session:
        _, secret, _ = await rotate_api_key(
            session, api_key=story.keys["bob"], overlap=timedelta(0), actor=story.keys["ann"]
        )
        approval = asyncio.create_task(story.approve("bob"))
        await asyncio.to_thread(wait_until, lambda: lock_waits(story) == 1, "the approval to wait")
        assert not approval.done()
    story.secrets["bob"].append(secret)

    with pytest.raises(KeyInvalid):
        await approval
    with pytest.raises(ApprovalRefused, match="was rotated by"):
        await story.approve("bob")


def lock_waits(story: Story) -> int:
    with psycopg.connect(story.url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
    assert row is not None
    return int(row[0])


async def test_organization_and_holder_are_informed_of_new_power(story: Story) -> None:
    await story.emit("ann rotates bob", "ann narrows bob fewer", "ann widens bob scopes")

    assert await fire_due_alerts(story.sessions) == 2
    assert await fire_due_alerts(story.sessions) == 0, "each is reported once"

    ann, bob = story.keys["ann"], story.keys["bob"]
    async with story.sessions() as session:
        found, _ = await list_alerts(session, organization_id=None)
        reported = await latest_key_change(session, (await find_api_key(session, bob)).id)
        untouched = await latest_key_change(session, (await find_api_key(session, ann)).id)
    assert {(each.kind, f'"prefix": "{bob}"' in body_of(each).decode()) for each in found} == {
        ("key_rotated", True),
        ("key_widened", True),
    }
    texts = {each.kind: body_of(each).decode() for each in found}
    assert f"The API key {bob} (bob) was rotated by {ann} (secret)." in texts["key_rotated"]
    assert f"was given more rights by {ann} (scopes)." in texts["key_widened"]
    assert reported is not None
    assert (reported.act, reported.actor) == ("widened", ann)
    assert untouched is None


class People(Story):
    """Members too: `X invites Y` makes the bound key Y and the own key Y.own of a new person."""

    async def emit(self, *lines: str) -> None:
        for line in lines:
            actor, act, name = (*line.split(), "")[:3]
            if act == "invites":
                await self.invite(actor, name)
            elif act == "own":  # another key of the person
                await self.create_own(actor, name)
            else:
                await super().emit(line)

    async def invite(self, actor: str, name: str) -> None:
        async with self.sessions.begin() as session:
            _, token = await invite(
                session,
                organization="acme",
                email=f"{name}@example.com",
                role="operator",
                actor=self.keys[actor],
            )
            accepted = await accept_invitation(session, token=token, create_key=True)
        self.keys |= {name: accepted.member.key_prefix, f"{name}.own": accepted.secret[:11]}
        self.secrets[f"{name}.own"] = [accepted.secret]

    async def create_own(self, actor: str, name: str) -> None:
        async with self.sessions.begin() as session:
            person_id = (await find_api_key(session, self.keys[actor])).owner.person_id
            key, secret = await create_api_key(
                session,
                organization="acme",
                project="search",
                name=name,
                terms=KeyTerms(scopes=("admin",)),
                owner=KeyOwner(person_id=person_id, creator_id=person_id),
                actor=self.keys[actor],
            )
        self.keys[name], self.secrets[name] = key.prefix, [secret]

    async def approve(self, actor: str, secret: int = -1) -> None:
        secrets = self.secrets.get(actor)
        async with self.sessions.begin() as session:
            await approve(
                session,
                adjustment_id=self.adjustment_id,
                actor=self.keys[actor],
                secret_hash=hash_of(secrets[secret]) if secrets else b"",
            )


# Acts, the approver, and the cause that is named; none if the approval is accepted.
PEOPLE: dict[str, tuple[str, str, str]] = {
    "two persons who have signed in": ("root invites ann; root invites bob", "bob", ""),
    "the one invited the other": ("root invites ann; ann invites bob", "bob", ""),
    "the other invited the one": ("root invites bob; bob invites ann", "bob", ""),
    "a person and a key of nobody": ("root invites ann; root creates bob", "bob", ""),
    "two keys of a person": (
        "root invites ann",
        "ann.own",
        "{ann.own} belongs to the person who proposed adjustment {id} with {ann}. Another person"
        " has to approve it.",
    ),
    "another key of the person": (
        "root invites ann; ann own more",
        "more",
        "{more} belongs to the person who proposed adjustment {id} with {ann}. Another person has"
        " to approve it.",
    ),
    "a key that another key of the person made": (
        "root invites ann; ann.own creates cat",
        "cat",
        "{cat} was created by {ann.own}, which belongs to the person of {ann}, which proposed"
        " adjustment {id}. " + UNRELATED,
    ),
    "the secret of an invited person, which the inviter may have": (
        "root invites ann; ann invites bob",
        "bob.own",
        "{bob.own} was created by {bob}, which was created by {ann}, which proposed adjustment"
        " {id}. " + UNRELATED,
    ),
    "invited after the proposal": (
        "root invites ann; ann proposes; root invites bob",
        "bob",
        "{bob} was created by root, which also created {ann}, after adjustment {id} was proposed. "
        + UNRELATED,
    ),
}


@pytest.fixture
def people(sessions: Sessions, database_url: str, customer: Customer) -> People:
    return People(sessions, database_url)


@pytest.mark.parametrize("case", PEOPLE)
async def test_persons_are_distinguished(people: People, case: str) -> None:
    acts, approver, cause = PEOPLE[case]
    await people.emit(*acts.split("; "))
    if "proposes" not in acts:
        await people.propose("ann")

    if not cause:
        await people.approve(approver)
        return
    with pytest.raises(ApprovalRefused) as refusal:
        await people.approve(approver)

    expected = cause.replace("{id}", people.adjustment_id)
    for name, prefix in people.keys.items():
        expected = expected.replace(f"{{{name}}}", prefix)
    assert str(refusal.value) == expected


async def test_a_removed_person_approves_nothing(people: People) -> None:
    """The check of the caller may be some seconds old."""
    await people.emit("root invites ann", "root invites bob", "ann proposes")
    async with people.sessions.begin() as session:
        await remove_member(
            session, organization="acme", member="bob@example.com", revoke_keys=False, actor="root"
        )

    with pytest.raises(KeyInvalid):
        await people.approve("bob")


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_they_did_before_two_persons_are_two_and_one_is_one(
    people: People, seed: int
) -> None:
    """Random acts of three members: rotations, new keys, wider rights, in any order."""
    chosen = random.Random(seed)
    await people.emit("root invites ann", "ann invites bob", "bob invites cat")
    persons = ("ann", "bob", "cat")
    of_person = {each: [each, f"{each}.own"] for each in persons}
    others: list[str] = []
    for number in range(8):
        person = chosen.choice(persons)
        actor = chosen.choice(of_person[person])
        with_secret = [*others, *(f"{each}.own" for each in persons)]
        match chosen.choice(("own", "creates", "rotates", "widens")):
            case "own":
                await people.emit(f"{actor} own k{number}")
                of_person[person].append(f"k{number}")
            case "creates":
                await people.emit(f"{actor} creates k{number}")
                others.append(f"k{number}")
            case "rotates":
                await people.emit(f"{actor} rotates {chosen.choice(with_secret)}")
            case _:
                if others:
                    await people.emit(f"{actor} widens {chosen.choice(others)} for_ever")
    author, approver = chosen.sample(persons, 2)
    await people.propose(author)

    for same in of_person[author]:
        with pytest.raises(ApprovalRefused):
            await people.approve(same)
    for made in others:
        async with people.sessions() as session:
            makers = await session.scalars(
                text(
                    "SELECT actor FROM audit_log WHERE subject_id = (SELECT id::text FROM api_keys"
                    " WHERE prefix = :key) AND action <> 'quota.set'"
                ),
                {"key": people.keys[made]},
            )
        if {people.keys[each] for each in of_person[author]} & set(makers):
            with pytest.raises(ApprovalRefused):
                await people.approve(made)
    await people.approve(approver)
