"""What a month's usage was made of: by day, project, API key, model, or request by request. Reads counts and costs, never prompts.

A month is what its bill charges: the usage posted to it, also that of earlier months which was found late, and what was used in it
and is not posted yet, told apart as pending. So the rows of a month add up to the usage lines of its invoice. Days are those of the
settlement, in UTC. Statements are sets over the index on (organization_id, settled_at), and touch no other month than they must.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.forecast import WINDOW_DAYS
from metering.billing.pricing import COUNTS_OF_EVENT
from metering.billing.usage_statements import (
    KEYS,
    OUTCOMES,
    Grouping,
    UsageFilter,
    encode_token,
    group_statement,
    parameters_of,
    request_statement,
    total_statement,
    utc_date,
)
from metering.errors import InvalidValue
from metering.models import TokenKind

DAILY_COSTS = text(f"""
SELECT {KEYS[Grouping.DAY]} AS day, sum(u.cost_picos) AS cost FROM usage_events u
WHERE u.organization_id = :organization_id AND u.settled_at >= :first AND u.settled_at <= :now GROUP BY 1 ORDER BY 1
""")
# The planner takes days for as many as there are moments, having no statistics of them, and would sort all events on disk.
BY_HASH = text("SET LOCAL enable_sort = off")
PAGE_SIZE, PAGE_SIZE_MAX = 1_000, 10_000  # rows of some 300 bytes: a page is far below the size of a message


@dataclass(frozen=True, slots=True)
class Share:
    """Requests that ended in one way, with the tokens and the cost of them in picos, pending ones included."""

    request_count: int
    token_count: int
    amount_picos: int


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of one group; what it is not grouped by is None. token_counts: by kind as they are billed, cached input apart.

    amount_picos: as posted to the ledger. pending_picos: of events that are recorded and not posted yet. late: used in a month that
    was closed before. migration_count: how often requests went on in another engine. A request whose rest was found later has a
    second row, which counts no request.
    """

    organization_id: uuid.UUID | None
    organization_name: str | None
    currency_code: str | None
    day: date | None
    project_id: uuid.UUID | None
    project_name: str | None
    api_key_id: uuid.UUID | None
    api_key_name: str | None
    api_key_prefix: str | None
    model: str | None
    request_id: uuid.UUID | None
    outcome: str | None
    settled_at: datetime | None
    late: bool
    request_count: int
    token_counts: Mapping[TokenKind, int]
    cancelled: Share
    limited: Share
    failed: Share
    amount_picos: int
    pending_picos: int
    migration_count: int

    @property
    def token_count(self) -> int:
        """Of all kinds."""
        return sum(self.token_counts.values())


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Rows in the order of their groups; next_token is empty on the last page."""

    rows: tuple[UsageRow, ...]
    next_token: str


async def usage_page(
    session: AsyncSession, of: UsageFilter, by: Sequence[Grouping], *, page_size: int = 0, token: str = ""
) -> UsagePage:
    """Rows of a month, grouped by all of `by` in that order (Grouping.REQUEST alone: single requests, oldest first).

    Rows of a month that is not closed may change between pages. Raises: InvalidValue for a bad month, grouping, size or token.
    """
    size = checked_page_size(page_size)
    parameters = await parameters_of(session, of) | {"limit": size + 1}
    if Grouping.REQUEST in by:
        if len(by) > 1 or of.organization_id is None:
            raise InvalidValue("group_by", "single requests go with no other grouping, and are of one organization")
        keys: tuple[str, ...] = ("settled_at", "id")
        statement = request_statement(of, token, parameters)
    else:
        groups = checked_groups(by, of)
        keys = tuple(group.value for group in groups)
        statement = group_statement(of, groups, token, parameters)
        await session.execute(BY_HASH)
    rows = (await session.execute(text(statement), parameters)).all()
    more = len(rows) > size
    next_token = encode_token([getattr(rows[size - 1], key) for key in keys]) if more else ""
    return UsagePage(tuple(usage_row(row) for row in rows[:size]), next_token)


async def usage_total(session: AsyncSession, of: UsageFilter) -> UsageRow:
    """Everything that the filter lets through, as one row; of one organization, so that it has one currency."""
    assert of.organization_id is not None
    parameters = await parameters_of(session, of)
    statement = total_statement(of, parameters)
    return usage_row((await session.execute(text(statement), parameters)).one())


async def daily_costs(session: AsyncSession, organization_id: uuid.UUID, month_begins: datetime, now: datetime) -> dict[date, int]:
    """Picos by day of use (UTC), posted or not: of a month until now, and of the four weeks before that a forecast looks at."""
    first = min(month_begins, now - timedelta(days=WINDOW_DAYS)).astimezone(UTC)
    parameters = {"organization_id": organization_id, "first": datetime(first.year, first.month, first.day, tzinfo=UTC), "now": now}
    return {utc_date(row.day): int(row.cost) for row in await session.execute(DAILY_COSTS, parameters)}


def checked_page_size(page_size: int) -> int:
    """The size to use. Raises: InvalidValue."""
    if not 0 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidValue("page_size", f"give 1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE}")
    return page_size or PAGE_SIZE


def checked_groups(by: Sequence[Grouping], of: UsageFilter) -> tuple[Grouping, ...]:
    """The groups, with the organization first where there are several. Raises: InvalidValue."""
    if len(set(by)) < len(by):
        raise InvalidValue("group_by", "give each grouping once")
    groups = tuple(by) if of.organization_id is not None or Grouping.ORGANIZATION in by else (Grouping.ORGANIZATION, *by)
    if not groups:
        raise InvalidValue("group_by", f"give one or more of {', '.join(KEYS)}, or request")
    return groups


def usage_row(row: Row[Any]) -> UsageRow:
    """A row of any of the statements: what it lacks is None."""
    found = row._mapping
    shares = {
        name: Share(*(int(found[f"{name}_{column}"]) for column in ("request_count", "token_count", "amount_picos")))
        for name in OUTCOMES
    }
    return UsageRow(
        organization_id=found.get("organization_id"),
        organization_name=found.get("organization_name"),
        currency_code=found.get("currency_code"),
        day=utc_date(found["day"]) if "day" in found else None,
        project_id=found.get("project"),
        project_name=found.get("project_name"),
        api_key_id=found.get("api_key"),
        api_key_name=found.get("api_key_name"),
        api_key_prefix=found.get("api_key_prefix"),
        model=found.get("model"),
        request_id=found.get("request_id"),
        outcome=found.get("outcome"),
        settled_at=found.get("settled_at"),
        late=found["late"],
        request_count=int(found["request_count"]),
        token_counts={kind: int(found[f"{kind}_tokens"]) for kind in COUNTS_OF_EVENT},
        cancelled=shares["cancelled"],
        limited=shares["limited"],
        failed=shares["failed"],
        amount_picos=int(found["amount_picos"]),
        pending_picos=int(found["pending_picos"]),
        migration_count=int(found["migration_count"]),
    )
