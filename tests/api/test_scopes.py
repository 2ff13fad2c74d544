"""Consistency of the table of scopes and the contract."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import weir.v1

from api.access.scopes import BY_SERVICE, SCOPES, Scope
from api.core.health import SERVICES
from metering.tenants.key_terms import SCOPES as SCOPES_OF_KEYS


def methods_of_the_contract() -> Iterator[str]:
    """Return the paths of all calls of all services."""
    for module in pkgutil.iter_modules(weir.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = import_module(f"weir.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


RESALE = ("SetResalePrice", "RentReplicas", "EndReplicaRental")


def test_every_call_of_the_contract_has_its_scopes_and_no_other_call_has() -> None:
    in_contract = set(methods_of_the_contract())

    assert len(in_contract) > 50, "a walk that finds nothing proves nothing"
    assert set(SCOPES) == in_contract
    assert all(SCOPES.values()), "a call that needs no scope would be open to every key"


def test_no_call_is_listed_twice() -> None:
    names = [name for groups in BY_SERVICE.values() for group in groups.values() for name in group]

    assert len(names) == len(SCOPES)
    assert set(BY_SERVICE) == set(SERVICES)


def test_keys_can_have_these_scopes_and_no_others() -> None:
    assert {str(scope) for scope in Scope} == SCOPES_OF_KEYS


def test_finance_changes_nothing_but_what_it_charges_itself() -> None:
    """Calls of finance must begin with a verb of reading; resale is on no invoice."""
    for path, scopes in SCOPES.items():
        name = path.rpartition("/")[2]
        if Scope.BILLING in scopes and name not in RESALE:
            assert path.rpartition("/")[2].startswith(("Get", "List", "Export", "Verify")), path
