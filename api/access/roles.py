"""Roles that authorize calls, from the scopes and the role of a key, and rows of permissions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from metering.tenants.authentication import Principal


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
    PROVISIONING = "scim"  # provision users and groups of its own organization over SCIM
    MODELS = "inference"  # use models; read own requests and quotas
    INVITED = "invitation"  # of the token of an invitation, which is not a key

    @property
    def word(self) -> str:
        """Name in the audit log and in the table of the documentation."""
        return "operator" if self is Role.OPERATOR else self.value.removeprefix("role:")

    @property
    def shown(self) -> str:
        """Name in errors, which says how a key gets it."""
        if self is Role.INVITED:
            return "token of an invitation"
        kind, _, name = self.value.rpartition(":")
        return f"role {name}" if kind else f"scope {name}"


@dataclass(frozen=True, slots=True)
class Permission:
    """Permission by name, the roles that have it, and the calls that need it."""

    name: str
    roles: frozenset[Role]
    calls: tuple[str, ...]


def allowed(name: str, roles: frozenset[Role], *calls: str) -> Permission:
    """Build a row of the table."""
    return Permission(name, roles, calls)


def role_of(principal: Principal) -> Role:
    """Return the widest role of a principal."""
    return next(each for each in Role if each in principal.scopes)


def is_operator(principal: Principal) -> bool:
    return Role.OPERATOR in principal.scopes


def named(roles: Collection[str]) -> str:
    """List roles as in "role owner, role admin or scope billing"."""
    *most, last = (each.shown for each in Role if each in roles)
    return f"{', '.join(most)} or {last}" if most else last
