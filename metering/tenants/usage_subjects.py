"""Names of usage subjects: the end users of a customer, and the values of its labels.

The customer chooses the name of an end user. It stands in one row (`UsageSubject`), so
erasing it there erases it everywhere.
"""

from __future__ import annotations

import re
import unicodedata
import uuid
from datetime import timedelta
from enum import StrEnum

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import UsageSubject, UsageSubjectCount
from metering.core.pages import PAGE_SIZE, check_page_size, page_values
from metering.core.pages import page_token as token_of
from metering.store.db import Sessions
from metering.tenants.tenants import as_uuid, region_of

NAME_BYTES_MAX = 512  # some coding agents send 200 and more
LABEL_KEY_CHARS_MAX, LABEL_VALUE_CHARS_MAX = 64, 512  # as in requests
END_USER, LABEL = "end_user", "label"  # kinds
# Longer than a month: an end user with one request a month is not archived.
IDLE_MAX = timedelta(days=35)
ARCHIVED_MAX = 10_000  # per transaction
LAST_CHAR = chr(0x10FFFF)  # sorts after all others
NOBODY = uuid.UUID(int=0)  # no row has this id
# Key of the advisory lock on a new name, held by an administrator's transaction that creates it.
NAME_LOCK = (
    "hashtextextended(concat_ws(chr(31), organization_id, kind, label_key, name), 1466263922)"
)
LOCK_NAME = text(f"""
SELECT pg_advisory_xact_lock_shared({NAME_LOCK})
FROM (SELECT CAST(:organization_id AS uuid) AS organization_id, CAST(:kind AS text) AS kind,
    CAST(:label_key AS text) AS label_key, CAST(:name AS text) AS name) AS n
""")
# Weir's keys, keys of OpenAI's form, and JSON Web Tokens: reports show names, and must not
# show a secret.
SECRET_FORMS = re.compile(
    r"wk_[a-z0-9]{6,}_[0-9A-Za-z]{16,}"
    r"|\bsk-[0-9A-Za-z_-]{20,}"
    r"|\beyJ[0-9A-Za-z_-]{8,}\.[0-9A-Za-z_-]{8,}\.[0-9A-Za-z_-]*"
)


def checked_end_user(name: str, field: str = "end_user") -> str:
    """Validate an end user's name and return it; empty if none was given. Raises: InvalidValue.

    `field` is the name of the field in the request, for the message. The name itself is not
    repeated there.
    """
    if not name:
        return name
    try:
        byte_count = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidValue(field, "must be valid Unicode text") from None
    if byte_count > NAME_BYTES_MAX:
        raise InvalidValue(
            field,
            f"must have 1 to {NAME_BYTES_MAX} bytes in UTF-8, got {byte_count}: send an id of your"
            " user, not data about it",
        )
    if name != name.strip():
        raise InvalidValue(field, "must not begin or end with a blank: remove it")
    if not name.isascii() or not name.isprintable():
        for at, character in enumerate(name):
            # Control characters, line separators, and code points without a meaning of their own.
            if unicodedata.category(character) in ("Cc", "Cn", "Cs", "Zl", "Zp"):
                raise InvalidValue(
                    field,
                    f"must not contain control characters, got U+{ord(character):04X} at"
                    f" position {at}",
                )
    if SECRET_FORMS.search(name):
        raise InvalidValue(
            field,
            "looks like an API key or token: send an id of your user, and revoke the secret if it"
            " was one",
        )
    return name


def checked_label(label: str, field: str = "label") -> tuple[str, str]:
    """Split `KEY=VALUE` into key and value. Raises: InvalidValue."""
    key, equals, value = label.partition("=")
    if not equals or not value:
        raise InvalidValue(field, f"must be KEY=VALUE such as team=search, got {label[:64]!r}")
    return checked_label_key(key, field), checked_label_value(value, field)


def checked_label_key(key: str, field: str = "label") -> str:
    """Validate the key of a label. Raises: InvalidValue."""
    if not 1 <= len(key) <= LABEL_KEY_CHARS_MAX or not key.isprintable():
        raise InvalidValue(
            field, f"the key must have 1 to {LABEL_KEY_CHARS_MAX} printable characters"
        )
    return key


def checked_label_value(value: str, field: str = "label") -> str:
    """Validate the value of a label. Raises: InvalidValue."""
    if len(value) > LABEL_VALUE_CHARS_MAX or "\0" in value:
        raise InvalidValue(
            field, f"the value must have 1 to {LABEL_VALUE_CHARS_MAX} characters, without NUL"
        )
    return value


async def find_usage_subject(
    session: AsyncSession, organization_id: uuid.UUID, kind: str, label_key: str, name: str
) -> UsageSubject | None:
    """Look up an end user, or a value of a label; None if it has no row."""
    query = select(UsageSubject).where(
        UsageSubject.organization_id == organization_id,
        UsageSubject.kind == kind,
        UsageSubject.label_key == label_key,
        UsageSubject.name == name,
    )
    return (await session.scalars(query)).one_or_none()


async def create_usage_subject(
    session: AsyncSession, organization_id: uuid.UUID, kind: str, label_key: str, name: str
) -> tuple[UsageSubject, bool]:
    """Find or create a usage subject; return also whether it is new.

    A new one is archived, and does not count towards the bound, until its first request, which is
    refused, to be sent again, until the transaction ends. Raises: InvalidValue if the name may not
    be stored in this database.
    """
    bound_to = await region_of(session, organization_id)
    if bound_to not in ("", session.info.get("region", "")):
        raise InvalidValue(
            kind,
            f"would be stored in a database that is not known to be in {bound_to!r}, which the"
            " organization is bound to: leave it out, or set WEIR_DATABASE_REGION",
        )
    named = {
        "organization_id": organization_id,
        "kind": kind,
        "label_key": label_key,
        "name": name,
    }
    await session.execute(LOCK_NAME, named)
    values = named | {"archived_at": func.now()}
    statement = insert(UsageSubject).values(values).on_conflict_do_nothing().returning(UsageSubject)
    if (new := await session.scalar(statement)) is not None:
        return new, True
    found = await find_usage_subject(session, organization_id, kind, label_key, name)
    assert found is not None, "a row that conflicts is committed, and is never deleted"
    return found, False


async def find_end_user(
    session: AsyncSession, organization_id: uuid.UUID, ref: str
) -> UsageSubject | None:
    """Look up an end user by its name, else by its id; None if there is none."""
    named = await find_usage_subject(session, organization_id, END_USER, "", ref)
    if named is not None or (subject_id := as_uuid(ref)) is None:
        return named
    query = select(UsageSubject).where(
        UsageSubject.id == subject_id,
        UsageSubject.organization_id == organization_id,
        UsageSubject.kind == END_USER,
    )
    return (await session.scalars(query)).one_or_none()


class EndUserState(StrEnum):
    """State of an end user."""

    ACTIVE = "active"
    ARCHIVED = "archived"
    ERASED = "erased"


def state_of(end_user: UsageSubject) -> EndUserState:
    """Return the state of an end user."""
    if end_user.erased_at is not None:
        return EndUserState.ERASED
    return EndUserState.ACTIVE if end_user.archived_at is None else EndUserState.ARCHIVED


async def end_users_page(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    prefix: str = "",
    state: EndUserState | None = None,
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[UsageSubject], str]:
    """List a page of end users by name, then of erased ones by id; those of a prefix or a state.

    Names are sorted by their bytes: those of a prefix are a range of the index. Returns the token
    of the next page too. Raises: InvalidValue.
    """
    check_page_size(page_size)
    name, subject_id = (
        page_values(page_token, checked_end_user, uuid.UUID) if page_token else ("", NOBODY)
    )
    listed = select(UsageSubject).where(
        UsageSubject.organization_id == organization_id,
        UsageSubject.kind == END_USER,
        UsageSubject.label_key == "",
    )
    found: list[UsageSubject] = []
    if subject_id == NOBODY and state is not EndUserState.ERASED:
        named = listed.where(UsageSubject.name > name)
        if prefix:
            named = named.where(UsageSubject.name >= prefix, UsageSubject.name < prefix + LAST_CHAR)
        if state is not None:
            is_active = UsageSubject.archived_at.is_(None)
            named = named.where(is_active if state is EndUserState.ACTIVE else ~is_active)
        found += await session.scalars(named.order_by(UsageSubject.name).limit(page_size + 1))
    if len(found) <= page_size and not prefix and state in (None, EndUserState.ERASED):
        erased = listed.where(UsageSubject.name.is_(None), UsageSubject.id > subject_id)
        left = page_size + 1 - len(found)
        found += await session.scalars(erased.order_by(UsageSubject.id).limit(left))
    if len(found) <= page_size:
        return found, ""
    last = found[page_size - 1]
    position = ("", last.id) if last.name is None else (last.name, NOBODY)
    return found[:page_size], token_of(*position)


async def archive_idle(
    session: AsyncSession, idle: timedelta = IDLE_MAX, limit: int = ARCHIVED_MAX
) -> int:
    """Archive up to `limit` usage subjects that no request has used for long; return how many.

    Their limits and counters stay. The next request of one brings it back in its commit.
    """
    unused = UsageSubject.last_used_on < func.date(func.now() - idle)
    is_active = UsageSubject.archived_at.is_(None)
    rows = await session.execute(
        select(UsageSubject.id, UsageSubject.organization_id)
        .where(unused, is_active)
        .order_by(UsageSubject.last_used_on)
        .limit(limit)
    )
    organizations = {row.id: row.organization_id for row in rows}
    # Locked first, as by an admission that creates a usage subject.
    await session.execute(
        select(UsageSubjectCount.organization_id)
        .where(UsageSubjectCount.organization_id.in_(set(organizations.values())))
        .order_by(UsageSubjectCount.organization_id)
        .with_for_update()
    )
    archived = await session.scalars(
        update(UsageSubject)
        .where(UsageSubject.id.in_(organizations), unused, is_active)
        .values(archived_at=func.now())
        .returning(UsageSubject.id)
    )
    return len(archived.all())


async def archive_all_idle(sessions: Sessions) -> int:
    """Archive all idle usage subjects in transactions of bounded size; return how many."""
    archived_count = 0
    while True:
        async with sessions.begin() as session:
            batch_count = await archive_idle(session)
        archived_count += batch_count
        if batch_count < ARCHIVED_MAX:
            return archived_count
