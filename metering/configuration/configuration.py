"""What should be, as values: organizations, projects, keys, limits and prices; and the differences that lead there. Pure.

Field names are those of the published configuration, and those of a limit are the columns that hold them: one more attribute of a
limit is one more line in `QuotaSpec`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum

from metering.core.models import Quota, QuotaDimension
from metering.quotas.quota_rules import usual_thresholds
from metering.tenants.billing_profiles import BillingProfile

Value = str | int | bool | None | list[str] | list[int]


class Action(StrEnum):
    """What is done to one thing."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"  # it exists, is not named, and stays


@dataclass(frozen=True, slots=True)
class QuotaPlace:
    """Which limit of its subject."""

    dimension: QuotaDimension
    model: str = ""
    for_new_keys: bool = False


@dataclass(frozen=True, slots=True)
class QuotaSpec:
    """How a limit is set. alert_at: None is as usual. A raise is all three of its fields or none; none leaves one that stands."""

    limit_value: int
    enforced: bool = True
    input_weight_milli: int = 1000
    cached_input_weight_milli: int = 1000
    output_weight_milli: int = 1000
    alert_at: tuple[int, ...] | None = None
    raised_limit_value: int | None = None
    raised_until: datetime | None = None
    raise_reason: str | None = None

    @classmethod
    def of(cls, quota: Quota, now: datetime) -> QuotaSpec:
        """A limit as it stands. A raise whose time has passed is none."""
        spec = cls(**{each.name: getattr(quota, each.name) for each in fields(cls)})
        said = said_thresholds(QuotaDimension(quota.dimension), quota.alert_at)
        return replace(spec, alert_at=said).without_past_raise(now)

    def without_past_raise(self, now: datetime) -> QuotaSpec:
        """The same, but for a raise that is over."""
        if self.raised_until is None or self.raised_until > now:
            return self
        return QuotaSpec(**{each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("raise")})


@dataclass(frozen=True, slots=True)
class KeySpec:
    """A key. prefix: empty where the name alone says which. The names of what it is good for are those of its columns."""

    name: str
    prefix: str = ""
    scopes: tuple[str, ...] = ("inference",)
    models: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    expires_at: datetime | None = None
    quotas: tuple[tuple[QuotaPlace, QuotaSpec], ...] = ()
    prune_quotas: bool = False


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """A project with its keys."""

    name: str
    quotas: tuple[tuple[QuotaPlace, QuotaSpec], ...] = ()
    keys: tuple[KeySpec, ...] = ()
    prune_quotas: bool = False
    prune_keys: bool = False


@dataclass(frozen=True, slots=True)
class OrganizationSpec:
    """A customer with its projects. currency_code: empty for any, and USD for a new one.

    billing_profile: None leaves it as it is.
    """

    name: str
    currency_code: str = ""
    quotas: tuple[tuple[QuotaPlace, QuotaSpec], ...] = ()
    projects: tuple[ProjectSpec, ...] = ()
    prune_quotas: bool = False
    billing_profile: BillingProfile | None = None


@dataclass(frozen=True, slots=True)
class PriceSpec:
    """What a model costs: by the list, or one customer as its own price. None for what stays as it is.

    currency_code: empty for the organization's, or USD. effective_at: None, or a time that has passed, for now.
    """

    model: str
    currency_code: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    embedding_picos_per_token: int | None = None
    batch_multiplier_milli: int | None = None
    organization: str = ""
    effective_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """All that a document says."""

    organizations: tuple[OrganizationSpec, ...] = ()
    prices: tuple[PriceSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field that becomes different. None for a value that was or will be none."""

    name: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. path: "acme/search/laptop", "acme" for a limit on acme, the model for a price."""

    action: Action
    kind: str
    path: str
    fields: tuple[FieldChange, ...] = ()
    quota: QuotaPlace | None = None
    key_prefix: str = ""
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong, by its path in the document: "organizations[0].projects[2].name"."""

    path: str
    message: str


def said_thresholds(dimension: QuotaDimension, thresholds: Iterable[int]) -> tuple[int, ...] | None:
    """At what a limit alerts, in order; None where that is as usual."""
    alert_at = tuple(sorted(thresholds))
    return None if alert_at == usual_thresholds(dimension) else alert_at


def differences(before: object | None, after: object, names: Collection[str]) -> tuple[FieldChange, ...]:
    """The named fields in which two values differ; of something new, those that say something."""
    pairs = ((name, value_of(before, name), value_of(after, name)) for name in names)
    return tuple(
        FieldChange(name, old, new)
        for name, old, new in pairs
        if old != new and (before is not None or name == "alert_at" or new not in (None, "", []))
    )


def value_of(thing: object | None, name: str) -> Value:
    """A field as a JSON value; times in UTC with `Z`."""
    match None if thing is None else getattr(thing, name):
        case datetime() as at:
            return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case tuple() as numbers if name == "alert_at":
            return list(numbers)
        case tuple() | list() as several:
            return sorted(map(str, several))
        case None | str() | int() as plain:
            return plain
        case other:
            raise TypeError(f"{name} is a {type(other).__name__}, which no configuration holds")


def named_twice(path: str, field_name: str, names: Sequence[object]) -> Iterator[Mistake]:
    """Mistakes for what a list names more than once."""
    first: dict[object, int] = {}
    for index, name in enumerate(names):
        if (earlier := first.setdefault(name, index)) != index:
            yield Mistake(f"{path}[{index}].{field_name}", f"named before, at {path}[{earlier}]: give each once")
