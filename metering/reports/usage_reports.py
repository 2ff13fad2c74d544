"""Usage reports of a month or of a range of days, by time, project, key, model, end user, label or
request.

They read counts and costs, never prompts.

A report of a month covers the usage that the month's bill charges: usage posted to the month,
including late usage of earlier months, and usage of the month that is not posted yet, reported as
pending. The rows of a month therefore add up to the usage lines of its invoice. A report of days
covers the usage of these days, whichever month charges it. The day of usage is that of its
settlement, in UTC. Statements use the index on (organization_id, settled_at), or that of an end
user and time.

Usage without an end user, or without the label, is a row of its own, so that the rows of every
grouping add up to the total. Keys of rows are never NULL, which a page token could not compare.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import (
    Hold,
    HoldState,
    PriceVersion,
    TokenKind,
    UsageEvent,
    UsageSubject,
    record_of,
)
from metering.core.pages import page_token, page_values, row_id, utc_time
from metering.core.retained import check_details, request_not_found
from metering.invoicing.months import BY_HASH, CANCELLED, FAILED, LIMITED
from metering.ledger.ledger import MonthState, TransactionKind, month_bounds
from metering.pricing.prices import COUNTS_OF_EVENT, checked_model
from metering.reports.forecast import WINDOW_DAYS
from metering.tenants.usage_subjects import (
    NOBODY,
    checked_end_user,
    checked_label_key,
    checked_label_value,
    find_end_user,
)

REPORTED_OUTCOMES = {"cancelled": CANCELLED, "limited": LIMITED, "failed": FAILED}
# Two steps: plain sums of all events by group, outcome and state, then the rows from these few
# sums. So little is computed per event.
KIND_SUMS = ", ".join(f"sum({count}) AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
ALL_KINDS = " + ".join(COUNTS_OF_EVENT)
PART_KEYS = "u.outcome, is_posted, is_late"

ROW_SUMS = ",\n           ".join(
    [
        "coalesce(sum(request_count), 0) AS request_count",
        "coalesce(sum(migration_count), 0) AS migration_count",
        *(f"coalesce(sum({kind}), 0) AS {kind}_tokens" for kind in COUNTS_OF_EVENT),
        "coalesce(sum(cost) FILTER (WHERE is_posted), 0) AS amount_picos",
        "coalesce(sum(cost) FILTER (WHERE NOT is_posted), 0) AS pending_picos",
        "coalesce(bool_or(is_late), false) AS late",
        *(
            f"coalesce(sum({summed}) FILTER (WHERE outcome = ANY(:{name})), 0) AS {name}_{column}"
            for name in REPORTED_OUTCOMES
            for column, summed in (
                ("request_count", "request_count"),
                ("token_count", ALL_KINDS),
                ("amount_picos", "cost"),
            )
        ),
    ]
)

# A row has some 300 bytes, so a page is far smaller than the maximum message.
PAGE_SIZE, PAGE_SIZE_MAX = 1_000, 10_000
NOT_GIVEN = NOBODY
DAYS_MAX = 92  # of one report: a quarter


class Grouping(StrEnum):
    """Grouping of report rows. `request` gives one row per usage event and must be alone."""

    ORGANIZATION = "organization"
    DAY = "day"
    PROJECT = "project"
    API_KEY = "api_key"
    MODEL = "model"
    REQUEST = "request"
    END_USER = "end_user"
    LABEL = "label"
    HOUR = "hour"


@dataclass(frozen=True, slots=True)
class Days:
    """Range of days in UTC, both included."""

    first: date
    last: date


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Usage of a month `YYYY-MM` or of a range of days, of one organization or all, narrowed by the
    other fields set. `labels` are those that a request must have, among others.
    """

    period: str | Days
    organization_id: uuid.UUID | None = None
    day: date | None = None
    project_id: uuid.UUID | None = None
    api_key_id: uuid.UUID | None = None
    model: str = ""
    end_user_id: uuid.UUID | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    end_user_ids: Sequence[uuid.UUID] | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """Groupings of rows, in the order in which rows are sorted.

    `label_key` belongs to Grouping.LABEL: rows are grouped by the values of this label. With
    `largest_first` rows are sorted by their cost before. With `latest_first` requests are sorted
    from the latest.
    """

    by: Sequence[Grouping]
    label_key: str = ""
    largest_first: bool = False
    latest_first: bool = False


class GroupColumns(NamedTuple):
    """SQL of one grouping.

    `key` is an expression on a usage event u; `parse` reads its value from a page token. `names`
    and `join` are further columns and the table they come from. `detail` is what it needs of single
    events, if the sums of old months are not enough.
    """

    key: str
    parse: Callable[[str], object]
    names: str = ""
    join: str = ""
    detail: str = ""


def label_text(text: str) -> str:
    """Read a label's key of a row from a page token. Raises: InvalidValue."""
    return text and "=" + checked_label_value(text.removeprefix("="))


GROUPS: Mapping[Grouping, GroupColumns] = {
    Grouping.ORGANIZATION: GroupColumns("u.organization_id", uuid.UUID),
    # Unlike date_trunc it needs no time zone, which would be looked up for each row.
    Grouping.DAY: GroupColumns(
        "date_bin('1 day', u.settled_at, TIMESTAMPTZ '2000-01-01 00:00:00+00')", utc_time
    ),
    Grouping.HOUR: GroupColumns(
        "date_bin('1 hour', u.settled_at, TIMESTAMPTZ '2000-01-01 00:00:00+00')",
        utc_time,
        detail="the times of requests",
    ),
    Grouping.PROJECT: GroupColumns(
        "u.project_id",
        uuid.UUID,
        "p.name AS project_name",
        "LEFT JOIN projects p ON p.id = used.project",
    ),
    Grouping.API_KEY: GroupColumns(
        "u.api_key_id",
        uuid.UUID,
        "k.name AS api_key_name, k.prefix AS api_key_prefix",
        "LEFT JOIN api_keys k ON k.id = used.api_key",
    ),
    Grouping.MODEL: GroupColumns("u.model", checked_model),
    Grouping.END_USER: GroupColumns(
        f"coalesce(u.end_user_id, '{NOT_GIVEN}')",
        uuid.UUID,
        "s.name AS end_user_name",
        "LEFT JOIN usage_subjects s ON s.id = used.end_user",
        "the end users of requests",
    ),
    # A value may be empty, and differs from none.
    Grouping.LABEL: GroupColumns(
        "coalesce('=' || (u.labels ->> :label_key), '')",
        label_text,
        detail="the labels of requests",
    ),
}

PARTS = f"""u.outcome, u.rated_at IS NOT NULL AS is_posted, u.settled_at < :begins AS is_late,
           sum(u.event_count) FILTER (WHERE u.part = 0) AS request_count,
           sum(u.cost_picos) AS cost,
           sum(u.migration_count) AS migration_count, {KIND_SUMS}"""

USED = "u.settled_at >= :begins AND u.settled_at < :ends"
# Usage that the month's bill charges. Usage that is unrated when the month is closed is charged by
# a later one.
CHARGED = f"""
      u.settled_at >= :first
      AND u.settled_at < :ends
      AND (
          u.ledger_transaction_id IN (
              SELECT t.id
              FROM ledger_transactions t
              WHERE {{owner}}
                AND t.billing_month = CAST(:month AS date)
                AND t.kind = '{TransactionKind.USAGE}'
          )
          OR u.billing_month = CAST(:month AS date)
          OR (
              u.rated_at IS NULL
              AND u.settled_at >= :begins
              AND NOT EXISTS (
                  SELECT FROM billing_months b
                  WHERE b.organization_id = u.organization_id
                    AND b.month = CAST(:month AS date)
                    AND b.state = '{MonthState.CLOSED}'
              )
          )
      )
"""


# Usage events with the columns of `usage_sums`, for what the sums of old months do not have.
DETAILS = "SELECT e.*, 1 AS event_count, NULL::date AS billing_month FROM usage_events e"


def details_of(of: UsageFilter, by: Sequence[Grouping]) -> tuple[str, str] | None:
    """Return the field that needs single usage events, and for what; None if sums are enough."""
    if Grouping.REQUEST in by:
        return "group_by", "single requests"
    for group in by:
        if GROUPS[group].detail:
            return "group_by", GROUPS[group].detail
    if of.end_user_id is not None:
        return "end_user", GROUPS[Grouping.END_USER].detail
    if of.labels:
        return "labels", GROUPS[Grouping.LABEL].detail
    return None


def usage_of(of: UsageFilter, by: Sequence[Grouping]) -> str:
    """Build the SQL source of a report: usage events, or their sums where these are enough."""
    return "usage_sums" if details_of(of, by) is None else f"({DETAILS})"


def group_statement(
    of: UsageFilter,
    groups: Groups,
    token: str,
    parameters: dict[str, Any],
    with_total: bool = False,
) -> str:
    """Build the statement of one page: sums by group, then the names of the group's objects.

    `with_total` adds a first row with the sum of all groups, which has no group.
    """
    by = groups.by
    after = after_largest = ""
    if token:
        values = page_values(token, *readers_of(groups))
        if groups.largest_first:
            parameters["after_cost"] = values.pop(0)
        parameters |= {f"after_{group}": value for group, value in zip(by, values, strict=True)}
        bound = ", ".join(f":after_{group}" for group in by)
        after = f"AND ({', '.join(GROUPS[group].key for group in by)}) > ({bound})"
        if groups.largest_first:
            after = ""
            after_largest = (
                f"HAVING (-sum(cost), {', '.join(by)}) > (-CAST(:after_cost AS numeric), {bound})"
            )
    if Grouping.LABEL in by:
        parameters["label_key"] = groups.label_key
    keys = ", ".join(f"{GROUPS[group].key} AS {group}" for group in by)
    named = [GROUPS[group] for group in by if GROUPS[group].names]
    names = "".join(f", {columns.names}" for columns in named)
    joins = "\n".join(columns.join for columns in named)
    listed = ", ".join(by)
    order = f"cost DESC, {listed}" if groups.largest_first else listed
    owner = "used.organization" if Grouping.ORGANIZATION in by else "CAST(:organization_id AS uuid)"
    sets = f"GROUPING SETS (({listed}), ())" if with_total else listed
    order = f"is_total DESC, {order}"
    return f"""
WITH parts AS (
    SELECT {keys}, {PARTS}
    FROM {usage_of(of, by)} u
    WHERE {where(of, parameters)} {after}
    GROUP BY {listed}, {PART_KEYS}
), used AS (
    SELECT {listed}, sum(cost) AS cost, GROUPING({listed}) > 0 AS is_total,
           {ROW_SUMS}
    FROM parts
    GROUP BY {sets}
    {after_largest}
    ORDER BY {order}
    LIMIT :limit
)
SELECT used.*, o.id AS organization_id, o.name AS organization_name, o.currency_code{names}
FROM used
LEFT JOIN organizations o ON o.id = {owner}
{joins}
ORDER BY {order}"""


def readers_of(groups: Groups) -> list[Callable[[str], object]]:
    """List the readers of the values of a page token."""
    cost = [int] if groups.largest_first else []
    return [*cost, *(GROUPS[group].parse for group in groups.by)]


def request_statement(
    of: UsageFilter, groups: Groups, token: str, parameters: dict[str, Any]
) -> str:
    """Build the statement of one page of usage events, by time."""
    order, following = ("DESC", "<") if groups.latest_first else ("ASC", ">")
    after = ""
    if token:
        parameters["after_time"], parameters["after_id"] = page_values(token, utc_time, row_id)
        after = f"AND (u.settled_at, u.id) {following} (:after_time, :after_id)"
    return f"""
WITH page AS MATERIALIZED (
    SELECT *
    FROM ({DETAILS}) u
    WHERE {where(of, parameters)} {after}
    ORDER BY u.settled_at {order}, u.id {order}
    LIMIT :limit
), used AS (
    SELECT id, settled_at, day, project, api_key, model, request_id, end_user, outcome, {ROW_SUMS}
    FROM (
        SELECT u.id, u.settled_at, {GROUPS[Grouping.DAY].key} AS day, u.project_id AS project,
               u.api_key_id AS api_key, u.model, u.request_id, u.end_user_id AS end_user, {PARTS}
        FROM page u
        GROUP BY u.id, u.settled_at, u.project_id, u.api_key_id, u.model, u.request_id,
                 u.end_user_id, u.rated_at, u.outcome
    ) parts
    GROUP BY id, settled_at, day, project, api_key, model, request_id, end_user, outcome
)
SELECT used.*, o.id AS organization_id, o.name AS organization_name, o.currency_code,
       p.name AS project_name, k.name AS api_key_name, k.prefix AS api_key_prefix,
       s.name AS end_user_name
FROM used
JOIN organizations o ON o.id = :organization_id
JOIN projects p ON p.id = used.project
JOIN api_keys k ON k.id = used.api_key
LEFT JOIN usage_subjects s ON s.id = used.end_user
ORDER BY used.settled_at {order}, used.id {order}"""


# Start of a month's usage: before the month only if it has late usage.
FIRST_USE = text(f"""
SELECT least(CAST(:begins AS timestamptz), min(t.effective_at))
FROM ledger_transactions t
WHERE (CAST(:organization_id AS uuid) IS NULL OR t.organization_id = :organization_id)
  AND t.billing_month = CAST(:month AS date)
  AND t.kind = '{TransactionKind.USAGE}'
""")


def where(of: UsageFilter, parameters: dict[str, Any]) -> str:
    """Build the SQL condition of a filter, and add its values to `parameters`."""
    conditions = [USED]
    if isinstance(of.period, str):
        owner = "true" if of.organization_id is None else "t.organization_id = :organization_id"
        conditions = [CHARGED.format(owner=owner)]
    if of.organization_id is not None:
        conditions.insert(0, "u.organization_id = :organization_id")
    if of.day is not None:
        parameters["day_begins"] = midnight(of.day)
        conditions.append(
            "u.settled_at >= :day_begins AND u.settled_at < :day_begins + interval '24 hours'"
        )
    for column, value in (
        ("project_id", of.project_id),
        ("api_key_id", of.api_key_id),
        ("model", of.model or None),
        ("end_user_id", of.end_user_id),
    ):
        if value is not None:
            parameters[column] = value
            conditions.append(f"u.{column} = :{column}")
    if of.end_user_ids is not None:
        parameters["end_user_ids"] = list(of.end_user_ids)
        conditions.append("u.end_user_id = ANY(CAST(:end_user_ids AS uuid[]))")
    if of.labels:
        parameters["labels"] = json.dumps(dict(of.labels))
        conditions.append("u.labels @> CAST(:labels AS jsonb)")
    return " AND ".join(conditions)


async def parameters_of(
    session: AsyncSession, of: UsageFilter, by: Sequence[Grouping] = ()
) -> dict[str, Any]:
    """Build the parameters that all statements share.

    The start of the usage is queried first, so that the planner can estimate the range of the index
    that a statement reads. Raises: InvalidValue for an invalid month, model name or label, and for
    details that were removed.
    """
    if of.model:
        checked_model(of.model)
    for key, value in of.labels.items():
        checked_label_key(key, "labels"), checked_label_value(value, "labels")
    parameters: dict[str, Any] = {
        name: [outcome.value for outcome in outcomes]
        for name, outcomes in REPORTED_OUTCOMES.items()
    } | {"organization_id": of.organization_id}
    if isinstance(of.period, Days):
        ends = midnight(of.period.last) + timedelta(days=1)
        parameters |= {"begins": midnight(of.period.first), "ends": ends}
        await _check_details(session, of, by, parameters["begins"])
        return parameters
    begins, ends = month_bounds(of.period)
    parameters |= {"begins": begins, "ends": ends, "month": begins.date()}
    first = (await session.execute(FIRST_USE, parameters)).scalar_one()
    await _check_details(session, of, by, first)
    return parameters | {"first": first}


async def _check_details(
    session: AsyncSession, of: UsageFilter, by: Sequence[Grouping], first: datetime
) -> None:
    if (needed := details_of(of, by)) is not None:
        await check_details(session, first, *needed)


async def find_end_user_id(
    session: AsyncSession, organization_id: uuid.UUID, ref: str
) -> uuid.UUID | None:
    """Find the id of an end user, by name or id, for a filter; None for an empty text.

    An end user is created by its first request, so one that is unknown has no usage. Raises:
    InvalidValue.
    """
    if not ref:
        return None
    checked_end_user(ref)
    found = await find_end_user(session, organization_id, ref)
    return NOT_GIVEN if found is None else found.id


async def usage_of_end_users(
    session: AsyncSession, organization_id: uuid.UUID, days: Days, ids: Sequence[uuid.UUID]
) -> dict[uuid.UUID, UsageRow]:
    """Report the usage of some end users, by id; those without usage are left out."""
    if not ids:
        return {}
    of = UsageFilter(days, organization_id, end_user_ids=ids)
    page = await usage_page(session, of, Groups((Grouping.END_USER,)), page_size=len(ids))
    return {row.end_user_id: row for row in page.rows if row.end_user_id is not None}


def utc_date(moment: datetime) -> date:
    """Convert a time to its date in UTC."""
    return moment.astimezone(UTC).date()


def midnight(day: date) -> datetime:
    """Return the begin of a day in UTC."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def parse_day(day: str, field: str = "day") -> date | None:
    """Parse a day `YYYY-MM-DD`. Returns None for an empty string. Raises: InvalidValue."""
    if not day:
        return None
    try:
        return datetime.strptime(day, "%Y-%m-%d").date()
    except ValueError:
        raise InvalidValue(field, f"{day[:64]!r} is not a day: give it as YYYY-MM-DD") from None


def period_of(month: str, first_day: str, last_day: str, today: date) -> str | Days:
    """Choose the period of a report: a month, else a range of days, which ends today if no last day
    is given, and by default begins with the current month. Raises: InvalidValue.
    """
    first, last = parse_day(first_day, "first_day"), parse_day(last_day, "last_day") or today
    if month:
        if first_day or last_day:
            raise InvalidValue("month", "must be empty beside first_day or last_day")
        month_bounds(month)
        return month
    if first is None:
        if last_day:
            raise InvalidValue("first_day", "is required with last_day")
        first = today.replace(day=1)
    if last < first:
        raise InvalidValue("last_day", f"must be {first}, the first day, or later; got {last}")
    if (last - first).days >= DAYS_MAX:
        latest = first + timedelta(days=DAYS_MAX - 1)
        raise InvalidValue(
            "last_day", f"must be {latest} or before: a report covers {DAYS_MAX} days at most"
        )
    if last == date.max:
        raise InvalidValue("last_day", f"must be before {date.max}")
    return Days(first, last)


DAILY_COSTS = text(f"""
SELECT {GROUPS[Grouping.DAY].key} AS day, sum(u.cost_picos) AS cost
FROM usage_events u
WHERE u.organization_id = :organization_id
  AND u.settled_at >= :first
  AND u.settled_at <= :now
GROUP BY 1
ORDER BY 1
""")


@dataclass(frozen=True, slots=True)
class Share:
    """Requests with one kind of outcome: tokens, and cost in picos including pending usage."""

    request_count: int
    token_count: int
    amount_picos: int


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of one group. Fields of other groupings are None.

    `end_user_id` is None for usage without an end user, and `end_user` also for one that was
    erased. `label_value` is None without the label.

    `token_counts` are by billed kind, with cached input separate from input. `amount_picos` is
    posted to the ledger; `pending_picos` is recorded but not posted yet. `late` usage is of a month
    that was closed before the usage was posted. `migration_count` counts moves of requests to
    another engine. The recovered tokens of a request are a second row with a request count of 0.
    """

    late: bool
    request_count: int
    token_counts: Mapping[TokenKind, int]
    cancelled: Share
    limited: Share
    failed: Share
    amount_picos: int
    pending_picos: int
    migration_count: int
    organization_id: uuid.UUID | None = None
    organization_name: str | None = None
    currency_code: str | None = None
    day: date | None = None
    project_id: uuid.UUID | None = None
    project_name: str | None = None
    api_key_id: uuid.UUID | None = None
    api_key_name: str | None = None
    api_key_prefix: str | None = None
    model: str | None = None
    request_id: uuid.UUID | None = None
    outcome: str | None = None
    settled_at: datetime | None = None
    hour: datetime | None = None
    end_user_id: uuid.UUID | None = None
    end_user: str | None = None
    label_value: str | None = None

    @property
    def cost_picos(self) -> int:
        """Cost, posted or not."""
        return self.amount_picos + self.pending_picos


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A page of rows, in the order of their groups. `next_token` is empty on the last page.

    `total` is the sum of all pages, if it was requested.
    """

    rows: tuple[UsageRow, ...]
    next_token: str
    total: UsageRow | None = None


async def usage_page(
    session: AsyncSession,
    of: UsageFilter,
    groups: Groups,
    *,
    page_size: int = 0,
    token: str = "",
    with_total: bool = False,
) -> UsagePage:
    """Report a page of usage by `groups`.

    Grouping.REQUEST must be the only grouping and gives single requests by time. Rows of
    an open month may change between pages. The first page may have the total of one organization:
    sums by group read the usage once for both. Raises: InvalidValue for an invalid month, grouping,
    size or token.
    """
    if not 0 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidValue(
            "page_size", f"must be between 1 and {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE}"
        )
    size = page_size or PAGE_SIZE
    parameters = await parameters_of(session, of, groups.by) | {"limit": size + 1 + with_total}
    groups = checked_groups(groups, of)
    total = None
    if Grouping.REQUEST in groups.by:
        keys: tuple[str, ...] = ("settled_at", "id")
        statement = request_statement(of, groups, token, parameters)
        total = await usage_total(session, of) if with_total else None
    else:
        keys = (*(["cost"] if groups.largest_first else []), *groups.by)
        statement = group_statement(of, groups, token, parameters, with_total=with_total)
        await session.execute(BY_HASH)
    rows = list(await session.execute(text(statement), parameters))
    if with_total and total is None:
        found = usage_row(rows.pop(0))
        total = replace(found, organization_id=None, organization_name=None, currency_code=None)
    more = len(rows) > size
    next_token = page_token(*(getattr(rows[size - 1], key) for key in keys)) if more else ""
    return UsagePage(tuple(usage_row(row) for row in rows[:size]), next_token, total)


async def usage_total(session: AsyncSession, of: UsageFilter) -> UsageRow:
    """Sum the filtered usage of one organization, and so of one currency, in one row."""
    assert of.organization_id is not None
    parameters = await parameters_of(session, of)
    usage = usage_of(of, ())
    parts = f"SELECT {PARTS} FROM {usage} u WHERE {where(of, parameters)} GROUP BY {PART_KEYS}"
    return usage_row(
        (await session.execute(text(f"SELECT {ROW_SUMS} FROM ({parts}) parts"), parameters)).one()
    )


@dataclass(frozen=True, slots=True)
class OwnUsage:
    """Usage that a key may see: rows, their sum, and the days asked for."""

    rows: tuple[UsageRow, ...]
    total: UsageRow
    days: Days


async def own_usage(session: AsyncSession, of: UsageFilter, groups: Groups) -> OwnUsage:
    """Report usage, by day and model by default, on one page. Raises: InvalidValue."""
    if not groups.by:
        groups = replace(groups, by=(Grouping.DAY, Grouping.MODEL))
    hidden = {Grouping.ORGANIZATION, Grouping.PROJECT, Grouping.API_KEY, Grouping.REQUEST}
    if of.api_key_id is None:
        # Other keys' end users and labels are not the caller's own.
        hidden |= {Grouping.END_USER, Grouping.LABEL}
    if not hidden.isdisjoint(groups.by):
        of_project = ", with `project`" if of.api_key_id is None else ""
        names = ", ".join(each for each in Grouping if each not in hidden)
        raise InvalidValue("group_by", f"must be one or more of {names}{of_project}")
    page = await usage_page(session, of, groups, page_size=PAGE_SIZE_MAX)
    if page.next_token:
        raise InvalidValue(
            "group_by",
            f"gives more than {PAGE_SIZE_MAX:,} rows: ask for fewer days, one model or one end"
            " user",
        )
    days = of.period
    if isinstance(days, str):
        begins, ends = month_bounds(days)
        days = Days(utc_date(begins), utc_date(ends - timedelta(days=1)))
    return OwnUsage(page.rows, sum_of(page.rows), days)


def sum_of(rows: Sequence[UsageRow]) -> UsageRow:
    """Sum rows of one organization, which costs less than reading the usage once more."""

    def total(name: str) -> int:
        return sum(getattr(row, name) for row in rows)

    def share(name: str) -> Share:
        shares = [getattr(row, name) for row in rows]
        counts = [sum(getattr(each, field.name) for each in shares) for field in fields(Share)]
        return Share(*counts)

    return UsageRow(
        late=any(row.late for row in rows),
        request_count=total("request_count"),
        token_counts={
            kind: sum(row.token_counts[kind] for row in rows) for kind in COUNTS_OF_EVENT
        },
        cancelled=share("cancelled"),
        limited=share("limited"),
        failed=share("failed"),
        amount_picos=total("amount_picos"),
        pending_picos=total("pending_picos"),
        migration_count=total("migration_count"),
    )


async def daily_costs(
    session: AsyncSession, organization_id: uuid.UUID, month_begins: datetime, now: datetime
) -> dict[date, int]:
    """Sum the cost in picos, posted or pending, by day of use (UTC).

    Covers the month until now, and the `WINDOW_DAYS` before now that a forecast uses.
    """
    first = min(month_begins, now - timedelta(days=WINDOW_DAYS)).astimezone(UTC)
    parameters = {
        "organization_id": organization_id,
        "first": datetime(first.year, first.month, first.day, tzinfo=UTC),
        "now": now,
    }
    return {
        utc_date(row.day): int(row.cost) for row in await session.execute(DAILY_COSTS, parameters)
    }


def checked_groups(groups: Groups, of: UsageFilter) -> Groups:
    """Validate groupings; put ORGANIZATION first if the filter names none. Raises: InvalidValue."""
    by = tuple(groups.by)
    if len(set(by)) < len(by):
        raise InvalidValue(
            "group_by", "must not contain a grouping twice, and only the label of one key"
        )
    if Grouping.REQUEST in by and (len(by) > 1 or of.organization_id is None):
        raise InvalidValue(
            "group_by", "`request` must be the only grouping, and requires an organization"
        )
    if Grouping.LABEL in by:
        checked_label_key(groups.label_key, "label_key")
    elif groups.label_key:
        raise InvalidValue("label_key", "must be empty unless group_by has `label`")
    if groups.largest_first and (of.organization_id is None or Grouping.REQUEST in by):
        raise InvalidValue(
            "largest_first", "needs an organization, and another grouping than `request`"
        )
    if groups.latest_first and Grouping.REQUEST not in by:
        raise InvalidValue("latest_first", "must be unset unless group_by is `request`")
    if of.organization_id is None and Grouping.ORGANIZATION not in by:
        by = (Grouping.ORGANIZATION, *by)
    if not by:
        raise InvalidValue("group_by", f"must be `request` or one or more of {', '.join(GROUPS)}")
    return replace(groups, by=by)


def usage_row(row: Row[Any]) -> UsageRow:
    """Convert a row of any of the statements. Missing columns become None."""
    values = row._mapping
    shares = {
        name: Share(
            *(
                int(values[f"{name}_{column}"])
                for column in ("request_count", "token_count", "amount_picos")
            )
        )
        for name in REPORTED_OUTCOMES
    }
    end_user_id = values.get("end_user")
    label = values.get("label")
    return record_of(
        UsageRow,
        row,
        **shares,
        end_user_id=None if end_user_id == NOT_GIVEN else end_user_id,
        end_user=values.get("end_user_name"),
        label_value=label[1:] if label else None,
        day=utc_date(values["day"]) if values.get("day") is not None else None,
        project_id=values.get("project"),
        api_key_id=values.get("api_key"),
        token_counts={kind: int(values[f"{kind}_tokens"]) for kind in COUNTS_OF_EVENT},
    )


class RecordedRequest(NamedTuple):
    """Hold of a request, the currency of its price, its usage events by part, and its end user.

    `end_user` is empty if none was given, or if it was erased.
    """

    hold: Hold
    currency_code: str
    events: Sequence[UsageEvent]
    end_user: str


async def find_recorded_request(
    session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID
) -> RecordedRequest:
    """Read the hold and the usage events of a project's request. Raises: NotFound."""
    of_request = (Hold.project_id == project_id, Hold.request_id == request_id)
    # An index finds the one hold that was not voided; voided attempts may precede it.
    hold = await session.scalar(select(Hold).where(*of_request, Hold.state != HoldState.VOIDED))
    if hold is None:
        hold = await session.scalar(
            select(Hold).where(*of_request).order_by(Hold.admitted_at.desc()).limit(1)
        )
    if hold is None:
        raise await request_not_found(session, str(request_id))
    price = await session.get_one(PriceVersion, hold.price_version_id)
    events = select(UsageEvent).where(UsageEvent.hold_id == hold.id).order_by(UsageEvent.part)
    found = (await session.scalars(events)).all()
    end_user = await session.scalar(
        select(UsageSubject.name).where(UsageSubject.id == hold.end_user_id)
    )
    return RecordedRequest(hold, price.currency_code, found, end_user or "")
