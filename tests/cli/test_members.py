"""Commands for members, service accounts and persons: their requests and output."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.message import Message
from weir.v1 import members_pb2 as pb

from tests.cli.conftest import Run, ScriptedWeir
from tests.cli.scripted_weir import NOON

TOKEN = "wi_" + "t" * 43
MEMBER = pb.Member(
    email="ann@example.com",
    display_name="Ann",
    organization_name="acme",
    project_name="web",
    role="developer",
    key_prefix="wk_ann00000",
    create_time=NOON,
)
INVITATION = pb.Invitation(
    email="ann@example.com",
    organization_name="acme",
    role="developer",
    invitation_id="i1",
    expire_time=NOON,
)
ACCOUNT = pb.ServiceAccount(name="ci", role="viewer", key_count=2, create_time=NOON)
PERSON = pb.Person(email="ann@example.com", display_name="Ann", create_time=NOON)
GROUP = pb.ProvisionedGroup(group="Engineers", member_count=12, role="developer")
GONE = pb.Person(email="ann@example.com", display_name="Ann", deactivate_time=NOON)
REPLIES: dict[str, Message] = {
    "InviteMember": pb.InviteMemberResponse(invitation=INVITATION, token=TOKEN),
    "ResendInvitation": pb.ResendInvitationResponse(invitation=INVITATION, token=TOKEN),
    "RevokeInvitation": pb.RevokeInvitationResponse(revoked=True),
    "AcceptInvitation": pb.AcceptInvitationResponse(member=MEMBER, secret="wk_ann00001_s"),
    "ListInvitations": pb.ListInvitationsResponse(invitations=[INVITATION]),
    "ListMembers": pb.ListMembersResponse(members=[MEMBER]),
    "UpdateMember": pb.UpdateMemberResponse(member=MEMBER),
    "RemoveMember": pb.RemoveMemberResponse(revoked_keys=["wk_a"], kept_keys=["wk_b"]),
    "CreateServiceAccount": pb.CreateServiceAccountResponse(service_account=ACCOUNT),
    "UpdateServiceAccount": pb.UpdateServiceAccountResponse(service_account=ACCOUNT),
    "DeleteServiceAccount": pb.DeleteServiceAccountResponse(deleted=True),
    "ListServiceAccounts": pb.ListServiceAccountsResponse(service_accounts=[ACCOUNT]),
    "ListPersons": pb.ListPersonsResponse(persons=[PERSON]),
    "UpdatePerson": pb.UpdatePersonResponse(person=PERSON),
    "DeactivatePerson": pb.DeactivatePersonResponse(person=GONE),
    "ReactivatePerson": pb.ReactivatePersonResponse(person=PERSON),
    "ErasePerson": pb.ErasePersonResponse(person_id="p1", organizations=["acme"], key_count=2),
    "ListProvisionedGroups": pb.ListProvisionedGroupsResponse(groups=[GROUP]),
    "SetGroupRole": pb.SetGroupRoleResponse(group=GROUP),
}
OF_ACME = {"organization": "acme"}
ANN = {"member": "ann@example.com"}
# Command, fields of its request, and a part of its output.
COMMANDS: list[tuple[str, dict[str, Any], str]] = [
    ("member list --org acme --search an", OF_ACME | {"search": "an"}, "ann@example.com"),
    ("member invitations --org acme", OF_ACME, "i1"),
    ("member uninvite i1", {"invitation_id": "i1"}, "i1 is revoked"),
    (
        "member role ann@example.com developer --org acme",
        OF_ACME | ANN | {"role": "developer"},
        "developer",
    ),
    ("member remove ann@example.com --org acme", OF_ACME | ANN, "revoked: wk_a; these stay: wk_b"),
    (
        "member remove ann@example.com --org acme --keep-keys",
        OF_ACME | ANN | {"revoke_keys": False},
        "wk_b",
    ),
    (
        "member remove ann@example.com --org acme --revoke-keys",
        OF_ACME | ANN | {"revoke_keys": True},
        "wk_a",
    ),
    (
        "service-account create ci --role viewer --org acme",
        OF_ACME | {"name": "ci", "role": "viewer"},
        "viewer",
    ),
    ("service-account list --org acme", OF_ACME, "ci"),
    (
        "service-account role ci viewer --org acme",
        OF_ACME | {"service_account": "ci", "role": "viewer"},
        "viewer",
    ),
    (
        "service-account delete ci --org acme",
        OF_ACME | {"service_account": "ci"},
        "ci and its keys are out of force",
    ),
    ("person list --search a", {"search": "a"}, "ann@example.com"),
    ("person rename ann@example.com Ann", {"display_name": "Ann"}, "Ann"),
    ("person deactivate ann@example.com", {"person": "ann@example.com"}, "deactivated 2026-11-20"),
    ("person reactivate ann@example.com", {"person": "ann@example.com"}, "active"),
    ("person erase ann@example.com --yes", {"person": "ann@example.com"}, "erased the person p1"),
    ("person erase ann@example.com --dry-run", {"dry_run": True}, "would erase the person p1"),
    ("member groups --org acme", OF_ACME, "Engineers"),
    (
        "member group-role Engineers developer --org acme --project search",
        OF_ACME | {"group": "Engineers", "role": "developer", "project": "search"},
        "not provisioned yet",
    ),
]


@pytest.fixture(autouse=True)
def members(server: ScriptedWeir) -> None:
    server.accounts.replies |= REPLIES


@pytest.mark.parametrize(("command", "fields", "shown"), COMMANDS)
def test_a_command_makes_its_call(
    weir: Run, server: ScriptedWeir, command: str, fields: dict[str, Any], shown: str
) -> None:
    result = weir(command)

    assert shown in " ".join(result.output.split()), result.output
    [request] = server.accounts.requests
    given = {each.name: value for each, value in request.ListFields()}
    assert {name: given.get(name) for name in fields} == fields
    assert ("revoke_keys" in given) == ("revoke_keys" in fields)
    assert json.loads(weir(f"{command} --json").stdout)


@pytest.mark.parametrize(
    "command",
    [
        "member invite ann@example.com --role developer --org acme --expires-in 2d",
        "member resend i1",
    ],
)
def test_a_token_is_alone_on_stdout(weir: Run, server: ScriptedWeir, command: str) -> None:
    result = weir(command)

    assert result.stdout == f"{TOKEN}\n"
    assert "ann@example.com is invited to acme as developer until 2026-11-20" in result.stderr
    days = 2 if "invite" in command else 7
    assert server.accounts.requests[0].lifetime.seconds == days * 86_400


def test_an_invitation_is_accepted_with_its_token(weir: Run, server: ScriptedWeir) -> None:
    result = weir(f"member accept --name Ann --create-key --api-key {TOKEN}")

    assert result.stdout == "wk_ann00001_s\n"
    assert "ann@example.com is developer of acme" in result.stderr
    assert server.accounts.keys == [f"Bearer {TOKEN}"]
    assert server.accounts.requests[0].create_key


def test_keys_are_listed_with_their_owners(weir: Run, server: ScriptedWeir) -> None:
    listed: Any = server.accounts.replies["ListApiKeys"]
    assert "owner" not in weir("key list").stdout
    [key] = listed.api_keys
    key.person_id, key.is_bound = "p1", True

    shown = weir("key list").stdout

    assert "person" in shown
    assert "active, without a secret" in shown


def test_a_key_is_made_for_its_owner(weir: Run, server: ScriptedWeir) -> None:
    weir("key create k --org acme --project web --service-account ci")
    weir("key create k --org acme --project web --own")

    of_account, own = server.accounts.requests
    assert (of_account.service_account, of_account.own) == ("ci", False)
    assert own.own
