"""The present state as a configuration: applying it changes nothing. Revoked keys are not in it, and no secret ever is."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.configuration.applying_prices import price_specs
from metering.configuration.applying_quotas import place_of
from metering.configuration.configuration import (
    Configuration,
    KeySpec,
    OrganizationSpec,
    ProjectSpec,
    QuotaPlace,
    QuotaSpec,
)
from metering.models import ApiKey, Organization, Project, Quota, QuotaDimension
from metering.tenants.billing_profiles import billing_profiles
from metering.tenants.tenants import find_organization

Quotas = Mapping[uuid.UUID, tuple[tuple[QuotaPlace, QuotaSpec], ...]]


async def present_state(session: AsyncSession, *, organization: str | None = None) -> Configuration:
    """Everything, with the prices in force; or one organization, by name or id, with its own prices. Raises: NotFound."""
    owners = select(Organization).order_by(Organization.name)
    if organization:
        owners = owners.where(Organization.id == (await find_organization(session, organization)).id)
    organizations = (await session.scalars(owners)).all()
    ids = [each.id for each in organizations]
    projects = (await session.scalars(select(Project).where(Project.organization_id.in_(ids)).order_by(Project.name))).all()
    project_ids = [each.id for each in projects]
    working = select(ApiKey).where(ApiKey.project_id.in_(project_ids), ApiKey.revoked_at.is_(None))
    keys = (await session.scalars(working.order_by(ApiKey.name, ApiKey.created_at, ApiKey.id))).all()
    now = (await session.scalars(select(func.now()))).one()
    quotas = await quotas_of(session, [*ids, *project_ids, *(key.id for key in keys)], now)
    keys_of: dict[uuid.UUID, list[ApiKey]] = defaultdict(list)
    for key in keys:
        keys_of[key.project_id].append(key)
    projects_of: dict[uuid.UUID, list[ProjectSpec]] = defaultdict(list)
    for project in projects:
        spec = ProjectSpec(project.name, quotas.get(project.id, ()), key_specs(keys_of[project.id], quotas))
        projects_of[project.organization_id].append(spec)
    profiles = await billing_profiles(session)
    specs = (
        OrganizationSpec(
            each.name,
            each.currency_code,
            quotas.get(each.id, ()),
            tuple(projects_of[each.id]),
            billing_profile=profiles.get(each.id),
        )
        for each in organizations
    )
    names = {each.id: each.name for each in organizations}
    return Configuration(tuple(specs), await price_specs(session, names, listed=not organization))


def key_specs(keys: Iterable[ApiKey], quotas: Quotas) -> tuple[KeySpec, ...]:
    """The keys of one project; those that share a name are told apart by their prefix."""
    keys = list(keys)
    count = Counter(key.name for key in keys)
    return tuple(
        KeySpec(
            name=key.name,
            prefix=key.prefix if count[key.name] > 1 else "",
            scopes=tuple(sorted(key.scopes)),
            models=tuple(sorted(key.models)),
            allowed_networks=tuple(sorted(key.allowed_networks)),
            max_input_tokens=key.max_input_tokens,
            max_output_tokens=key.max_output_tokens,
            expires_at=key.expires_at,
            quotas=quotas.get(key.id, ()),
        )
        for key in keys
    )


async def quotas_of(session: AsyncSession, subject_ids: list[uuid.UUID], now: datetime) -> Quotas:
    """The limits of each subject, in the order in which they were set."""
    query = select(Quota).where(Quota.subject_id.in_(subject_ids), Quota.deleted_at.is_(None))
    query = query.where(Quota.dimension != QuotaDimension.PREPAID_CREDIT_PICOS)  # which follows from grants
    found: dict[uuid.UUID, list[tuple[QuotaPlace, QuotaSpec]]] = defaultdict(list)
    for quota in await session.scalars(query.order_by(Quota.created_at, Quota.id)):
        found[quota.subject_id].append((place_of(quota), QuotaSpec.of(quota, now)))
    return {subject_id: tuple(quotas) for subject_id, quotas in found.items()}
