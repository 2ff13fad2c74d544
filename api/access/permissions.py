"""Permissions of API keys: the one table of the calls that need each, and of its roles.

Every RPC has one permission. Calls over HTTP and of the console are checked as the RPCs that they
correspond to. A key that is not the operator's acts within its own organization only, which
`metering/store/border.py` ensures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import NoReturn

from api.core.errors import PermissionDenied, RoleExceeded
from metering.tenants.authentication import Principal
from metering.tenants.key_terms import KeyTerms, authority_of, effective_scopes
from metering.tenants.networks import checked_networks, contains, networks_of


class Role(StrEnum):
    """Scope of a key, or its role in its organization: it authorizes calls.

    The widest is first.
    """

    OPERATOR = "admin"  # administration of the whole service, without use of models
    OWNER = "role:owner"
    ADMIN = "role:admin"
    DEVELOPER = "role:developer"
    FINANCE = "role:finance"
    VIEWER = "role:viewer"
    # Read usage and bills of its own organization, and set its resale prices; no prompts or keys.
    BILLING = "billing"
    MODELS = "inference"  # use models; read own requests and quotas

    @property
    def word(self) -> str:
        """Name in the audit log and in the table of the documentation."""
        return "operator" if self is Role.OPERATOR else self.value.removeprefix("role:")

    @property
    def shown(self) -> str:
        """Name in errors, which says how a key gets it."""
        kind, _, name = self.value.rpartition(":")
        return f"role {name}" if kind else f"scope {name}"


Roles = frozenset[Role]
OPERATOR = frozenset({Role.OPERATOR})
MODELS = frozenset({Role.MODELS})
ADMINS = OPERATOR | {Role.OWNER, Role.ADMIN}
DEVELOPERS = ADMINS | {Role.DEVELOPER}
FINANCE = OPERATOR | {Role.OWNER, Role.FINANCE}
RESELLERS = FINANCE | {Role.BILLING}
BILL_READERS = ADMINS | RESELLERS | {Role.VIEWER}
READERS = BILL_READERS | {Role.DEVELOPER}
MEMBERS = READERS - {Role.BILLING}


@dataclass(frozen=True, slots=True)
class Permission:
    """Permission by name, the roles that have it, and the calls that need it."""

    name: str
    roles: Roles
    calls: tuple[str, ...]


def permit(name: str, roles: Roles, *calls: str) -> Permission:
    return Permission(name, roles, calls)


# By service. The row of a new RPC is its name, beside the calls that need the same permission.
PERMISSIONS: Mapping[str, tuple[Permission, ...]] = {
    "weir.v1.InferenceService": (
        permit("models.use", MODELS, "Generate", "Embed", "CountTokens", "Quote", "ListModels"),
        permit("own_usage.read", MODELS, "GetQuota", "GetGeneration", "GetOwnUsage"),
    ),
    "weir.v1.AdminService": (
        permit("organizations.create", OPERATOR, "CreateOrganization"),
        permit("organizations.read", MEMBERS, "ListOrganizations"),
        permit("billing_profile.set", FINANCE, "SetBillingProfile"),
        permit("projects.create", ADMINS, "CreateProject"),
        permit("projects.read", MEMBERS, "ListProjects"),
        permit("keys.create", DEVELOPERS, "CreateApiKey"),
        permit("keys.change", DEVELOPERS, "RotateApiKey", "UpdateApiKey", "RevokeApiKey"),
        permit("keys.read", MEMBERS, "ListApiKeys"),
        permit("quotas.set", ADMINS, "SetQuota", "OverrideQuota", "DeleteQuota"),
        permit("quotas.read", MEMBERS, "ListQuotas"),
        permit("prices.set", OPERATOR, "SetPrice", "WithdrawPrice", "SimulatePrices"),
        permit("prices.read", MEMBERS, "ListPrices"),
        permit("plans.set", OPERATOR, "CreatePlan", "ListPlans", "AssignPlan"),
        permit("credit.grant", OPERATOR, "GrantCredit", "SetPrepaid"),
        permit(
            "credit.read", BILL_READERS - {Role.BILLING}, "ListCreditGrants", "GetCreditBalance"
        ),
        permit("audit.read", ADMINS, "ListAuditEntries"),
        permit(
            "requests.control",
            OPERATOR,
            *("ListLiveRequests", "GetRequest", "KillRequest", "ExpireOverdueHolds"),
        ),
        permit("fleet.read", OPERATOR, "ListReplicas"),
        permit("fleet.change", OPERATOR, "DrainReplica", "UndrainReplica"),
        permit(
            "webhooks.set",
            ADMINS,
            *("SetAlertWebhook", "DeleteAlertWebhook", "TestAlertWebhook", "ListAlertWebhooks"),
        ),
        permit("configuration.apply", OPERATOR, "ApplyConfiguration", "ExportConfiguration"),
        permit("end_users.erase", OPERATOR, "EraseEndUser"),
    ),
    "weir.v1.BillingService": (
        permit("usage.read", READERS, "GetUsage"),
        permit("end_users.read", BILL_READERS, "ListEndUsers", "GetEndUser"),
        permit("alerts.read", BILL_READERS, "ListAlerts"),
        permit(
            "bills.read",
            BILL_READERS,
            *("GetMonthReport", "GetForecast", "ExportMonth", "GetMonthDocument", "ListMonths"),
            *("VerifyMonth", "GetReconciliation", "GetInvoice", "ListAdjustments"),
        ),
        permit("resale.set", RESELLERS, "SetResalePrice", "RentReplicas", "EndReplicaRental"),
        permit(
            "resale.read",
            BILL_READERS,
            *("ListResalePrices", "ListReplicaRentals"),
            *("ListResaleStatements", "GetResaleStatement"),
        ),
        permit("month.close", OPERATOR, "CloseMonth"),
        permit(
            "adjustments.decide",
            OPERATOR,
            *("CreateAdjustment", "CreateCreditNote", "ApproveAdjustment", "RejectAdjustment"),
        ),
    ),
    "weir.v1.ReceiptService": (
        permit("receipt_keys.read", frozenset(Role), "ListReceiptKeys"),  # public keys: no secret
        permit("receipts.read", BILL_READERS, "ListReceipts", "GetReceiptMonth"),
    ),
}


def _by_method() -> Iterator[tuple[str, Permission]]:
    for service, permissions in PERMISSIONS.items():
        for permission in permissions:
            yield from ((f"/{service}/{call}", permission) for call in permission.calls)


# Keys: gRPC paths
PERMISSION_OF: Mapping[str, Permission] = dict(_by_method())
ROLES_OF: Mapping[str, Roles] = {path: each.roles for path, each in PERMISSION_OF.items()}


@cache
def permissions_of(authority: frozenset[str]) -> frozenset[str]:
    """Return the names of the permissions that scopes and role of a key give together."""
    return frozenset(
        each.name
        for permissions in PERMISSIONS.values()
        for each in permissions
        if not each.roles.isdisjoint(authority)
    )


def role_of(principal: Principal) -> Role:
    """Return the widest role of a principal."""
    return next(each for each in Role if each in principal.scopes)


def is_operator(principal: Principal) -> bool:
    return Role.OPERATOR in principal.scopes


def named(roles: Collection[str]) -> str:
    """List roles as in "role owner, role admin or scope billing"."""
    *most, last = (each.shown for each in Role if each in roles)
    return f"{', '.join(most)} or {last}" if most else last


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
