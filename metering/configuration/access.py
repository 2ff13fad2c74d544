"""Members and trusted issuers of an organization, as a configuration states them."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import (
    ApiKey,
    GroupMembership,
    Invitation,
    Membership,
    Person,
    Project,
    record_of,
)
from metering.tenants.invitations import is_pending
from metering.tenants.key_terms import KeyTerms
from metering.tenants.members import OPERATOR
from metering.tenants.token_issuers import IssuerRecord, IssuerTerms


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """Desired state of a member. An empty `project` is the one that it has, or the oldest one."""

    email: str
    role: str
    project: str = ""


@dataclass(frozen=True, slots=True)
class PresentMember:
    """A member, or an invitation if it has an id. `provider` is the one whose groups made it."""

    spec: MemberSpec
    api_key_id: uuid.UUID | None = None
    provider: str = ""
    invitation_id: uuid.UUID | None = None

    @property
    def kind(self) -> str:
        return "member" if self.invitation_id is None else "invitation"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerSpec(IssuerTerms):
    """Desired state of a trust in an issuer, with the terms of its bound keys.

    `projects` have the value of the claim before each, as `projects_of` reads them.
    """

    projects: tuple[str, ...]
    models: tuple[str, ...] = ()
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    allowed_networks: tuple[str, ...] = ()
    group: str = ""

    @property
    def terms(self) -> IssuerTerms:
        return record_of(IssuerTerms, self)

    @property
    def key_terms(self) -> KeyTerms:
        return KeyTerms(**{name: getattr(self, name) for name in OF_KEYS})


OF_KEYS = ("models", "max_input_tokens", "max_output_tokens", "allowed_networks", "group")
# Never change: servers remember them
OF_TRUST = ("projects", *(each.name for each in fields(IssuerTerms)))


async def present_members(
    session: AsyncSession, organization_ids: Collection[uuid.UUID]
) -> Mapping[uuid.UUID, list[PresentMember]]:
    """List members and pending invitations by organization, sorted by address."""
    members = (
        select(Membership, Person.email, ApiKey.role, Project.name, GroupMembership.provider)
        .join(Person, Person.id == Membership.person_id)
        .join(ApiKey, ApiKey.id == Membership.api_key_id)
        .join(Project, Project.id == ApiKey.project_id)
        .outerjoin(GroupMembership, GroupMembership.membership_id == Membership.id)
        .where(Membership.organization_id.in_(organization_ids), Membership.removed_at.is_(None))
        .order_by(Person.email)
    )
    invited = (
        select(Invitation, Project.name)
        .join(Project, Project.id == Invitation.project_id)
        .where(Invitation.organization_id.in_(organization_ids), *is_pending())
        .order_by(Invitation.email)
    )
    found: dict[uuid.UUID, list[PresentMember]] = defaultdict(list)
    for row, email, role, project, provider in await session.execute(members):
        spec = MemberSpec(email, role or OPERATOR, project)
        found[row.organization_id].append(PresentMember(spec, row.api_key_id, provider or ""))
    for invitation, project in await session.execute(invited):
        spec = MemberSpec(invitation.email, invitation.role, project)
        found[invitation.organization_id].append(PresentMember(spec, invitation_id=invitation.id))
    return found


async def issuer_specs(
    session: AsyncSession, records: Collection[IssuerRecord]
) -> list[tuple[IssuerSpec, IssuerRecord]]:
    """Describe trusted issuers, with the terms of the bound key of their first project."""
    first = {each.id: each.projects[0].api_key_id for each in records}
    query = select(ApiKey).where(ApiKey.id.in_(first.values()))
    keys = {key.id: key for key in await session.scalars(query)}
    return [(spec_of(each, keys[first[each.id]]), each) for each in records]


def spec_of(record: IssuerRecord, key: ApiKey) -> IssuerSpec:
    has_claim = bool(record.project_claim)
    projects = ((f"{each.claim_value}=" * has_claim, each.project_name) for each in record.projects)
    return record_of(
        IssuerSpec,
        record,
        projects=tuple(map("".join, projects)),
        models=tuple(key.models),
        max_input_tokens=key.max_input_tokens,
        max_output_tokens=key.max_output_tokens,
        allowed_networks=tuple(key.allowed_networks),
        group=key.group,
    )
