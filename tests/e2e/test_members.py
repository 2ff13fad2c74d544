"""Members, invitations, service accounts and persons by calls, and who changed what."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from grpc import StatusCode
from weir.v1 import types_pb2

from tests.calls import Calls, calls
from tests.e2e.test_key_access import Victim, methods, victim
from tests.service import MODEL, Service, Tenant

__all__ = ["victim"]  # a fixture
PLAN = f"plan-{uuid.uuid4().hex[:12]}"
NEXT_MONTH = f"{datetime.now(UTC).replace(day=1) + timedelta(days=40):%Y-%m}"
ORGANIZATION = types_pb2.QUOTA_SUBJECT_ORGANIZATION
Made = dict[str, Any]
Fields = Callable[[Made], Mapping[str, Any]]
MONEY = {"currency_code": "USD", "units": 1}
# Every call that changes something, in an order in which each succeeds, with its fields.
ACTS: list[tuple[str, Fields]] = [
    ("CreateOrganization", lambda _: {"name": f"o{uuid.uuid4().hex[:20]}"}),
    ("SuspendOrganization", lambda m: {"organization": m["org"], "reason": "unpaid"}),
    ("ResumeOrganization", lambda m: {"organization": m["org"]}),
    (
        "SetBillingProfile",
        lambda m: {"organization": m["org"], "billing_profile": {"legal_name": "Acme Ltd"}},
    ),
    ("SetQueueWeight", lambda m: {"organization": m["org"], "queue_weight_milli": 2000}),
    ("CreateProject", lambda m: {"organization": m["org"], "name": "second"}),
    ("SuspendProject", lambda m: {"project": f"{m['org']}/second", "reason": "paused"}),
    ("ResumeProject", lambda m: {"project": f"{m['org']}/second"}),
    ("UpdateProject", lambda m: {"project": f"{m['org']}/second", "name": "third"}),
    ("CreateApiKey", lambda m: {"organization": m["org"], "project": "third", "name": "k"}),
    ("RotateApiKey", lambda m: {"api_key": m["CreateApiKey"].api_key.prefix}),
    ("UpdateApiKey", lambda m: {"api_key": m["CreateApiKey"].api_key.prefix, "name": "l"}),
    ("RevokeApiKey", lambda m: {"api_key": m["CreateApiKey"].api_key.prefix}),
    (
        "SetQuota",
        lambda m: {
            "subject": ORGANIZATION,
            "subject_ref": m["org"],
            "dimension": types_pb2.QUOTA_DIMENSION_REQUESTS_PER_DAY,
            "limit_value": 5,
        },
    ),
    (
        "OverrideQuota",
        lambda m: {
            "quota_id": m["SetQuota"].quota.quota_id,
            "limit_value": 9,
            "expire_time": datetime.now(UTC) + timedelta(days=1),
            "reason": "launch",
        },
    ),
    ("DeleteQuota", lambda m: {"quota_id": m["SetQuota"].quota.quota_id}),
    (
        "SetPrice",
        lambda m: {
            "model": MODEL,
            "organization": m["org"],
            "input_picos_per_token": 1,
            "cached_input_picos_per_token": 1,
            "output_picos_per_token": 1,
        },
    ),
    ("WithdrawPrice", lambda m: {"model": MODEL, "organization": m["org"]}),
    ("CreatePlan", lambda _: {"plan": {"name": PLAN, "currency_code": "USD"}}),
    (
        "AssignPlan",
        lambda m: {"organization": m["org"], "plan": PLAN, "first_month": NEXT_MONTH},
    ),
    (
        "GrantCredit",
        lambda m: {
            "organization": m["org"],
            "amount_picos": 10**12,
            "last_month": NEXT_MONTH,
            "reason": "gift",
        },
    ),
    ("SetPrepaid", lambda m: {"organization": m["org"], "prepaid": True}),
    ("SetAlertWebhook", lambda m: {"organization": m["org"], "url": "https://example.com/a"}),
    ("DeleteAlertWebhook", lambda m: {"organization": m["org"]}),
    (
        "ApplyConfiguration",
        lambda _: {"configuration": {"organizations": [{"name": f"o{uuid.uuid4().hex[:20]}"}]}},
    ),
    ("EraseEndUser", lambda m: {"organization": m["victim"], "end_user": m["end_user"]}),
    (
        "CreateTokenIssuer",
        lambda m: {
            "organization": m["org"],
            "issuer": "https://login.example.com",
            "audience": m["org"],
            "projects": ["third"],
        },
    ),
    (
        "RevokeTokens",
        lambda m: {
            "token_issuer_id": m["CreateTokenIssuer"].token_issuer.token_issuer_id,
            "claim": "sub",
            "value": "ada",
        },
    ),
    (
        "DeleteTokenIssuer",
        lambda m: {"token_issuer_id": m["CreateTokenIssuer"].token_issuer.token_issuer_id},
    ),
    ("InviteMember", lambda m: {"organization": m["org"], "email": m["email"], "role": "viewer"}),
    (
        "ResendInvitation",
        lambda m: {"invitation_id": m["InviteMember"].invitation.invitation_id},
    ),
    ("AcceptInvitation", lambda _: {"display_name": "Ann"}),
    ("UpdateMember", lambda m: {"organization": m["org"], "member": m["email"], "role": "admin"}),
    ("RemoveMember", lambda m: {"organization": m["org"], "member": m["email"]}),
    ("RevokeInvitation", lambda m: {"invitation_id": m["invitation_id"]}),
    ("CreateServiceAccount", lambda m: {"organization": m["org"], "name": "ci"}),
    (
        "UpdateServiceAccount",
        lambda m: {"organization": m["org"], "service_account": "ci", "role": "viewer"},
    ),
    ("DeleteServiceAccount", lambda m: {"organization": m["org"], "service_account": "ci"}),
    ("SetGroupRole", lambda m: {"organization": m["org"], "group": "eng", "role": "viewer"}),
    ("UpdatePerson", lambda m: {"person": m["email"], "display_name": "Ann B."}),
    ("CreateSignInLink", lambda m: {"person": m["email"]}),
    ("DeactivatePerson", lambda m: {"person": m["email"]}),
    ("ReactivatePerson", lambda m: {"person": m["email"]}),
    ("CreateSignInLink", lambda m: {"person": m["email"]}),
    ("ErasePerson", lambda m: {"person": m["email"]}),
    ("CloseMonth", lambda m: {"organization": m["victim"], "month": "2025-11"}),
    (
        "CreateAdjustment",
        lambda m: {"organization": m["victim"], "amount": MONEY, "reason": "good will"},
    ),
    (
        "RejectAdjustment",
        lambda m: {"adjustment_id": m["CreateAdjustment"].adjustment.adjustment_id},
    ),
    (
        "CreateCreditNote",
        lambda m: {
            "invoice_number": m["invoice_number"],
            "amount": {"currency_code": "USD", "picos": 10**10},
            "reason": "an outage",
        },
    ),
    (
        "ApproveAdjustment",
        lambda m: {"adjustment_id": m["CreateCreditNote"].credit_note.adjustment_id},
    ),
    (
        "SetResalePrice",
        lambda m: {
            "organization": m["org"],
            "model": MODEL,
            "markup_milli": 1500,
            "replica_hour_picos": 10**12,
        },
    ),
    (
        "RentReplicas",
        lambda m: {
            "organization": m["org"],
            "end_user": "carol",
            "model": MODEL,
            "replica_count": 1,
        },
    ),
    (
        "EndReplicaRental",
        lambda m: {"organization": m["org"], "rental_id": m["RentReplicas"].rental.rental_id},
    ),
    (
        "CloseProject",
        lambda m: {
            "project": f"{m['org']}/third",
            "confirm_name": "third",
            "reason": "it has ended",
        },
    ),
    ("UpdateOrganization", lambda m: {"organization": m["org"], "name": f"{m['org']}-new"}),
    (
        "CloseOrganization",
        lambda m: {
            "organization": f"{m['org']}-new",
            "confirm_name": f"{m['org']}-new",
            "reason": "they have left",
            "remaining_credit": "REMAINING_CREDIT_EXPIRE",
        },
    ),
]
READS = ("Get", "List", "Export", "Verify", "Simulate")
NOT_WALKED = {
    "PreviewQuota": "changes nothing, and writes no entry",
    "BindOrganization": "needs a fleet with regions; see test_regions.py",
    "KillRequest": "needs a running request; see test_live_requests.py",
    "ExpireOverdueHolds": "does what a worker does anyway, and writes no entry",
    "TestAlertWebhook": "sends a message, and changes nothing",
    "DrainReplica": "takes an engine from the shared service; see test_live_requests.py",
    "UndrainReplica": "follows a drain",
    "ApplyFleet": "replaces the models of the shared service; see test_fleet_changes.py",
}


async def join(
    service: Service, inviter: Calls, tenant: Tenant, role: str, name: str = ""
) -> tuple[str, str]:
    """Invite a new person, accept, and return its address and the secret of its own key."""
    email = f"{name or role}-{uuid.uuid4().hex[:12]}@example.com"
    invited = await inviter("InviteMember", organization=tenant.name, email=email, role=role)
    async with calls(service, invited.token) as invitee:
        accepted = await invitee("AcceptInvitation", display_name=role.title(), create_key=True)
    assert (accepted.member.email, accepted.member.role) == (email, role)
    return email, accepted.secret


@pytest.fixture
async def tenant(service: Service) -> Tenant:
    return await service.tenant()


async def test_a_person_joins_works_and_leaves(service: Service, tenant: Tenant) -> None:
    _, root = await service.new_key(tenant, "admin")
    of_tenant = {"organization": tenant.name}
    async with calls(service, root) as operator:
        owner_email, owner_secret = await join(service, operator, tenant, "owner")
        async with calls(service, owner_secret) as owner:
            email, secret = await join(service, owner, tenant, "developer")
            async with calls(service, secret) as developer:
                key = await developer("CreateApiKey", **of_tenant, project="main", name="program")
                refused = await developer.refused(
                    "InviteMember", **of_tenant, email="x@example.com", role="viewer"
                )
                assert refused.reason == "PERMISSION_DENIED"
                own = await developer(
                    "CreateApiKey", **of_tenant, project="main", name="mine", own=True
                )
                assert own.api_key.person_id
                members = (await developer("ListMembers", **of_tenant)).members
            assert {each.email for each in members} == {owner_email, email}

            changed = await owner("UpdateMember", **of_tenant, member=email, role="viewer")
            assert changed.member.role == "viewer"
            async with calls(service, secret) as viewer:
                denied = await viewer.refused(
                    "CreateApiKey", **of_tenant, project="main", name="no"
                )
                assert denied.reason == "PERMISSION_DENIED", "its own key has the new role"

            unclear = await owner.refused("RemoveMember", **of_tenant, member=email)
            assert key.api_key.prefix in unclear.status.message
            removed = await owner("RemoveMember", **of_tenant, member=email, revoke_keys=False)
            assert list(removed.kept_keys) == [key.api_key.prefix]
            async with calls(service, secret) as former:
                assert (await former.refused("ListMembers", **of_tenant)).code is (
                    StatusCode.UNAUTHENTICATED
                )
            last = await owner.refused("RemoveMember", **of_tenant, member=owner_email)
            assert (last.code, last.reason) == (StatusCode.FAILED_PRECONDITION, "LAST_OWNER")
        by_owner = (await operator("ListAuditEntries", actor=owner_email)).entries
        assert {each.action for each in by_owner} >= {"member.update", "member.remove"}
        assert len({each.actor_person_id for each in by_owner}) == 1
        deactivated = await operator.refused("DeactivatePerson", person=owner_email)
        assert deactivated.reason == "LAST_OWNER"


async def test_nobody_gives_changes_or_takes_more_than_it_may(
    service: Service, tenant: Tenant
) -> None:
    _, root = await service.new_key(tenant, "admin")
    of_tenant = {"organization": tenant.name}
    async with calls(service, root) as operator:
        owner, owner_secret = await join(service, operator, tenant, "owner")
        _, secret = await join(service, operator, tenant, "admin")
        pending = await operator("InviteMember", **of_tenant, email="o@example.com", role="owner")
        account = await operator("CreateServiceAccount", **of_tenant, name="billing", role="owner")
        keys = (await operator("ListApiKeys", **of_tenant)).api_keys
        [of_owner] = [each for each in keys if each.prefix == owner_secret[:11]]
    async with calls(service, secret) as admin:
        invitation = pending.invitation.invitation_id
        new = {"email": "new@example.com"}
        for call, fields in (
            ("InviteMember", {**new, "role": "owner"}),
            ("InviteMember", {**new, "role": "finance"}),
            ("InviteMember", {**new, "role": "operator"}),
            ("ResendInvitation", {"invitation_id": invitation}),
            ("RevokeInvitation", {"invitation_id": invitation}),
            ("UpdateMember", {"member": owner, "role": "viewer"}),
            ("RemoveMember", {"member": owner}),
            ("CreateServiceAccount", {"name": "more", "role": "owner"}),
            ("UpdateServiceAccount", {"service_account": "billing", "role": "viewer"}),
            ("DeleteServiceAccount", {"service_account": "billing"}),
            (
                "CreateApiKey",
                {"service_account": "billing", "project": "main", "name": "theirs"},
            ),
        ):
            within = {} if "invitation_id" in fields else of_tenant
            refused = await admin.refused(call, **within, **fields)
            assert refused.reason == "ROLE_EXCEEDED", (call, fields, refused)
        assert account.service_account.key_count == 0
    async with calls(service, root) as operator:
        stolen = await operator.refused("RotateApiKey", api_key=of_owner.prefix)
        assert stolen.code is StatusCode.PERMISSION_DENIED
        assert "who alone may replace its secret" in stolen.status.message
    async with calls(service, owner_secret) as itself:
        assert (await itself("RotateApiKey", api_key=of_owner.prefix)).secret


async def test_owned_keys_have_the_role_of_their_owner(service: Service, tenant: Tenant) -> None:
    _, root = await service.new_key(tenant, "admin")
    within = {"organization": tenant.name, "project": "main"}
    async with calls(service, root) as operator:
        refused = await operator.refused("CreateApiKey", **within, name="k", own=True)
        assert "needs the key of a person" in refused.status.message
        _, secret = await join(service, operator, tenant, "owner")
        await operator(
            "CreateServiceAccount", organization=tenant.name, name="ci", role="developer"
        )
    async with calls(service, secret) as owner:
        made = await owner("CreateApiKey", **within, name="ci", service_account="ci")
        assert (made.api_key.role, list(made.api_key.scopes)) == ("developer", [])
        for fields in (
            {"service_account": "ci", "role": "viewer"},
            {"service_account": "ci", "scopes": ["billing"]},
            {"own": True, "role": "admin"},
            {"own": True, "scopes": ["billing"]},
            {"own": True, "service_account": "ci"},
        ):
            wrong = await owner.refused("CreateApiKey", **within, name="k", **fields)
            assert wrong.code is StatusCode.INVALID_ARGUMENT, fields


async def test_only_a_token_accepts_an_invitation(service: Service, tenant: Tenant) -> None:
    _, owner = await service.new_key(tenant, role="owner")
    async with calls(service, owner) as key:
        assert (await key.refused("AcceptInvitation")).reason == "PERMISSION_DENIED"
    async with calls(service, None) as nobody:
        assert (await nobody.refused("AcceptInvitation")).code is StatusCode.UNAUTHENTICATED
    async with calls(service, "wi_" + "a" * 43) as guess:
        refused = await guess.refused("AcceptInvitation")
        assert (refused.code, refused.reason) == (StatusCode.UNAUTHENTICATED, "INVITATION_INVALID")
        assert (await guess.refused("ListMembers")).reason == "UNAUTHENTICATED", "it is not a key"


async def test_every_change_names_person_role_address_and_both_states(
    service: Service, victim: Victim
) -> None:
    """A new call that changes something needs a row in `ACTS`."""
    changing = {
        each.name
        for each in methods()
        if each.containing_service.name in ("AdminService", "BillingService")
        and not each.name.startswith(READS)
    }
    assert {name for name, _ in ACTS} == changing - NOT_WALKED.keys()

    _, root = await service.new_key(victim.tenant, "admin")
    made: Made = victim.things | {"victim": victim.tenant.name}
    async with calls(service, root) as operator:
        _, first = await join(service, operator, victim.tenant, "operator")
        _, second = await join(service, operator, victim.tenant, "operator")
    made["email"] = f"{uuid.uuid4().hex}@example.com"
    async with (
        calls(service, first) as ann,
        calls(service, second) as bob,
        calls(service, root) as other,
    ):
        for name, fields in ACTS:
            before = (await other("ListAuditEntries", page_size=1)).entries[0].entry_id
            caller = {"ApproveAdjustment": bob}.get(name, ann)
            if name == "AcceptInvitation":
                async with calls(service, made["ResendInvitation"].token) as invitee:
                    made[name] = await invitee(name, **fields(made))
            else:
                made[name] = await caller(name, **fields(made))
            if name == "CreateOrganization":
                made["org"] = made[name].organization.name
                await ann("CreateProject", organization=made["org"], name="main")
            entries = [
                each
                for each in (await other("ListAuditEntries", page_size=20)).entries
                if each.entry_id > before
            ]
            written = [each for each in entries if each.actor_person_id]
            assert written, name
            for entry in written:
                assert entry.names[entry.actor_person_id], name
                assert entry.actor_role in ("operator", "viewer"), name
                assert entry.actor_address in ("127.0.0.1", "::1"), (name, entry.actor_address)
                assert entry.before_json or entry.after_json, name
            if name not in ("AcceptInvitation",):
                assert written == entries, f"{name} has an entry without its author"
