"""Permissions of API keys: the one table of the calls that need each, and of its roles.

Every RPC has one permission. Calls over HTTP and of the console are checked as the RPCs that they
correspond to; SCIM has a row of its own. A key that is not the operator's acts within its own
organization only, which `metering/store/border.py` ensures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import NoReturn

from api.access.roles import Permission, Role, allowed, is_operator, named
from api.core.errors import PermissionDenied, RoleExceeded
from metering.tenants.authentication import Principal
from metering.tenants.key_terms import KeyTerms, authority_of, effective_scopes
from metering.tenants.networks import checked_networks, contains, networks_of

OPERATOR = frozenset({Role.OPERATOR})
MODELS = frozenset({Role.MODELS})
OWNERS = OPERATOR | {Role.OWNER}
ADMINS = OPERATOR | {Role.OWNER, Role.ADMIN}
DEVELOPERS = ADMINS | {Role.DEVELOPER}
FINANCE = OPERATOR | {Role.OWNER, Role.FINANCE}
RESELLERS = FINANCE | {Role.BILLING}
BILL_READERS = ADMINS | RESELLERS | {Role.VIEWER}
READERS = BILL_READERS | {Role.DEVELOPER}
MEMBERS = READERS - {Role.BILLING}
INVITED = frozenset({Role.INVITED})
PROVISIONING = frozenset({Role.PROVISIONING, Role.OWNER})
EVERY_KEY = frozenset(Role) - INVITED


# By service. The row of a new RPC is its name, beside the calls that need the same permission.
PERMISSIONS: Mapping[str, tuple[Permission, ...]] = {
    "weir.v1.InferenceService": (
        allowed("models.use", MODELS, "Generate", "Embed", "CountTokens", "Quote", "ListModels"),
        allowed("own_usage.read", MODELS, "GetQuota", "GetGeneration", "GetOwnUsage"),
        allowed("client_tokens.create", MODELS, "CreateClientToken", "RevokeClientTokens"),
    ),
    "weir.v1.AdminService": (
        allowed("organizations.create", OPERATOR, "CreateOrganization"),
        allowed("organizations.suspend", OPERATOR, "SuspendOrganization", "ResumeOrganization"),
        allowed("organizations.close", OPERATOR, "CloseOrganization"),
        allowed("organizations.bind", OPERATOR, "BindOrganization"),
        allowed("organizations.rename", OWNERS, "UpdateOrganization"),
        allowed("organizations.read", MEMBERS, "ListOrganizations"),
        allowed("billing_profile.set", FINANCE, "SetBillingProfile"),
        allowed("projects.create", ADMINS, "CreateProject"),
        allowed("projects.change", ADMINS, *("UpdateProject", "SuspendProject", "ResumeProject")),
        allowed("projects.close", OWNERS, "CloseProject"),
        allowed("projects.read", MEMBERS, "ListProjects"),
        allowed("keys.create", DEVELOPERS, "CreateApiKey"),
        allowed("keys.change", DEVELOPERS, "RotateApiKey", "UpdateApiKey", "RevokeApiKey"),
        allowed("keys.read", MEMBERS, "ListApiKeys"),
        allowed(
            "quotas.set", ADMINS, *("SetQuota", "PreviewQuota", "OverrideQuota", "DeleteQuota")
        ),
        allowed("quotas.read", MEMBERS, "ListQuotas"),
        allowed("prices.set", OPERATOR, "SetPrice", "WithdrawPrice", "SimulatePrices"),
        allowed("prices.read", MEMBERS, "ListPrices"),
        allowed("plans.set", OPERATOR, "CreatePlan", "ListPlans", "AssignPlan"),
        allowed("credit.grant", OPERATOR, "GrantCredit", "SetPrepaid"),
        allowed(
            "credit.read", BILL_READERS - {Role.BILLING}, "ListCreditGrants", "GetCreditBalance"
        ),
        allowed("audit.read", ADMINS, "ListAuditEntries", "ExportAuditEntries"),
        allowed(
            "requests.control",
            OPERATOR,
            *("ListLiveRequests", "GetRequest", "KillRequest", "ExpireOverdueHolds"),
        ),
        allowed("traffic.read", OPERATOR, "GetTraffic", "ListConcerns"),
        allowed("queue_weights.set", OPERATOR, "SetQueueWeight"),
        allowed("fleet.read", OPERATOR, "ListReplicas", "GetFleet", "ListFleetVersions"),
        allowed("fleet.change", OPERATOR, "DrainReplica", "UndrainReplica", "ApplyFleet"),
        allowed(
            "webhooks.set",
            ADMINS,
            *("SetAlertWebhook", "DeleteAlertWebhook", "TestAlertWebhook", "ListAlertWebhooks"),
        ),
        allowed("configuration.apply", OPERATOR, "ApplyConfiguration", "ExportConfiguration"),
        allowed("end_users.erase", OPERATOR, "EraseEndUser"),
        allowed("members.read", MEMBERS, "ListMembers"),
        allowed(
            "members.change",
            ADMINS,
            *("InviteMember", "ListInvitations", "ResendInvitation", "RevokeInvitation"),
            *("UpdateMember", "RemoveMember"),
        ),
        allowed("provisioning.read", ADMINS, "ListProvisionedGroups"),
        allowed("provisioning.set", OWNERS, "SetGroupRole"),
        allowed("invitations.accept", INVITED, "AcceptInvitation"),
        allowed("service_accounts.read", MEMBERS, "ListServiceAccounts"),
        allowed(
            "service_accounts.change",
            ADMINS,
            *("CreateServiceAccount", "UpdateServiceAccount", "DeleteServiceAccount"),
        ),
        allowed(
            "persons.change",
            OPERATOR,
            *("ListPersons", "UpdatePerson", "DeactivatePerson", "ReactivatePerson"),
            *("CreateSignInLink", "ErasePerson"),
        ),
        allowed("token_issuers.set", ADMINS, "CreateTokenIssuer", "DeleteTokenIssuer"),
        allowed("token_issuers.read", MEMBERS, "ListTokenIssuers"),
        allowed("tokens.revoke", ADMINS, "RevokeTokens"),
    ),
    "weir.v1.BillingService": (
        allowed("usage.read", READERS, "GetUsage"),
        allowed("end_users.read", BILL_READERS, "ListEndUsers", "GetEndUser"),
        allowed("alerts.read", BILL_READERS, "ListAlerts"),
        allowed(
            "bills.read",
            BILL_READERS,
            *("GetMonthReport", "GetForecast", "ExportMonth", "GetMonthDocument", "ListMonths"),
            *("VerifyMonth", "GetReconciliation", "GetInvoice", "ListAdjustments"),
        ),
        allowed("resale.set", RESELLERS, "SetResalePrice", "RentReplicas", "EndReplicaRental"),
        allowed(
            "resale.read",
            BILL_READERS,
            *("ListResalePrices", "ListReplicaRentals"),
            *("ListResaleStatements", "GetResaleStatement"),
        ),
        allowed("organizations.export", ADMINS, "ExportOrganization"),
        allowed("month.close", OPERATOR, "CloseMonth"),
        allowed(
            "adjustments.decide",
            OPERATOR,
            *("CreateAdjustment", "CreateCreditNote", "ApproveAdjustment", "RejectAdjustment"),
        ),
    ),
    "weir.v1.ReceiptService": (
        allowed("receipt_keys.read", EVERY_KEY, "ListReceiptKeys"),  # public keys: no secret
        allowed("receipts.read", BILL_READERS, "ListReceipts", "GetReceiptMonth"),
    ),
    # Not a service of the contract: requests below `/scim/v2/`
    "scim.v2": (allowed("members.provision", PROVISIONING, "Provision"),),
}
PROVISION = "/scim.v2/Provision"


def _by_method() -> Iterator[tuple[str, Permission]]:
    for service, permissions in PERMISSIONS.items():
        for permission in permissions:
            yield from ((f"/{service}/{call}", permission) for call in permission.calls)


# Keys: gRPC paths
PERMISSION_OF: Mapping[str, Permission] = dict(_by_method())
ROLES_OF: Mapping[str, frozenset[Role]] = {path: each.roles for path, each in PERMISSION_OF.items()}


@cache
def permissions_of(authority: frozenset[str]) -> frozenset[str]:
    """Return the names of the permissions that scopes and role of a key give together."""
    return frozenset(
        each.name
        for permissions in PERMISSIONS.values()
        for each in permissions
        if not each.roles.isdisjoint(authority)
    )


def refuse(principal: Principal, method: str) -> NoReturn:
    """Refuse a call whose permission the principal does not have. Raises: PermissionDenied."""
    needed = PERMISSION_OF[method]
    raise PermissionDenied(
        f"Your API key {principal.key_prefix} has the {named(principal.scopes)}, and this call"
        f" needs the permission {needed.name} of the {named(needed.roles)}. Use another key, or"
        " ask an administrator.",
        permission=needed.name,
    )


def check_permissions(maker: Principal, terms: KeyTerms) -> None:
    """Raise RoleExceeded if a key with these terms has permissions that its maker does not have.

    The use of models is none of them, because keys are made for that.
    """
    if not is_operator(maker) and (excess := _beyond_models(terms) - permissions_of(maker.scopes)):
        raise RoleExceeded(maker.key_prefix, f"the permission {', '.join(sorted(excess))}")


def check_may_give(maker: Principal, terms: KeyTerms, expires_at: datetime | None) -> None:
    """Raise RoleExceeded if a key with these terms can do more than its maker.

    The operator may give everything. Networks and expiry bind only keys that may do more than use
    models: a key for models is used elsewhere than the key of its administrator. Raises:
    InvalidValue for networks that are not valid.
    """
    if is_operator(maker):
        return
    check_permissions(maker, terms)
    held = maker.terms
    if held.models and not (terms.models and set(terms.models) <= set(held.models)):
        raise RoleExceeded(maker.key_prefix, f"models besides {', '.join(held.models)}")
    for name in ("max_input_tokens", "max_output_tokens"):
        limit, value = getattr(held, name), getattr(terms, name)
        if limit is not None and not 0 < (value or 0) <= limit:
            raise RoleExceeded(maker.key_prefix, f"{name} above {limit}")
    if not _beyond_models(terms):
        return
    if not _within(terms.allowed_networks, maker):
        networks = ", ".join(held.allowed_networks)
        raise RoleExceeded(maker.key_prefix, f"networks besides {networks}")
    if maker.expires_at is not None and (expires_at is None or expires_at > maker.expires_at):
        raise RoleExceeded(maker.key_prefix, f"a life beyond {maker.expires_at.isoformat()}")


def _beyond_models(terms: KeyTerms) -> frozenset[str]:
    authority = authority_of(effective_scopes(terms.scopes, terms.role), terms.role)
    return permissions_of(authority) - permissions_of(MODELS)


def _within(networks: Collection[str], maker: Principal) -> bool:
    """Return whether networks, none of which means all, are within those of a key."""
    parsed = networks_of(tuple(checked_networks(networks)))
    return not maker.networks or (
        bool(parsed)
        and all(any(contains(wide, each) for wide in maker.networks) for each in parsed)
    )
