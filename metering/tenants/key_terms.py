"""Terms of API keys: what a key may do, declared once and carried whole.

Calls, configurations, the table, the audit log and the caller of a request have fields of the same
names. A new term is one field of `KeyTerms`, with a check if its type does not suffice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from metering.core.errors import InvalidValue
from metering.core.models import values_of
from metering.tenants.networks import checked_networks

MODEL_NAME_MAX_CHARS = 200
MODELS_PER_KEY_MAX = 100  # a key for more models should rather be unrestricted
SCIM = "scim"  # provisions members and groups, and can do nothing else
SCOPES = frozenset({"inference", "admin", "billing", SCIM})
# In the organization of the key; `api/access/permissions.py` has their permissions.
ROLES = ("owner", "admin", "developer", "finance", "viewer")
AUTHORITY = {"": frozenset[str](), **{each: frozenset({f"role:{each}"}) for each in ROLES}}
WITHOUT_ROLE = frozenset(
    {"admin", "billing", SCIM}
)  # scopes of keys that have their rights already
# Per request: above any context window, and far below the column's maximum.
TOKENS_MAX = 1_000_000_000
GROUP_MAX_CHARS = 100


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """Terms of a key, by the columns of `ApiKey`. The defaults allow inference without limits.

    Empty `scopes` are "inference", or none with a `role`. Empty `models` and `allowed_networks`
    allow all. The token limits are per request, all choices together; None means the model's own
    limit. An empty `group` or `role` is none.
    """

    scopes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    strict_parameters: bool = False
    group: str = ""
    role: str = ""


DEFAULT_TERMS = KeyTerms()


def checked_terms(terms: KeyTerms) -> dict[str, object]:
    """Validate the terms of a key and convert them to column values. Raises: InvalidValue."""
    return values_of(KeyTerms, terms) | {
        "scopes": checked_scopes(terms.scopes, terms.role),
        "models": checked_models(terms.models),
        "allowed_networks": checked_networks(terms.allowed_networks),
        "max_input_tokens": checked_bound(terms.max_input_tokens, "max_input_tokens"),
        "max_output_tokens": checked_bound(terms.max_output_tokens, "max_output_tokens"),
        "group": checked_group(terms.group) if terms.group else "",
    }


def checked_scopes(scopes: Collection[str], role: str = "") -> list[str]:
    """Validate the role of a key, and validate and sort its scopes. Raises: InvalidValue."""
    if unknown := set(scopes) - SCOPES:
        raise InvalidValue("scopes", f"{min(unknown)!r} is not one of {', '.join(sorted(SCOPES))}")
    if role and role not in ROLES:
        remedy = ": the operator of the service has the scope admin" if role == "operator" else ""
        raise InvalidValue("role", f"{role[:20]!r} is not one of {', '.join(ROLES)}{remedy}")
    if SCIM in scopes and len(set(scopes)) > 1:
        raise InvalidValue(
            "scopes", "cannot have scim beside others: create a key for provisioning alone"
        )
    if role and not WITHOUT_ROLE.isdisjoint(scopes):
        raise InvalidValue(
            "role",
            f"cannot be combined with the scope {min(WITHOUT_ROLE.intersection(scopes))}: a role is"
            " for keys without a scope, or with the scope inference only; create another key",
        )
    return sorted(effective_scopes(scopes, role))


def effective_scopes(scopes: Collection[str], role: str) -> frozenset[str]:
    """Return the scopes of a key: without any, and without a role, it has "inference"."""
    return frozenset(scopes or (() if role else ("inference",)))


def authority_of(scopes: Collection[str], role: str) -> frozenset[str]:
    """Return what calls are authorized by: the scopes of a key, and its role as `role:NAME`."""
    return frozenset(scopes).union(AUTHORITY.get(role, ()))


def checked_models(models: Collection[str]) -> list[str]:
    """Validate and sort model names; none means every model. Raises: InvalidValue."""
    if len(set(models)) > MODELS_PER_KEY_MAX:
        raise InvalidValue(
            "models", f"must have at most {MODELS_PER_KEY_MAX}, or none for every model"
        )
    if not all(1 <= len(model) <= MODEL_NAME_MAX_CHARS and model.isprintable() for model in models):
        raise InvalidValue(
            "models", f"must be names of 1 to {MODEL_NAME_MAX_CHARS} printable characters"
        )
    return sorted(set(models))


def checked_bound(token_count: int | None, field: str) -> int | None:
    """Validate a token limit per request; 0 and None mean no limit. Raises: InvalidValue."""
    if token_count is not None and not 0 <= token_count <= TOKENS_MAX:
        raise InvalidValue(
            field, f"must be 1 to {TOKENS_MAX:,} tokens, or 0 for no limit of the key"
        )
    return token_count or None


def checked_group(group: str, field: str = "group") -> str:
    """Validate the name of a group of keys and return it unchanged. Raises: InvalidValue."""
    if not 1 <= len(group) <= GROUP_MAX_CHARS or not group.isprintable() or group != group.strip():
        raise InvalidValue(
            field,
            f"a group must have 1 to {GROUP_MAX_CHARS} printable characters, without a space at"
            f" either end, got {group[: GROUP_MAX_CHARS + 1]!r}",
        )
    return group
