"""Consistency of the table of permissions and the contract, and what a key may give to another."""

from __future__ import annotations

import pkgutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module

import pytest
import weir.v1

from api.access.permissions import (
    PERMISSION_OF,
    PERMISSIONS,
    PROVISION,
    ROLES_OF,
    check_may_give,
    check_permissions,
    permissions_of,
)
from api.access.roles import Role
from api.core.errors import RoleExceeded
from api.core.health import SERVICES
from metering.tenants.authentication import Principal
from metering.tenants.key_terms import ROLES, SCOPES, KeyTerms, authority_of
from metering.tenants.networks import networks_of

CHANGES_OF_FINANCE = ("SetResalePrice", "RentReplicas", "EndReplicaRental", "SetBillingProfile")
TOMORROW = datetime.now(UTC) + timedelta(days=1)
GIVEN = [
    ("owner", KeyTerms(role="owner"), ""),
    ("owner", KeyTerms(role="finance"), ""),
    ("owner", KeyTerms(("billing",)), ""),
    ("owner", KeyTerms(("scim",)), ""),
    ("owner", KeyTerms(("admin",)), "permission"),
    ("admin", KeyTerms(("scim",)), "permission members.provision"),
    ("admin", KeyTerms(role="admin"), ""),
    ("admin", KeyTerms(role="owner"), "permission billing_profile.set"),
    ("admin", KeyTerms(role="finance"), "permission billing_profile.set"),
    ("admin", KeyTerms(("inference", "admin")), "permission"),
    ("developer", KeyTerms(), ""),
    ("developer", KeyTerms(("inference",), role="developer"), ""),
    ("developer", KeyTerms(role="viewer"), "permission"),
    ("developer", KeyTerms(role="admin"), "permission"),
    ("developer", KeyTerms(("billing",)), "permission"),
    ("viewer", KeyTerms(role="developer"), "permission keys.change, keys.create"),
    ("finance", KeyTerms(role="owner"), "permission"),
]
NARROW = {
    "models": ("small",),
    "allowed_networks": ("10.0.0.0/8", "2001:db8::/32"),
    "max_input_tokens": 100,
}
WITHIN = KeyTerms(
    role="developer", models=("small",), allowed_networks=("10.1.0.0/16",), max_input_tokens=50
)


def methods_of_the_contract() -> Iterator[str]:
    """Return the paths of all calls of all services."""
    for module in pkgutil.iter_modules(weir.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = import_module(f"weir.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def test_every_call_of_the_contract_has_a_permission_and_no_other_call_has() -> None:
    in_contract = set(methods_of_the_contract())

    assert len(in_contract) > 50, "a walk that finds nothing proves nothing"
    assert set(PERMISSION_OF) == in_contract | {PROVISION}
    assert all(ROLES_OF.values()), "a call that needs no role would be open to every key"


def test_no_call_is_listed_twice_and_no_permission_has_two_sets_of_roles() -> None:
    rows = [row for rows in PERMISSIONS.values() for row in rows]

    assert sum(len(row.calls) for row in rows) == len(PERMISSION_OF)
    assert len({row.name for row in rows}) == len(rows)
    assert set(PERMISSIONS) == {*SERVICES, "scim.v2"}


def test_the_roles_are_the_scopes_and_the_roles_of_keys() -> None:
    of_keys = {*SCOPES, *(f"role:{each}" for each in ROLES)}

    assert {str(each) for each in Role} == of_keys | {"invitation"}


@pytest.mark.parametrize("role", [Role.FINANCE, Role.BILLING, Role.VIEWER])
def test_finance_changes_nothing_but_what_it_charges_itself(role: Role) -> None:
    """Calls of readers must begin with a verb of reading; resale is on no invoice."""
    for path, roles in ROLES_OF.items():
        name = path.rpartition("/")[2]
        if role in roles and (role is Role.VIEWER or name not in CHANGES_OF_FINANCE):
            assert name.startswith(("Get", "List", "Export", "Verify")), path


def test_the_operator_has_every_permission_but_the_use_of_models() -> None:
    of_operator = permissions_of(frozenset({"admin"}))

    every = {each.name for rows in PERMISSIONS.values() for each in rows}
    of_callers = {"models.use", "own_usage.read", "client_tokens.create", "invitations.accept"}
    of_callers.add(
        "members.provision"
    )  # in the organization of the key, which the operator's leaves
    assert every - of_operator == of_callers


def maker(role: str, **terms: object) -> Principal:
    held = KeyTerms(role=role, **terms)  # type: ignore[arg-type]
    return Principal(
        *(uuid.uuid4(), "wk_maker000", uuid.uuid4(), uuid.uuid4(), "USD"),
        scopes=authority_of(held.scopes, held.role),
        networks=networks_of(held.allowed_networks),
        terms=held,
    )


@pytest.mark.parametrize(("role", "terms", "excess"), GIVEN)
def test_a_key_gives_only_permissions_that_it_has(role: str, terms: KeyTerms, excess: str) -> None:
    if not excess:
        check_may_give(maker(role), terms, None)
        return
    with pytest.raises(RoleExceeded, match=excess):
        check_may_give(maker(role), terms, None)
    with pytest.raises(RoleExceeded, match=excess):
        check_permissions(maker(role), terms)


@pytest.mark.parametrize(
    ("change", "excess"),
    [
        ({}, ""),
        ({"allowed_networks": ("2001:db8:1::/48", "10.0.0.1/32")}, ""),
        ({"models": ()}, "models besides small"),
        ({"models": ("small", "large")}, "models besides small"),
        ({"max_input_tokens": None}, "max_input_tokens above 100"),
        ({"max_input_tokens": 0}, "max_input_tokens above 100"),
        ({"max_input_tokens": 101}, "max_input_tokens above 100"),
        ({"allowed_networks": ()}, "networks besides 10.0.0.0/8"),
        ({"allowed_networks": ("0.0.0.0/0",)}, "networks besides"),
        ({"allowed_networks": ("10.1.0.0/16", "11.0.0.0/8")}, "networks besides"),
        ({"allowed_networks": ("::/0",)}, "networks besides"),
    ],
)
def test_a_key_gives_no_wider_terms_than_its_own(change: dict[str, object], excess: str) -> None:
    terms = replace(WITHIN, **change)  # type: ignore[arg-type]
    narrow = replace(maker("developer", **NARROW), expires_at=TOMORROW)

    if not excess:
        check_may_give(narrow, terms, TOMORROW)
        return
    with pytest.raises(RoleExceeded, match=excess):
        check_may_give(narrow, terms, TOMORROW)


@pytest.mark.parametrize("expires_at", [None, TOMORROW + timedelta(seconds=1)])
def test_a_key_with_a_role_does_not_outlive_its_maker(expires_at: datetime | None) -> None:
    short = replace(maker("developer"), expires_at=TOMORROW)

    check_may_give(short, KeyTerms(), expires_at)  # for models only
    with pytest.raises(RoleExceeded, match="a life beyond"):
        check_may_give(short, KeyTerms(role="developer"), expires_at)


def test_the_operator_gives_everything() -> None:
    operator = maker("", scopes=("admin",), allowed_networks=("10.0.0.0/8",))

    check_may_give(operator, KeyTerms(("admin",)), None)
    check_permissions(operator, KeyTerms(("admin",)))
