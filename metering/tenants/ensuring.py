"""Get or create: what a script may say again and again. What stands but is not as asked is refused, never changed.

Functions take a session and never commit; each answers what stands and whether it stood before.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.errors import AlreadyExists
from metering.models import ApiKey, Organization, Project
from metering.tenants.key_rules import TokenBounds, checked_bound, checked_models, checked_scopes
from metering.tenants.networks import checked_networks
from metering.tenants.tenants import (
    KeyRecord,
    checked_name,
    create_api_key,
    create_organization,
    create_project,
    find_api_key,
    find_organization,
    find_project,
)


async def ensure_organization(
    session: AsyncSession, *, name: str, currency_code: str = "USD", actor: str
) -> tuple[Organization, bool]:
    """The customer of this name. Raises: InvalidValue; AlreadyExists if its currency is another one."""
    checked_name(name)
    try:
        return await create_organization(session, name=name, currency_code=currency_code, actor=actor), False
    except AlreadyExists:
        standing = await find_organization(session, name)
    if standing.currency_code != currency_code:
        raise AlreadyExists("organization", name, f"with the currency {standing.currency_code}, which never changes")
    return standing, True


async def ensure_project(session: AsyncSession, *, organization: str, name: str, actor: str) -> tuple[Project, bool]:
    """The project of this name. Raises: NotFound, InvalidValue."""
    checked_name(name)
    try:
        return await create_project(session, organization=organization, name=name, actor=actor), False
    except AlreadyExists:
        return await find_project(session, name, organization=organization), True


async def ensure_api_key(
    session: AsyncSession,
    *,
    organization: str,
    project: str,
    name: str,
    scopes: Collection[str] = ("inference",),
    models: Collection[str] = (),
    allowed_networks: Collection[str] = (),
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    lifetime: timedelta | None = None,
    actor: str,
) -> tuple[KeyRecord, str, bool]:
    """The project's working key of this name; its secret only if it is new, else empty.

    Raises: NotFound, InvalidValue; AlreadyExists if what it is good for is something else, or if several keys have the name.
    """
    owner = await find_project(session, project, organization=organization)
    # Scripts that say the same at the same time take turns; admissions refer to the row and do not wait.
    await session.execute(select(Project.id).where(Project.id == owner.id).with_for_update(key_share=True))
    working = select(ApiKey.id).where(
        ApiKey.project_id == owner.id,
        ApiKey.name == name,
        ApiKey.revoked_at.is_(None),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
    )
    found = (await session.scalars(working)).all()
    if not found:
        key, secret = await create_api_key(
            session,
            organization=organization,
            project=project,
            name=name,
            scopes=scopes,
            models=models,
            allowed_networks=allowed_networks,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
            lifetime=lifetime,
            actor=actor,
        )
        return key, secret, False
    if len(found) > 1:
        raise AlreadyExists("API key", name, f"{len(found)} times: revoke all but one, or say which by its prefix")
    standing = await find_api_key(session, str(found[0]))
    if sorted(standing.scopes) != checked_scopes(scopes):
        raise AlreadyExists("API key", name, f"with the scopes {', '.join(standing.scopes)}: change them with UpdateApiKey")
    if sorted(standing.models) != checked_models(models):
        shown = ", ".join(standing.models) or "every model"
        raise AlreadyExists("API key", name, f"for {shown}: change that with UpdateApiKey")
    if sorted(standing.allowed_networks) != checked_networks(allowed_networks):
        shown = ", ".join(standing.allowed_networks) or "everywhere"
        raise AlreadyExists("API key", name, f"to be used from {shown}: change that with UpdateApiKey")
    if standing.bounds != TokenBounds(
        checked_bound(max_input_tokens, "max_input_tokens"), checked_bound(max_output_tokens, "max_output_tokens")
    ):
        most = (standing.bounds.max_input_tokens or "any number of", standing.bounds.max_output_tokens or "any number of")
        raise AlreadyExists("API key", name, f"for {most[0]} input and {most[1]} output tokens: change that with UpdateApiKey")
    return standing, "", True
