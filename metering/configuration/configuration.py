"""Declarative configuration: organizations, projects, keys, limits, prices, members and trusted
issuers; its differences and their application.

Field names are those of the published configuration; those of keys, limits and prices are their
columns, declared with their terms.

Changes are made by the functions of the single calls, so a configuration allows exactly the same.
Each change runs in a savepoint of the caller's transaction, and a refusal becomes an error at its
path in the document. A refused name is replaced by a valid one, so that everything below it is
checked too: on errors the caller must roll the transaction back. A dry run is the same, rolled
back as well.

A price version is added where the present ones differ; none is removed. Limits of a subject are
set, overridden or removed. Resale prices are added like prices, and ended if they are pruned.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import select, union
from sqlalchemy.ext.asyncio import AsyncSession

from metering.configuration.access import (
    OF_KEYS,
    OF_TRUST,
    IssuerSpec,
    MemberSpec,
    PresentMember,
    issuer_specs,
    present_members,
)
from metering.core.errors import InvalidValue, MeteringError
from metering.core.models import (
    ApiKey,
    Organization,
    Project,
    Quota,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    ServiceTier,
    UsageSubject,
    record_of,
    values_of,
)
from metering.core.money import checked_currency
from metering.pricing.prices import (
    MULTIPLIER_SCALE,
    RATES,
    ModelPrice,
    PriceTerms,
    TokenPrices,
    set_price,
    versions_in_force,
)
from metering.pricing.resale_prices import (
    ResaleTerms,
    prices_in_force,
    resale_price_at,
    set_resale_price,
    whole_terms,
)
from metering.quotas.quota_admin import delete_quota, override_quota, set_quota, usual_thresholds
from metering.quotas.quota_recount import Uncounted, recount
from metering.store.db import database_now
from metering.tenants.api_keys import (
    create_api_key,
    is_unowned,
    revoke_api_key,
    update_api_key,
)
from metering.tenants.billing_profiles import (
    BillingProfile,
    billing_profile,
    billing_profiles,
    set_billing_profile,
)
from metering.tenants.invitations import invite, revoke_invitation
from metering.tenants.key_terms import KeyTerms
from metering.tenants.members import change_role, remove_member
from metering.tenants.networks import Address, excludes
from metering.tenants.queue_weights import queue_weight, queue_weights, set_queue_weight
from metering.tenants.tenants import (
    bind_organization,
    create_organization,
    create_project,
    find_organization,
    organization_regions,
    region_of,
)
from metering.tenants.token_issuers import (
    IssuerRecord,
    IssuerTerms,
    all_token_issuers,
    checked_issuer,
    create_token_issuer,
    delete_token_issuer,
    projects_of,
)

Value = str | int | bool | None | list[str] | list[int]
VIOLATION_COUNT_MAX = 100  # after them nothing more is applied: each costs some savepoints

# Field names of single calls that differ in a document.
FIELDS = {
    "weights.input_milli": "input_weight_milli",
    "weights.cached_input_milli": "cached_input_weight_milli",
    "weights.output_milli": "output_weight_milli",
    "weights": "input_weight_milli",
    "lifetime": "expire_time",
}
# Identity of a price; other fields are its values.
IDENTITY = ("model", "currency_code", "organization", "effective_at")
OVERRIDE = ("override_limit_value", "override_until", "override_reason")
OVERRIDE_FIELDS = {
    "limit_value": "override_limit_value",
    "expire_time": "override_end_time",
    "reason": "override_reason",
}
ISSUER_FIELDS = {"leeway": "leeway_s", "lifetime_max": "lifetime_max_s"}
# Fields of a resale price that can be set; the others are its identity.
RESALE_FIELDS = tuple(
    each.name
    for each in fields(ResaleTerms)
    if each.name not in ("model", "effective_at", "withdrawn")
)
# Fields of a key that can be set.
KEY_FIELDS = (*(each.name for each in fields(KeyTerms)), "expires_at")


class Action(StrEnum):
    """Effect of applying a configuration on an object."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"  # exists, is not named, and is left alone


CheckProfile = Callable[[BillingProfile], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class QuotaSpec(QuotaTerms):
    """Desired state of a limit. The three override fields are set together or not at all."""

    override_limit_value: int | None = None
    override_until: datetime | None = None
    override_reason: str | None = None

    @classmethod
    def of(cls, quota: Quota, now: datetime) -> QuotaSpec:
        """Read the settings of a stored limit, ignoring an expired override."""
        stated = stated_thresholds(QuotaDimension(quota.dimension), quota.alert_at)
        return record_of(cls, quota, alert_at=stated).without_past_override(now)

    def without_past_override(self, now: datetime) -> QuotaSpec:
        """Return a copy without the override if it has expired at `now`."""
        if self.override_until is None or self.override_until > now:
            return self
        return replace(self, override_limit_value=None, override_until=None, override_reason=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec(KeyTerms):
    """Desired state of an API key, with fields named like the columns of `ApiKey`.

    `prefix` is empty if the name identifies the key. `prune_quotas` removes limits that are not
    listed.
    """

    name: str
    prefix: str = ""
    expires_at: datetime | None = None
    quotas: tuple[tuple[QuotaKey, QuotaSpec], ...] = ()
    prune_quotas: bool = False


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """Desired state of a project. `prune_keys` and `prune_quotas` remove what is not listed."""

    name: str
    quotas: tuple[tuple[QuotaKey, QuotaSpec], ...] = ()
    keys: tuple[KeySpec, ...] = ()
    prune_quotas: bool = False
    prune_keys: bool = False


@dataclass(frozen=True, slots=True)
class OrganizationSpec:
    """Desired state of an organization and its projects.

    An empty `currency_code` keeps the currency, and means USD for a new organization.
    `billing_profile`, `queue_weight_milli` and `region` None keep what is set; an empty region
    binds to none. `prune_resale_prices` ends those that are not listed. Members and token issuers
    are compared if some are listed or pruned.
    """

    name: str
    currency_code: str = ""
    quotas: tuple[tuple[QuotaKey, QuotaSpec], ...] = ()
    projects: tuple[ProjectSpec, ...] = ()
    prune_quotas: bool = False
    billing_profile: BillingProfile | None = None
    resale_prices: tuple[ResaleTerms, ...] = ()
    prune_resale_prices: bool = False
    queue_weight_milli: int | None = None
    region: str | None = None
    members: tuple[MemberSpec, ...] = ()
    prune_members: bool = False
    token_issuers: tuple[IssuerSpec, ...] = ()
    prune_token_issuers: bool = False


@dataclass(frozen=True, slots=True)
class Configuration:
    """Content of a configuration document."""

    organizations: tuple[OrganizationSpec, ...] = ()
    prices: tuple[PriceTerms, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that changes. The value before or after is None if there is none."""

    name: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True)
class Change:
    """A change to one object.

    `path` is "acme/search/laptop" for a key, "acme" for the organization or its limits, and the
    model's name for a price. `secret` is that of a new key.
    """

    action: Action
    kind: str
    path: str
    fields: tuple[FieldChange, ...] = ()
    quota: QuotaKey | None = None
    key_prefix: str = ""
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ConfigurationViolation:
    """Error in a configuration document, at a path such as "organizations[0].projects[2].name"."""

    path: str
    message: str


def stated_thresholds(
    dimension: QuotaDimension, thresholds: Iterable[int]
) -> tuple[int, ...] | None:
    """Sort the alert thresholds of a limit; return None if they are its dimension's default."""
    alert_at = tuple(sorted(thresholds))
    return None if alert_at == usual_thresholds(dimension) else alert_at


def issuer_path(owner: Organization, spec: IssuerSpec) -> str:
    """Name a trusted issuer: "acme/https://login.example.com for weir"."""
    return f"{owner.name}/{spec.issuer} for {spec.audience}"


def resale_path(model: str, organization: str) -> str:
    """Name a resale price: "demo of acme"."""
    return f"{model or 'all models'} of {organization}"


def differences(
    before: object | None, after: object, names: Collection[str]
) -> tuple[FieldChange, ...]:
    """Compare the named fields of two objects.

    If `before` is None, only the fields that `after` sets are returned.
    """
    pairs = ((name, value_of(before, name), value_of(after, name)) for name in names)
    return tuple(
        FieldChange(name, old, new)
        for name, old, new in pairs
        if old != new and (before is not None or name == "alert_at" or new not in (None, "", []))
    )


def value_of(thing: object | None, name: str) -> Value:
    """Convert a field to a JSON value; times become UTC with `Z`. None if `thing` is None.

    Raises: TypeError.
    """
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


class TooManyViolations(Exception):
    """The number of violations has reached the maximum that is reported; checking stops."""


Answer = TypeVar("Answer")
Made = TypeVar("Made", Organization, Project)


# Defaults that a new limit is compared with, so that only other values are reported.
UNLIMITED = QuotaSpec(limit_value=-1)


@dataclass(frozen=True, slots=True)
class Subject:
    """Object that limits apply to.

    `path` is its place in the document, `shown` its name in messages.
    """

    path: str
    shown: str
    kind: QuotaSubject
    id: uuid.UUID


@dataclass(slots=True)
class Attempts:
    """Application of one configuration: collects the changes and violations.

    `now` is the transaction's time; `models` and `regions` are those of the fleet. `own_key_id` is
    the caller's key, used from `own_address`; the configuration must not lock it out. `created` has
    the ids of new objects, `uncounted` the limits whose past usage is still to be counted.
    `check_profile` is explained at `apply_configuration`.
    """

    session: AsyncSession
    actor: str
    now: datetime
    models: Collection[str]
    own_key_id: uuid.UUID
    own_address: Address | None
    check_profile: CheckProfile | None
    regions: Collection[str] = ()
    changes: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    violations: list[ConfigurationViolation] = field(default_factory=list)
    created: set[uuid.UUID] = field(default_factory=set)
    uncounted: list[Uncounted] = field(default_factory=list)

    async def apply(self, configuration: Configuration) -> None:
        """Apply the whole configuration and fill `changes`; on violations, roll back."""
        self._check_names(
            "organizations", "name", [each.name for each in configuration.organizations]
        )
        self._check_names("prices", "model", list(map(attrgetter(*IDENTITY), configuration.prices)))
        for index, organization in enumerate(configuration.organizations):
            await self._organization(f"organizations[{index}]", organization)
        for index, price in enumerate(configuration.prices):
            await self._price(f"prices[{index}]", price)

    async def count_past(self) -> None:
        """Count the past usage of new limits on objects that existed before.

        Call it last: it blocks admissions until the transaction ends.
        """
        await recount(
            self.session,
            [
                each
                for each in self.uncounted
                if (each[0].within_id or each[0].subject_id) not in self.created
            ],
        )

    async def _attempt(
        self, path: str, act: Callable[[], Awaitable[Answer]], names: dict[str, str] | None = None
    ) -> Answer | None:
        """Run an action in a savepoint. If it is refused, record a violation and return None."""
        try:
            async with self.session.begin_nested():
                return await act()
        except InvalidValue as refusal:
            self._wrong(
                f"{path}.{(names or FIELDS).get(refusal.field, refusal.field)}", refusal.remedy
            )
        except MeteringError as refusal:
            self._wrong(path, str(refusal))
        return None

    def _check_names(self, path: str, field_name: str, names: Sequence[object]) -> None:
        """Record a violation for each repeated name in a list."""
        first: dict[object, int] = {}
        for index, name in enumerate(names):
            if (earlier := first.setdefault(name, index)) != index:
                self._wrong(
                    f"{path}[{index}].{field_name}",
                    f"named before, at {path}[{earlier}]: give each once",
                )

    def _wrong(self, path: str, message: str) -> None:
        """Record a violation. Raises: TooManyViolations."""
        is_last = len(self.violations) + 1 == VIOLATION_COUNT_MAX
        rest = "; further fields were not checked" if is_last else ""
        self.violations.append(ConfigurationViolation(path, message + rest))
        if is_last:
            raise TooManyViolations

    async def _made(self, path: str, name: str, create: Callable[[str], Awaitable[Made]]) -> Made:
        """Create an object; if that is refused, use a random name, so that the rest is checked."""
        made = await self._attempt(path, lambda: create(name))
        if made is None:
            made = await create(f"x{uuid.uuid4().hex}")
        self.created.add(made.id)
        return made

    async def _organization(self, path: str, desired: OrganizationSpec) -> None:
        query = select(Organization).where(Organization.name == desired.name)
        existing: Organization | None = await self.session.scalar(query)
        if existing is None:
            code = self._currency(path, desired.currency_code or "USD")
            existing = await self._made(
                path,
                desired.name,
                lambda name: create_organization(
                    self.session, name=name, currency_code=code, actor=self.actor
                ),
            )
            changes = (FieldChange("currency_code", None, code),)
            self.changes.append(Change(Action.CREATE, "organization", desired.name, changes))
        elif desired.currency_code not in ("", existing.currency_code):
            self._wrong(
                f"{path}.currency_code",
                f"it is {existing.currency_code}, which never changes: create another organization",
            )
        if desired.billing_profile is not None:
            await self._billing_profile(
                f"{path}.billing_profile", desired.name, existing, desired.billing_profile
            )
        if desired.queue_weight_milli is not None:
            await self._queue_weight(path, desired.name, existing, desired.queue_weight_milli)
        if desired.region is not None:  # before the limits, whose names may not leave it
            await self._region(path, desired.name, existing, desired.region)
        await self._resale_prices(path, existing, desired)
        await self._quotas(
            Subject(path, desired.name, QuotaSubject.ORGANIZATION, existing.id), desired
        )
        query_projects = select(Project).where(Project.organization_id == existing.id)
        projects = {project.name: project for project in await self.session.scalars(query_projects)}
        self._check_names(f"{path}.projects", "name", [each.name for each in desired.projects])
        for index, project in enumerate(desired.projects):
            shown = f"{desired.name}/{project.name}"
            await self._project(
                f"{path}.projects[{index}]",
                shown,
                existing,
                project,
                projects.pop(project.name, None),
            )
        self.kept += [
            Change(Action.KEEP, "project", f"{desired.name}/{name}") for name in sorted(projects)
        ]
        # After the projects, which they name
        if desired.members or desired.prune_members:
            await self._members(f"{path}.members", existing, desired)
        if desired.token_issuers or desired.prune_token_issuers:
            await self._token_issuers(f"{path}.token_issuers", existing, desired)

    async def _members(self, path: str, owner: Organization, desired: OrganizationSpec) -> None:
        """Invite persons, and change or remove members; those of a provider's groups stay."""
        wanted = [replace(each, email=each.email.strip().lower()) for each in desired.members]
        self._check_names(path, "email", [each.email for each in wanted])
        found = (await present_members(self.session, [owner.id])).get(owner.id, [])
        left = {each.spec.email: each for each in found}
        done: set[str] = set()
        for index, member in enumerate(wanted):
            if member.email in done:
                continue
            done.add(member.email)
            await self._member(f"{path}[{index}]", owner, member, left.pop(member.email, None))
        for email, present in left.items():
            if present.provider:
                continue
            action = Action.DELETE if desired.prune_members else Action.KEEP
            change = Change(action, present.kind, f"{owner.name}/{email}")
            if action is Action.KEEP:
                self.kept.append(change)
            elif present.api_key_id == self.own_key_id:
                self._wrong(path, f"{email} applies this configuration: list it, or use a key")
            elif await self._attempt(path, partial(self._remove_member, owner, present)):
                self.changes.append(change)

    async def _remove_member(self, owner: Organization, present: PresentMember) -> bool:
        if present.invitation_id is not None:
            invitation = str(present.invitation_id)
            await revoke_invitation(self.session, invitation=invitation, actor=self.actor)
        else:
            await remove_member(
                self.session,
                organization=str(owner.id),
                member=present.spec.email,
                revoke_keys=False,
                actor=self.actor,
            )
        return True

    async def _member(
        self, path: str, owner: Organization, desired: MemberSpec, present: PresentMember | None
    ) -> None:
        """Invite a person, or change the role of a member or of an invitation."""
        names = ("role",) if not desired.project else ("role", "project")
        shown = f"{owner.name}/{desired.email}"
        changes = differences(None if present is None else present.spec, desired, names)
        if present is not None and not changes:
            return
        if present is not None and present.provider:
            self._wrong(
                path,
                f"it is a member by a group of {present.provider}: change the group, or its role in"
                " the file of WEIR_SIGN_IN",
            )
            return
        if present is not None and present.invitation_id is None:
            if any(each.name == "project" for each in changes):
                self._wrong(
                    f"{path}.project",
                    f"it is {present.spec.project}, which never changes: leave it out, or remove"
                    " the member first",
                )
            elif await self._attempt(
                path,
                partial(
                    change_role,
                    self.session,
                    organization=str(owner.id),
                    member=desired.email,
                    role=desired.role,
                    actor=self.actor,
                ),
            ):
                self.changes.append(Change(Action.UPDATE, "member", shown, changes))
            return

        async def invited() -> str:
            if present is not None:
                await self._remove_member(owner, present)
            _, token = await invite(
                self.session,
                organization=str(owner.id),
                email=desired.email,
                role=desired.role,
                project=desired.project,
                actor=self.actor,
            )
            return token

        if token := await self._attempt(path, invited):
            action = Action.CREATE if present is None else Action.UPDATE
            self.changes.append(Change(action, "invitation", shown, changes, secret=token))

    async def _token_issuers(
        self, path: str, owner: Organization, desired: OrganizationSpec
    ) -> None:
        """Trust issuers, change the terms of their bound keys, and trust others no more."""
        named = [(each.issuer, each.audience) for each in desired.token_issuers]
        self._check_names(path, "audience", named)
        records = await all_token_issuers(self.session, organization=str(owner.id))
        left = {
            (spec.issuer, spec.audience): (spec, record)
            for spec, record in await issuer_specs(self.session, records)
        }
        for index, spec in enumerate(desired.token_issuers):
            present = left.pop((spec.issuer, spec.audience), None)
            prunes = desired.prune_token_issuers
            await self._token_issuer(f"{path}[{index}]", owner, spec, present, prunes=prunes)
        for spec, record in left.values():
            action = Action.DELETE if desired.prune_token_issuers else Action.KEEP
            if action is Action.DELETE:
                await self._attempt(path, partial(self._distrust, record))
            change = Change(action, "token_issuer", issuer_path(owner, spec))
            (self.kept if action is Action.KEEP else self.changes).append(change)

    async def _distrust(self, record: IssuerRecord) -> None:
        issuer = str(record.id)
        await delete_token_issuer(self.session, token_issuer=issuer, actor=self.actor)

    async def _token_issuer(
        self,
        path: str,
        owner: Organization,
        desired: IssuerSpec,
        present: tuple[IssuerSpec, IssuerRecord] | None,
        *,
        prunes: bool,
    ) -> None:
        """Trust an issuer, anew if its terms differ and `prunes`, or change its keys' terms."""
        for model in sorted(set(desired.models) - set(self.models)):
            known = ", ".join(sorted(self.models))
            self._wrong(f"{path}.models", f"no model {model!r} is served: give some of {known}")

        async def checked() -> IssuerSpec:
            terms = checked_issuer(desired.terms)
            return replace(desired, **values_of(IssuerTerms, terms))

        if (wanted := await self._attempt(path, checked, ISSUER_FIELDS)) is None:
            return
        before = None if present is None else present[0]
        changes = differences(before, wanted, (*OF_TRUST, *OF_KEYS))
        if before is not None and not changes:
            return
        other = [each.name for each in changes if each.name in OF_TRUST]
        if before is not None and other and not prunes:
            self._wrong(
                path,
                f"is trusted with another {', '.join(other)}, which never changes, because servers"
                " remember it: apply with --prune to trust it anew, which replaces its keys and"
                " ends the running requests of its tokens",
            )
            return

        async def trusted() -> bool:
            if present is not None and not other:
                for each in present[1].projects:
                    await update_api_key(
                        self.session,
                        api_key=str(each.api_key_id),
                        terms=lambda had: replace(
                            had, **{name: getattr(wanted, name) for name in OF_KEYS}
                        ),
                        actor=self.actor,
                    )
                return True
            if present is not None:
                await self._distrust(present[1])
            await create_token_issuer(
                self.session,
                organization=str(owner.id),
                terms=wanted.terms,
                projects=projects_of(wanted.projects, has_claim=bool(wanted.project_claim)),
                key_terms=wanted.key_terms,
                actor=self.actor,
            )
            return True

        if await self._attempt(path, trusted, ISSUER_FIELDS):
            action = Action.CREATE if before is None else Action.UPDATE
            shown = issuer_path(owner, wanted)
            self.changes.append(Change(action, "token_issuer", shown, changes))

    async def _resale_prices(
        self, path: str, owner: Organization, desired: OrganizationSpec
    ) -> None:
        """Add versions to an organization's resale prices, and end those that are not listed."""
        path = f"{path}.resale_prices"
        identities = [(each.model, each.effective_at) for each in desired.resale_prices]
        self._check_names(path, "model", identities)
        for index, terms in enumerate(desired.resale_prices):
            await self._resale_price(f"{path}[{index}]", owner, terms)
        listed = {model for model, _ in identities}
        for price in await prices_in_force(self.session, [owner.id]):
            if price.model in listed:
                continue
            action = Action.DELETE if desired.prune_resale_prices else Action.KEEP
            change = Change(action, "resale_price", resale_path(price.model, owner.name))
            if desired.prune_resale_prices:
                ended = ResaleTerms(model=price.model, withdrawn=True)
                await self._attempt(
                    path,
                    partial(set_resale_price, self.session, owner, ended, actor=self.actor),
                )
            (self.changes if desired.prune_resale_prices else self.kept).append(change)

    async def _resale_price(self, path: str, owner: Organization, desired: ResaleTerms) -> None:
        """Set one resale price from `effective_at` on, unless the one in force is the same."""
        at = (
            None
            if desired.effective_at is None or desired.effective_at <= self.now
            else desired.effective_at
        )
        terms = replace(desired, effective_at=at)

        async def check() -> bool:
            terms.check()
            return True

        if not await self._attempt(path, check):
            return
        before = await resale_price_at(self.session, owner.id, terms.model, at or self.now)
        changes = (
            differences(None, terms, RESALE_FIELDS)
            if before is None
            else differences(whole_terms(before), whole_terms(terms), RESALE_FIELDS)
        )
        if before is not None and not changes:
            return
        await self._attempt(
            path, partial(set_resale_price, self.session, owner, terms, actor=self.actor)
        )
        since = f" from {at:%Y-%m-%d %H:%M:%SZ}" if at else ""
        action = Action.CREATE if before is None else Action.UPDATE
        shown = resale_path(terms.model, owner.name) + since
        self.changes.append(Change(action, "resale_price", shown, changes))

    def _currency(self, path: str, code: str) -> str:
        """Validate a currency code; if invalid, record a violation and return USD."""
        try:
            return checked_currency(code)
        except InvalidValue as refusal:
            self._wrong(f"{path}.{refusal.field}", refusal.remedy)
            return "USD"

    async def _billing_profile(
        self, path: str, shown: str, owner: Organization, desired: BillingProfile
    ) -> None:
        before = await billing_profile(self.session, owner.id) or BillingProfile()
        changes = differences(before, desired, [each.name for each in fields(BillingProfile)])
        if not changes:
            return

        async def change() -> BillingProfile:
            profile = await set_billing_profile(
                self.session, organization=str(owner.id), profile=desired, actor=self.actor
            )
            if self.check_profile is not None:
                await self.check_profile(profile)
            return profile

        if await self._attempt(path, change) is not None:
            self.changes.append(Change(Action.UPDATE, "billing_profile", shown, changes))

    async def _queue_weight(
        self, path: str, shown: str, owner: Organization, weight_milli: int
    ) -> None:
        before = await queue_weight(self.session, owner.id)
        if before == weight_milli:
            return

        async def change() -> Organization:
            return await set_queue_weight(
                self.session,
                organization=str(owner.id),
                weight_milli=weight_milli,
                actor=self.actor,
            )

        if await self._attempt(path, change) is not None:
            change_made = FieldChange("queue_weight_milli", before, weight_milli)
            self.changes.append(Change(Action.UPDATE, "organization", shown, (change_made,)))

    async def _region(self, path: str, shown: str, owner: Organization, region: str) -> None:
        before = await region_of(self.session, owner.id)
        if before == region:
            return
        if region and region not in self.regions:
            known = ", ".join(sorted(self.regions)) or "none"
            self._wrong(f"{path}.region", f"must be a region of the fleet; there are: {known}")
            return

        async def change() -> Organization:
            return await bind_organization(
                self.session, organization=str(owner.id), region=region, actor=self.actor
            )

        if await self._attempt(path, change) is not None:
            change_made = FieldChange("region", before or None, region or None)
            self.changes.append(Change(Action.UPDATE, "organization", shown, (change_made,)))

    async def _project(
        self,
        path: str,
        shown: str,
        owner: Organization,
        desired: ProjectSpec,
        existing: Project | None,
    ) -> None:
        if existing is None:
            existing = await self._made(
                path,
                desired.name,
                lambda name: create_project(
                    self.session, organization=str(owner.id), name=name, actor=self.actor
                ),
            )
            self.changes.append(Change(Action.CREATE, "project", shown))
        await self._quotas(Subject(path, shown, QuotaSubject.PROJECT, existing.id), desired)
        query = (
            select(ApiKey)
            .where(ApiKey.project_id == existing.id, ApiKey.revoked_at.is_(None), is_unowned())
            .order_by(ApiKey.created_at)
        )
        left = {key.prefix: key for key in await self.session.scalars(query)}
        self._check_names(
            f"{path}.keys", "name", [each.prefix or each.name for each in desired.keys]
        )
        named = {each.prefix for each in desired.keys}
        for index, key in enumerate(desired.keys):
            of_name = [
                prefix
                for prefix, found in left.items()
                if found.name == key.name and prefix not in named
            ]
            await self._key(
                f"{path}.keys[{index}]", f"{shown}/{key.name}", key, existing, left, of_name
            )
        for surplus in left.values():
            await self._surplus_key(
                path, f"{shown}/{surplus.name}", surplus, prune=desired.prune_keys
            )

    async def _key(
        self,
        path: str,
        shown: str,
        desired: KeySpec,
        owner: Project,
        left: dict[str, ApiKey],
        of_name: list[str],
    ) -> None:
        """Create or update one key.

        `left` has the project's keys that the document has not named so far, by prefix; the key is
        removed from it. `of_name` lists the prefixes of keys with this name that are not named by
        prefix.
        """
        for model in sorted(set(desired.models) - set(self.models)):
            self._wrong(
                f"{path}.models",
                f"no model {model!r} is served: give some of {', '.join(sorted(self.models))}",
            )
        existing: ApiKey | None = None
        if desired.prefix:
            if (existing := left.pop(desired.prefix, None)) is None:
                self._wrong(
                    f"{path}.prefix",
                    "the project has no such key that is not revoked: leave it out to create one",
                )
                return
        elif len(of_name) > 1:
            self._wrong(
                f"{path}.name",
                f"{len(of_name)} keys have this name: say which by `prefix`, one of"
                f" {', '.join(of_name)}",
            )
            for prefix in of_name:
                left.pop(prefix)
            return
        elif of_name:
            existing = left.pop(of_name[0])
        if existing is None:
            existing = await self._new_key(path, shown, owner, desired)
        else:
            await self._changed_key(path, shown, desired, existing)
        if existing is not None:
            # Limits that a key got from templates are defined there, and are left alone.
            limits = select(Quota).where(
                Quota.subject_id.in_((owner.organization_id, owner.id)), Quota.for_new_keys
            )
            templates = await self.session.scalars(limits.where(Quota.deleted_at.is_(None)))
            defaults = frozenset(replace(key_of(row), for_new_keys=False) for row in templates)
            await self._quotas(
                Subject(path, shown, QuotaSubject.API_KEY, existing.id), desired, defaults
            )

    async def _new_key(
        self, path: str, shown: str, owner: Project, desired: KeySpec
    ) -> ApiKey | None:
        made = await self._attempt(
            path,
            lambda: create_api_key(
                self.session,
                organization=str(owner.organization_id),
                project=str(owner.id),
                name=desired.name,
                terms=desired,
                lifetime=None if desired.expires_at is None else desired.expires_at - self.now,
                actor=self.actor,
            ),
        )
        if made is None:
            return None
        record, secret = made
        self.created.add(record.id)
        existing = await self.session.get_one(ApiKey, record.id)
        terms = differences(None, existing, KEY_FIELDS)
        set_terms = tuple(each for each in terms if each.after is not False)
        self.changes.append(
            Change(Action.CREATE, "key", shown, set_terms, key_prefix=record.prefix, secret=secret)
        )
        return existing

    async def _changed_key(self, path: str, shown: str, desired: KeySpec, existing: ApiKey) -> None:
        changes = differences(existing, desired, ("name", *KEY_FIELDS))
        if not changes:
            return
        if existing.id == self.own_key_id and (
            "admin" not in desired.scopes or (desired.expires_at or self.now) < self.now
        ):
            wrong = (
                "this very call is made with this key, which would lose `admin` or expire: use"
                " another key"
            )
            self._wrong(f"{path}.scopes", wrong)
        if existing.id == self.own_key_id and excludes(desired.allowed_networks, self.own_address):
            wrong = "this very call is made with this key from outside of them: use another key"
            self._wrong(f"{path}.allowed_networks", wrong)
        await self._attempt(
            path,
            lambda: update_api_key(
                self.session,
                api_key=str(existing.id),
                name=desired.name,
                terms=lambda _: desired,
                expires_at=desired.expires_at,
                never_expires=desired.expires_at is None,
                actor=self.actor,
                uncounted=self.uncounted,
            ),
        )
        self.changes.append(
            Change(Action.UPDATE, "key", shown, changes, key_prefix=existing.prefix)
        )

    async def _surplus_key(self, path: str, shown: str, key: ApiKey, *, prune: bool) -> None:
        change = Change(
            Action.DELETE if prune else Action.KEEP, "key", shown, key_prefix=key.prefix
        )
        if not prune:
            self.kept.append(change)
        elif key.id == self.own_key_id:
            wrong = (
                f"this very call is made with the key {key.name!r}, which would be revoked: name"
                " it too"
            )
            self._wrong(f"{path}.keys", wrong)
        else:
            await self._attempt(
                path, lambda: revoke_api_key(self.session, api_key=str(key.id), actor=self.actor)
            )
            self.changes.append(change)

    async def _quotas(
        self,
        subject: Subject,
        desired: OrganizationSpec | ProjectSpec | KeySpec,
        defaults: Collection[QuotaKey] = (),
    ) -> None:
        """Create, update and remove the limits of a subject; those in `defaults` are kept."""
        rows = {
            key: row
            for _, key, row in await limits_of(
                self.session, [subject.id], {key.end_user for key, _ in desired.quotas}
            )
        }
        self._check_names(f"{subject.path}.quotas", "dimension", [key for key, _ in desired.quotas])
        for index, (key, spec) in enumerate(desired.quotas):
            at = f"{subject.path}.quotas[{index}]"
            if key.model and key.model not in self.models:
                served = ", ".join(sorted(self.models))
                self._wrong(
                    f"{at}.model", f"no model of this name is served: give one of {served}, or none"
                )
            await self._quota(
                at, subject, key, spec.without_past_override(self.now), rows.pop(key, None)
            )
        for key, row in rows.items():
            if key in defaults:
                continue
            change = Change(
                Action.DELETE if desired.prune_quotas else Action.KEEP,
                "quota",
                subject.shown,
                quota=key,
            )
            if desired.prune_quotas:
                await self._attempt(
                    subject.path,
                    partial(
                        delete_quota,
                        self.session,
                        quota_id=str(row.id),
                        actor=self.actor,
                        later=self.uncounted,
                    ),
                )
            (self.changes if desired.prune_quotas else self.kept).append(change)

    async def _quota(
        self, path: str, subject: Subject, key: QuotaKey, desired: QuotaSpec, row: Quota | None
    ) -> None:
        """Create or update one limit. `row` is the stored limit, None if it is new."""
        existing = None if row is None else QuotaSpec.of(row, self.now)
        # Without an override in the document, a present one stays.
        left_out = OVERRIDE if desired.override_until is None else ()
        names = [each.name for each in fields(QuotaSpec) if each.name not in left_out]
        if existing is None:
            names = [name for name in names if getattr(desired, name) != getattr(UNLIMITED, name)]
        changes = differences(existing, desired, names)
        if existing is not None and not changes:
            return
        state = await self._attempt(
            path,
            lambda: set_quota(
                self.session,
                subject=subject.kind,
                subject_ref=str(subject.id),
                key=key,
                terms=desired,
                actor=self.actor,
                later=self.uncounted,
            ),
        )
        if state is not None and desired.override_until is not None:
            override = partial(
                override_quota,
                self.session,
                quota_id=str(state.quota_id),
                limit_value=desired.override_limit_value or 0,
                until=desired.override_until,
                reason=desired.override_reason or "",
                actor=self.actor,
            )
            await self._attempt(path, override, OVERRIDE_FIELDS)
        action = Action.UPDATE if existing else Action.CREATE
        self.changes.append(Change(action, "quota", subject.shown, changes, quota=key))

    async def _price(self, path: str, desired: PriceTerms) -> None:
        """Set one price from `effective_at` on. Values that are None keep the present price."""
        at = (
            None
            if desired.effective_at is None or desired.effective_at <= self.now
            else desired.effective_at
        )
        owner = owner_id = None
        if desired.organization:
            owner = await self._attempt(
                f"{path}.organization",
                lambda: find_organization(self.session, desired.organization),
            )
            if owner is None:
                return
            owner_id = owner.id
        named = replace(
            desired,
            currency_code=desired.currency_code or (owner.currency_code if owner else "USD"),
            reasoning_picos_per_token=own_reasoning_price(desired),
        )
        found = await versions_in_force(
            self.session,
            model=named.model,
            currency_code=named.currency_code,
            organization_id=owner_id,
            at=at,
        )
        existing = spec_of(
            [each for each in found if each.organization_id == owner_id and not each.withdrawn],
            named,
        )
        names = [
            each.name
            for each in fields(PriceTerms)
            if each.name not in IDENTITY and getattr(named, each.name) is not None
        ]
        reasoning = "reasoning_picos_per_token"
        if existing is not None and getattr(existing, reasoning) is not None:
            names = list(dict.fromkeys([*names, reasoning]))  # even if it is no longer stated
        changes = differences(existing, named, names)
        if not changes:
            return
        terms = replace(named, effective_at=at)
        await self._attempt(path, lambda: set_price(self.session, terms, actor=self.actor))
        suffix = f" of {named.organization}" if named.organization else ""
        since = f" from {at:%Y-%m-%d %H:%M:%SZ}" if at else ""
        action = Action.UPDATE if existing else Action.CREATE
        self.changes.append(
            Change(
                action, "price", f"{named.model} in {named.currency_code}{suffix}{since}", changes
            )
        )


async def limits_of(
    session: AsyncSession, subject_ids: Collection[uuid.UUID], end_users: Collection[str] = ()
) -> list[tuple[uuid.UUID, QuotaKey, Quota]]:
    """List the limits of subjects in order of creation, each with its subject and its key.

    Those of label values within the subjects belong to them; those of end users, of which there may
    be a million, only if they are named. Prepaid credit is left out: it is set by grants. What a
    selector gives is left out as well, and so are the limits that organizations set themselves.
    """
    settable = (
        select(Quota, UsageSubject)
        .outerjoin(UsageSubject, UsageSubject.id == Quota.subject_id)
        .where(Quota.deleted_at.is_(None), Quota.selector_id.is_(None))
        .where(Quota.set_by_organization.is_(False))
        .where(Quota.dimension != QuotaDimension.PREPAID_CREDIT_PICOS)
        .execution_options(populate_existing=True)
    )
    within = settable.where(Quota.within_id.in_(subject_ids))
    queries = [
        settable.where(Quota.subject_id.in_(subject_ids)),
        within.where(Quota.subject == QuotaSubject.LABEL),
    ]
    if any(end_users):
        owners = union(
            select(Organization.id).where(Organization.id.in_(subject_ids)),
            select(Project.organization_id).where(Project.id.in_(subject_ids)),
        )
        queries.append(
            within.where(
                UsageSubject.organization_id.in_(owners),
                UsageSubject.kind == QuotaSubject.END_USER,
                UsageSubject.label_key == "",
                UsageSubject.name.in_(end_users),
            )
        )
    rows = [row for query in queries for row in await session.execute(query)]
    return [
        (quota.within_id or quota.subject_id, key_of(quota, member), quota)
        for quota, member in sorted(rows, key=lambda row: (row[0].created_at, row[0].id))
    ]


def key_of(quota: Quota, member: UsageSubject | None = None) -> QuotaKey:
    """Return what identifies a limit among those of its subject, or of an end user or label."""
    name = "" if member is None else member.name or ""
    is_label = member is not None and member.label_key != ""
    return QuotaKey(
        QuotaDimension(quota.dimension),
        quota.model,
        quota.for_new_keys,
        quota.for_each,
        end_user="" if is_label else name,
        label=f"{member.label_key}={name}" if member is not None and is_label else "",
        window_minutes=quota.window_minutes,
    )


async def apply_configuration(
    session: AsyncSession,
    desired: Configuration,
    *,
    actor: str,
    own_key_id: uuid.UUID,
    own_address: Address | None = None,
    models: Collection[str],
    regions: Collection[str] = (),
    check_profile: CheckProfile | None = None,
    dry_run: bool = False,
) -> Attempts:
    """Apply a configuration and return the changes, the kept objects and the violations.

    If there are violations, the caller must roll back. `own_key_id` is the caller's key, used from
    `own_address`: the configuration must not lock it out. `models` and `regions` are those of the
    fleet. `check_profile` raises InvalidValue for a billing profile that documents cannot show.
    With `dry_run` the caller always rolls back, so past usage is not counted and no request is
    blocked.
    """
    now = await database_now(session)
    work = Attempts(session, actor, now, models, own_key_id, own_address, check_profile, regions)
    with contextlib.suppress(TooManyViolations):
        await work.apply(desired)
    if not dry_run and not work.violations:
        await work.count_past()
    return work


async def price_specs(
    session: AsyncSession, names: dict[uuid.UUID, str], *, listed: bool
) -> tuple[PriceTerms, ...]:
    """List the prices in force of the organizations in `names` and, if `listed`, of the list."""
    found = await versions_in_force(session, all_customers=True)
    versions_of: dict[tuple[str, str, uuid.UUID | None], list[ModelPrice]] = {}
    for each in found:
        if not each.withdrawn and (
            each.organization_id in names or (listed and each.organization_id is None)
        ):
            versions_of.setdefault(
                (each.model, each.prices.currency_code, each.organization_id), []
            ).append(each)
    specs = []
    for (model, currency_code, owner), versions in versions_of.items():
        zeros: dict[str, Any] = dict.fromkeys(RATES, 0)
        name = "" if owner is None else names[owner]
        priced = PriceTerms(model=model, currency_code=currency_code, organization=name, **zeros)
        if (spec := spec_of(versions, priced)) is not None:
            multiplier = spec.batch_multiplier_milli
            named = replace(
                spec,
                embedding_picos_per_token=spec.embedding_picos_per_token or None,
                batch_multiplier_milli=None if multiplier == MULTIPLIER_SCALE else multiplier,
            )
            specs.append(named)
    return tuple(specs)


def spec_of(versions: list[ModelPrice], priced: PriceTerms) -> PriceTerms | None:
    """Merge the price versions of both tiers of a model; None without an interactive price."""
    tiers = {each.tier: each for each in versions}
    if ServiceTier.INTERACTIVE not in tiers:
        return None
    prices, batch = tiers[ServiceTier.INTERACTIVE].prices, tiers.get(ServiceTier.BATCH)
    rates = {name: getattr(prices, name) for name in RATES}
    rates["reasoning_picos_per_token"] = own_reasoning_price(prices)
    return replace(
        priced,
        **rates,
        batch_multiplier_milli=batch.multiplier_milli if batch else MULTIPLIER_SCALE,
    )


def own_reasoning_price(prices: PriceTerms | TokenPrices) -> int | None:
    """Return the reasoning price if it differs from the output price, else None."""
    reasoning = prices.reasoning_picos_per_token
    return None if reasoning == prices.output_picos_per_token else reasoning


Quotas = Mapping[uuid.UUID, tuple[tuple[QuotaKey, QuotaSpec], ...]]


async def present_state(session: AsyncSession, *, organization: str | None = None) -> Configuration:
    """Read the stored configuration, of one organization or all. Raises: NotFound."""
    owners = select(Organization).order_by(Organization.name)
    if organization:
        owners = owners.where(
            Organization.id == (await find_organization(session, organization)).id
        )
    organizations = (await session.scalars(owners)).all()
    ids = [each.id for each in organizations]
    owned = select(Project).where(Project.organization_id.in_(ids)).order_by(Project.name)
    projects = (await session.scalars(owned)).all()
    project_ids = [each.id for each in projects]
    working = select(ApiKey).where(
        ApiKey.project_id.in_(project_ids), ApiKey.revoked_at.is_(None), is_unowned()
    )
    keys = (
        await session.scalars(working.order_by(ApiKey.name, ApiKey.created_at, ApiKey.id))
    ).all()
    now = await database_now(session)
    quotas = await quotas_of(session, [*ids, *project_ids, *(key.id for key in keys)], now)
    keys_of: dict[uuid.UUID, list[ApiKey]] = defaultdict(list)
    for key in keys:
        keys_of[key.project_id].append(key)
    projects_of: dict[uuid.UUID, list[ProjectSpec]] = defaultdict(list)
    for project in projects:
        spec = ProjectSpec(
            project.name, quotas.get(project.id, ()), key_specs(keys_of[project.id], quotas)
        )
        projects_of[project.organization_id].append(spec)
    profiles, weights = await billing_profiles(session), await queue_weights(session)
    regions = await organization_regions(session)
    resale: dict[uuid.UUID, list[ResaleTerms]] = defaultdict(list)
    for price in await prices_in_force(session, ids):
        terms = whole_terms(price)
        stated = replace(
            terms,
            request_picos=terms.request_picos or None,
            replica_hour_picos=terms.replica_hour_picos or None,
        )
        resale[price.organization_id].append(stated)
    members = await present_members(session, ids)
    issuers: dict[uuid.UUID, list[IssuerSpec]] = defaultdict(list)
    records = await all_token_issuers(session, organization=organization)
    for issuer, record in await issuer_specs(session, records):
        issuers[record.organization_id].append(issuer)
    specs = (
        OrganizationSpec(
            each.name,
            each.currency_code,
            quotas.get(each.id, ()),
            tuple(projects_of[each.id]),
            billing_profile=profiles.get(each.id),
            resale_prices=tuple(resale[each.id]),
            queue_weight_milli=weights.get(each.id),
            region=regions.get(each.id),
            members=tuple(
                present.spec for present in members.get(each.id, ()) if not present.provider
            ),
            token_issuers=tuple(sorted(issuers[each.id], key=attrgetter("issuer", "audience"))),
        )
        for each in organizations
    )
    names = {each.id: each.name for each in organizations}
    return Configuration(tuple(specs), await price_specs(session, names, listed=not organization))


def key_specs(keys: Iterable[ApiKey], quotas: Quotas) -> tuple[KeySpec, ...]:
    """Describe the keys of one project. Keys that share a name are identified by prefix."""
    keys = list(keys)
    count = Counter(key.name for key in keys)
    return tuple(
        record_of(
            KeySpec,
            key,
            prefix=key.prefix if count[key.name] > 1 else "",
            scopes=tuple(sorted(key.scopes)),
            models=tuple(sorted(key.models)),
            allowed_networks=tuple(sorted(key.allowed_networks)),
            quotas=quotas.get(key.id, ()),
        )
        for key in keys
    )


async def quotas_of(session: AsyncSession, subject_ids: list[uuid.UUID], now: datetime) -> Quotas:
    """Load the limits of each subject, in order of creation."""
    found: dict[uuid.UUID, list[tuple[QuotaKey, QuotaSpec]]] = defaultdict(list)
    for subject_id, key, quota in await limits_of(session, subject_ids):
        found[subject_id].append((key, QuotaSpec.of(quota, now)))
    return {subject_id: tuple(quotas) for subject_id, quotas in found.items()}
