"""Service accounts: programs of an organization that own keys.

A member's leave does not end them. Functions take a session and never commit. Every change writes
the audit log in the same transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, and_, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import recheck_key
from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import ApiKey, ApiKeyOwner, Organization, ServiceAccount, record_of
from metering.core.pages import PAGE_SIZE, SortKey, page_of
from metering.tenants.api_keys import change_key, checked_key_name, end_key, locked_key
from metering.tenants.key_groups import lock_groups
from metering.tenants.key_terms import ROLES, KeyTerms
from metering.tenants.tenants import as_uuid, find_organization


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccountRecord:
    """A service account that is not deleted, with the number of its active keys."""

    service_account_id: uuid.UUID
    organization_id: uuid.UUID
    organization_name: str
    name: str
    role: str
    created_at: datetime
    key_count: int


def terms_of_account(role: str) -> KeyTerms:
    """Return the terms of an account's keys: with a role, or for models. Raises: InvalidValue."""
    if role and role not in ROLES:
        raise InvalidValue("role", f"{role[:20]!r} is not one of {', '.join(ROLES)}, or empty")
    return KeyTerms(role=role)


async def create_service_account(
    session: AsyncSession, *, organization: str, name: str, role: str = "", actor: str
) -> ServiceAccountRecord:
    """Create a service account. Raises: NotFound, InvalidValue, AlreadyExists."""
    owner = await find_organization(session, organization)
    terms_of_account(role)
    values = {"organization_id": owner.id, "name": checked_account_name(name), "role": role}
    try:
        async with session.begin_nested():
            made = (
                await session.scalars(
                    insert(ServiceAccount).values(values).returning(ServiceAccount)
                )
            ).one()
    except IntegrityError as error:  # the unique name
        raise AlreadyExists("service account", name) from error
    await record_change(
        session, actor, "service_account.create", str(made.id), before=None, after=snapshot(made)
    )
    return await find_service_account(session, str(owner.id), str(made.id))


async def change_service_account(
    session: AsyncSession, *, organization: str, service_account: str, role: str, actor: str
) -> ServiceAccountRecord:
    """Give a service account another role, and its keys with it, at once on every server.

    Raises: NotFound, InvalidValue.
    """
    account = await _locked(session, organization, service_account)
    terms = terms_of_account(role)
    if role == account.role:
        return await find_service_account(session, str(account.organization_id), str(account.id))
    await _change(session, account, actor, "service_account.update", role=role)
    for key_id in await _active_keys(session, account.id):
        key = await locked_key(session, key_id)
        # A key without a role is for models; with one, it may use them if it could before.
        values = {"role": role, "scopes": key.scopes if terms.role else ["inference"]}
        changed = await change_key(session, key, actor, "api_key.update", **values)
        await recheck_key(session, key.id, changed.allowed_networks)
    return await find_service_account(session, str(account.organization_id), str(account.id))


async def delete_service_account(
    session: AsyncSession, *, organization: str, service_account: str, actor: str
) -> int:
    """Delete a service account and revoke its keys; return how many were active.

    Raises: NotFound.
    """
    account = await _locked(session, organization, service_account)
    keys = await _active_keys(session, account.id)
    for key_id in keys:
        await end_key(session, key_id, actor)
    await _change(session, account, actor, "service_account.delete", deleted_at=func.now())
    return len(keys)


async def find_service_account(
    session: AsyncSession, organization: str, ref: str
) -> ServiceAccountRecord:
    """Look up a service account of an organization by name or id. Raises: NotFound."""
    owner = await find_organization(session, organization)
    key = as_uuid(ref)
    is_named = ServiceAccount.name == ref if key is None else ServiceAccount.id == key
    query = _select().where(ServiceAccount.organization_id == owner.id, is_named)
    if (row := (await session.execute(query)).one_or_none()) is None:
        raise NotFound("service account", ref)
    return _record(*row)


async def list_service_accounts(
    session: AsyncSession, *, organization: str, page_size: int = PAGE_SIZE, page_token: str = ""
) -> tuple[list[ServiceAccountRecord], str]:
    """List a page of the service accounts of an organization by name.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    query = _select().where(ServiceAccount.organization_id == owner.id)
    key = SortKey(ServiceAccount.name)
    rows, following = await page_of(session, query, key, page_size=page_size, page_token=page_token)
    return [_record(*row) for row in rows], following


def checked_account_name(name: str) -> str:
    """Validate a name and return it unchanged. A UUID is refused, as it would be ambiguous."""
    if as_uuid(name) is not None:
        raise InvalidValue("name", "must not be a UUID, which refers to an id")
    return checked_key_name(name)


async def _locked(session: AsyncSession, organization: str, ref: str) -> ServiceAccount:
    found = await find_service_account(session, organization, ref)
    await lock_groups(session, found.organization_id)  # before the keys, as all changes
    locking = select(ServiceAccount).where(
        ServiceAccount.id == found.service_account_id, ServiceAccount.deleted_at.is_(None)
    )
    locking = locking.with_for_update().execution_options(populate_existing=True)
    if (account := await session.scalar(locking)) is None:  # deleted meanwhile
        raise NotFound("service account", ref)
    return account


async def _change(
    session: AsyncSession, account: ServiceAccount, actor: str, action: str, **values: object
) -> None:
    before = snapshot(account)
    await session.execute(
        update(ServiceAccount).where(ServiceAccount.id == account.id).values(**values)
    )
    await session.refresh(account)
    after = snapshot(account)
    await record_change(session, actor, action, str(account.id), before=before, after=after)


async def _active_keys(session: AsyncSession, account_id: uuid.UUID) -> Sequence[uuid.UUID]:
    query = (
        select(ApiKey.id)
        .join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
        .where(ApiKeyOwner.service_account_id == account_id, ApiKey.revoked_at.is_(None))
        .order_by(ApiKey.id)
    )
    return (await session.scalars(query)).all()


def _select() -> Select[ServiceAccount, str, int]:
    count = (
        select(func.count())
        .select_from(ApiKeyOwner)
        .join(ApiKey, and_(ApiKey.id == ApiKeyOwner.api_key_id, ApiKey.revoked_at.is_(None)))
        .where(ApiKeyOwner.service_account_id == ServiceAccount.id)
        .correlate(ServiceAccount)
        .scalar_subquery()
    )
    return (
        select(ServiceAccount, Organization.name, count)
        .join(Organization, Organization.id == ServiceAccount.organization_id)
        .where(ServiceAccount.deleted_at.is_(None))
    )


def _record(account: ServiceAccount, organization_name: str, count: int) -> ServiceAccountRecord:
    return record_of(
        ServiceAccountRecord,
        account,
        service_account_id=account.id,
        organization_name=organization_name,
        key_count=count,
    )
