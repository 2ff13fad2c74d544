"""What a month's usage was made of: by day, project, API key, model, or request by request. Reads counts and costs, never prompts.

A month is what its bill charges: the usage posted to it, also that of earlier months which was found late, and what was used in it
and is not posted yet, told apart as pending. So the rows of a month add up to the usage lines of its invoice. Days are those of the
settlement, in UTC. Statements are sets over the index on (organization_id, settled_at), and touch no other month than they must.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue, NotFound
from metering.core.models import Hold, HoldState, PriceVersion, TokenKind, UsageEvent
from metering.invoicing.month_reading import CANCELLED, FAILED, LIMITED
from metering.ledger.ledger import month_bounds
from metering.ledger.models import MonthState, TransactionKind
from metering.pricing.prices import checked_model
from metering.pricing.token_prices import COUNTS_OF_EVENT
from metering.reports.forecast import WINDOW_DAYS


class Grouping(StrEnum):
    """What rows are for. `request` gives a row for each usage event and goes with no other."""

    ORGANIZATION = "organization"
    DAY = "day"
    PROJECT = "project"
    API_KEY = "api_key"
    MODEL = "model"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which usage: of a month `YYYY-MM`, of one organization or all, and only of what is given here. Ids are exact."""

    month: str
    organization_id: uuid.UUID | None = None
    day: date | None = None
    project_id: uuid.UUID | None = None
    api_key_id: uuid.UUID | None = None
    model: str = ""


KEYS: Mapping[Grouping, str] = {
    Grouping.ORGANIZATION: "u.organization_id",
    Grouping.DAY: "date_bin('1 day', u.settled_at, TIMESTAMPTZ '2000-01-01 00:00:00+00')",  # no time zone to be looked up for each
    Grouping.PROJECT: "u.project_id",
    Grouping.API_KEY: "u.api_key_id",
    Grouping.MODEL: "u.model",
}
READ_KEY: Mapping[Grouping, Callable[[str], object]] = {
    Grouping.ORGANIZATION: uuid.UUID,
    Grouping.DAY: datetime.fromisoformat,
    Grouping.PROJECT: uuid.UUID,
    Grouping.API_KEY: uuid.UUID,
    Grouping.MODEL: checked_model,
}
NAMES: Mapping[Grouping, tuple[str, str]] = {
    Grouping.PROJECT: ("p.name AS project_name", "JOIN projects p ON p.id = used.project"),
    Grouping.API_KEY: ("k.name AS api_key_name, k.prefix AS api_key_prefix", "JOIN api_keys k ON k.id = used.api_key"),
}
ROW_ID_MAX = 2**63 - 1
OUTCOMES = {"cancelled": CANCELLED, "limited": LIMITED, "failed": FAILED}

# In two steps: first plain sums by whatever tells rows apart, which is all that is done for each event, then the rows of those few.
KINDS = ", ".join(f"sum({count}) AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
PARTS = f"""u.outcome, u.rated_at IS NOT NULL AS is_posted, u.settled_at < :begins AS is_late,
           count(*) FILTER (WHERE u.part = 0) AS request_count, sum(u.cost_picos) AS cost,
           sum(u.migration_count) AS migration_count, {KINDS}"""
ALL_KINDS = " + ".join(COUNTS_OF_EVENT)
PART_KEYS = "u.outcome, is_posted, is_late"
SUMS = ",\n           ".join(
    [
        "coalesce(sum(request_count), 0) AS request_count",
        "coalesce(sum(migration_count), 0) AS migration_count",
        *(f"coalesce(sum({kind}), 0) AS {kind}_tokens" for kind in COUNTS_OF_EVENT),
        "coalesce(sum(cost) FILTER (WHERE is_posted), 0) AS amount_picos",
        "coalesce(sum(cost) FILTER (WHERE NOT is_posted), 0) AS pending_picos",
        "coalesce(bool_or(is_late), false) AS late",
        *(
            f"coalesce(sum({what}) FILTER (WHERE outcome = ANY(:{name})), 0) AS {name}_{column}"
            for name in OUTCOMES
            for column, what in (
                ("request_count", "request_count"),
                ("token_count", ALL_KINDS),
                ("amount_picos", "cost"),
            )
        ),
    ]
)
# Usage that the month's bill charges. What is not posted yet when a month is closed will be in another one.
CHARGED = f"""
    u.settled_at >= :first AND u.settled_at < :ends
    AND (u.ledger_transaction_id IN (SELECT t.id FROM ledger_transactions t WHERE {{owner}}
                                     AND t.billing_month = CAST(:month AS date) AND t.kind = '{TransactionKind.USAGE}')
         OR (u.rated_at IS NULL AND u.settled_at >= :begins
             AND NOT EXISTS (SELECT FROM billing_months b WHERE b.organization_id = u.organization_id
                             AND b.month = CAST(:month AS date) AND b.state = '{MonthState.CLOSED}')))
"""


def group_statement(of: UsageFilter, groups: Sequence[Grouping], token: str, parameters: dict[str, Any]) -> str:
    """The rows of one page: sums by group, then the names of what the rows are for."""
    after = ""
    if token:
        values = decode_token(token, [READ_KEY[group] for group in groups])
        parameters |= {f"after_{group}": value for group, value in zip(groups, values, strict=True)}
        bound = ", ".join(f":after_{group}" for group in groups)
        after = f"AND ({', '.join(KEYS[group] for group in groups)}) > ({bound})"
    keys = ", ".join(f"{KEYS[group]} AS {group}" for group in groups)
    names = "".join(f", {NAMES[group][0]}" for group in groups if group in NAMES)
    joins = "\n".join(NAMES[group][1] for group in groups if group in NAMES)
    listed = ", ".join(groups)
    owner = "used.organization" if Grouping.ORGANIZATION in groups else "CAST(:organization_id AS uuid)"
    return f"""
WITH parts AS (
    SELECT {keys}, {PARTS}
    FROM usage_events u WHERE {where(of, parameters)} {after}
    GROUP BY {listed}, {PART_KEYS}
), used AS (
    SELECT {listed},
           {SUMS}
    FROM parts GROUP BY {listed} ORDER BY {listed} LIMIT :limit
)
SELECT used.*, o.id AS organization_id, o.name AS organization_name, o.currency_code{names}
FROM used JOIN organizations o ON o.id = {owner}
{joins}
ORDER BY {listed}"""


def request_statement(of: UsageFilter, token: str, parameters: dict[str, Any]) -> str:
    """The usage events of one page, oldest first."""
    after = ""
    if token:
        parameters["after_time"], parameters["after_id"] = decode_token(token, (datetime.fromisoformat, row_id))
        after = "AND (u.settled_at, u.id) > (:after_time, :after_id)"
    return f"""
WITH page AS MATERIALIZED (
    SELECT * FROM usage_events u WHERE {where(of, parameters)} {after} ORDER BY u.settled_at, u.id LIMIT :limit
), used AS (
    SELECT id, settled_at, day, project, api_key, model, request_id, outcome, {SUMS}
    FROM (
        SELECT u.id, u.settled_at, {KEYS[Grouping.DAY]} AS day, u.project_id AS project, u.api_key_id AS api_key, u.model,
               u.request_id, {PARTS}
        FROM page u GROUP BY u.id, u.settled_at, u.project_id, u.api_key_id, u.model, u.request_id, u.rated_at, u.outcome
    ) parts GROUP BY id, settled_at, day, project, api_key, model, request_id, outcome
)
SELECT used.*, o.id AS organization_id, o.name AS organization_name, o.currency_code, p.name AS project_name,
       k.name AS api_key_name, k.prefix AS api_key_prefix
FROM used JOIN organizations o ON o.id = :organization_id
JOIN projects p ON p.id = used.project JOIN api_keys k ON k.id = used.api_key
ORDER BY used.settled_at, used.id"""


def total_statement(of: UsageFilter, parameters: dict[str, Any]) -> str:
    parts = f"SELECT {PARTS} FROM usage_events u WHERE {where(of, parameters)} GROUP BY {PART_KEYS}"
    return f"SELECT {SUMS}\nFROM ({parts}) parts"


# When the usage of a month begins: before the month only where usage was found late.
FIRST_USE = text(f"""
SELECT least(CAST(:begins AS timestamptz), min(t.effective_at)) FROM ledger_transactions t
WHERE (CAST(:organization_id AS uuid) IS NULL OR t.organization_id = :organization_id)
  AND t.billing_month = CAST(:month AS date) AND t.kind = '{TransactionKind.USAGE}'
""")


def where(of: UsageFilter, parameters: dict[str, Any]) -> str:
    """The filter as SQL; what it needs is put into the parameters."""
    conditions = [CHARGED.format(owner="true" if of.organization_id is None else "t.organization_id = :organization_id")]
    if of.organization_id is not None:
        conditions.insert(0, "u.organization_id = :organization_id")
    if of.day is not None:
        parameters["day_begins"] = datetime(of.day.year, of.day.month, of.day.day, tzinfo=UTC)
        conditions.append("u.settled_at >= :day_begins AND u.settled_at < :day_begins + interval '24 hours'")
    for column, value in (("project_id", of.project_id), ("api_key_id", of.api_key_id), ("model", of.model or None)):
        if value is not None:
            parameters[column] = value
            conditions.append(f"u.{column} = :{column}")
    return " AND ".join(conditions)


async def parameters_of(session: AsyncSession, of: UsageFilter) -> dict[str, Any]:
    """What every statement needs. Raises: InvalidValue for a bad month, or a name that no model has.

    The first moment is looked up beforehand, so that the planner knows how much of the index a statement will read.
    """
    begins, ends = month_bounds(of.month)
    if of.model:
        checked_model(of.model)
    month = {"organization_id": of.organization_id, "begins": begins, "ends": ends, "month": begins.date()}
    first = (await session.execute(FIRST_USE, month)).scalar_one()
    return month | {"first": first, **{name: [outcome.value for outcome in outcomes] for name, outcomes in OUTCOMES.items()}}


def utc_date(moment: datetime) -> date:
    """The day that begins then."""
    return moment.astimezone(UTC).date()


def encode_token(values: Sequence[object]) -> str:
    """The place of a row, for the next page to begin behind it."""
    return base64.urlsafe_b64encode(json.dumps([str(value) for value in values]).encode()).decode()


def row_id(text: str) -> int:
    """The id of a row. Raises: ValueError for what no column holds."""
    value = int(text)
    if not 0 <= value <= ROW_ID_MAX:
        raise ValueError(f"{text[:64]!r} is not a row id")
    return value


def decode_token(token: str, readers: Sequence[Callable[[str], object]]) -> list[object]:
    """The values of a token. Raises: InvalidValue if it is not one of this call."""
    try:
        values = json.loads(base64.urlsafe_b64decode(token.encode()))
        return [read(value) for read, value in zip(readers, values, strict=True)]
    except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError, OverflowError, InvalidValue):
        raise InvalidValue("page_token", "give the token of the page before, with everything else as it was") from None


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


class RecordedRequest(NamedTuple):
    """The hold of one request, the currency of its price, and its usage events by part."""

    hold: Hold
    currency_code: str
    events: Sequence[UsageEvent]


async def find_recorded_request(session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID) -> RecordedRequest:
    """Return what the database holds of a request. Raises: NotFound if the project has no such request."""
    of_request = (Hold.project_id == project_id, Hold.request_id == request_id)
    # A voided attempt may have been followed by one that ran, which no other can follow, and which an index finds.
    hold = await session.scalar(select(Hold).where(*of_request, Hold.state != HoldState.VOIDED))
    if hold is None:
        hold = await session.scalar(select(Hold).where(*of_request).order_by(Hold.admitted_at.desc()).limit(1))
    if hold is None:
        raise NotFound("request", str(request_id))
    price = await session.get_one(PriceVersion, hold.price_version_id)
    events = (await session.scalars(select(UsageEvent).where(UsageEvent.hold_id == hold.id).order_by(UsageEvent.part))).all()
    return RecordedRequest(hold, price.currency_code, events)
