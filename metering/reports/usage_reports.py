"""What a month's usage was made of: by day, project, API key, model, or request by request. Reads counts and costs, never
prompts.

A month is what its bill charges: the usage posted to it, also that of earlier months which was found late, and what was used in
it and is not posted yet, told apart as pending. So the rows of a month add up to the usage lines of its invoice. Days are those
of the settlement, in UTC. Statements are sets over the index on (organization_id, settled_at), and touch no other month than they
must.

What a month will have cost by its end is estimated from it. The estimate: what was used so far, plus for each day that is left
the mean of the same weekday in the last `WINDOW_DAYS` complete days (with less than two weeks of them: the mean of all). Of today
the part that is still to come. The interval holds the truth in `CONFIDENCE` of all cases if days scatter as they did: Student's t
with the scatter of the days around those means, for the days left and for the means themselves. No trend, no growth, no holidays.
Money is in whole picos; the width of the interval alone is a float on its way there."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from fractions import Fraction
from typing import Any, NamedTuple

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue, NotFound
from metering.core.models import Hold, HoldState, PriceVersion, TokenKind, UsageEvent, record_of
from metering.core.pages import page_token, page_values, row_id, utc_time
from metering.invoicing.months import CANCELLED, FAILED, LIMITED
from metering.ledger.ledger import MonthState, TransactionKind, month_bounds
from metering.pricing.prices import COUNTS_OF_EVENT, checked_model


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
    Grouping.DAY: utc_time,
    Grouping.PROJECT: uuid.UUID,
    Grouping.API_KEY: uuid.UUID,
    Grouping.MODEL: checked_model,
}
NAMES: Mapping[Grouping, tuple[str, str]] = {
    Grouping.PROJECT: ("p.name AS project_name", "JOIN projects p ON p.id = used.project"),
    Grouping.API_KEY: ("k.name AS api_key_name, k.prefix AS api_key_prefix", "JOIN api_keys k ON k.id = used.api_key"),
}
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
        values = page_values(token, *(READ_KEY[group] for group in groups))
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
        parameters["after_time"], parameters["after_id"] = page_values(token, utc_time, row_id)
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
    if not 0 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidValue("page_size", f"give 1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE}")
    size = page_size or PAGE_SIZE
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
    next_token = page_token(*(getattr(rows[size - 1], key) for key in keys)) if more else ""
    return UsagePage(tuple(usage_row(row) for row in rows[:size]), next_token)


async def usage_total(session: AsyncSession, of: UsageFilter) -> UsageRow:
    """Everything that the filter lets through, as one row; of one organization, so that it has one currency."""
    assert of.organization_id is not None
    parameters = await parameters_of(session, of)
    parts = f"SELECT {PARTS} FROM usage_events u WHERE {where(of, parameters)} GROUP BY {PART_KEYS}"
    return usage_row((await session.execute(text(f"SELECT {SUMS} FROM ({parts}) parts"), parameters)).one())


async def daily_costs(session: AsyncSession, organization_id: uuid.UUID, month_begins: datetime, now: datetime) -> dict[date, int]:
    """Picos by day of use (UTC), posted or not: of a month until now, and of the four weeks before that a forecast looks at."""
    first = min(month_begins, now - timedelta(days=WINDOW_DAYS)).astimezone(UTC)
    parameters = {"organization_id": organization_id, "first": datetime(first.year, first.month, first.day, tzinfo=UTC), "now": now}
    return {utc_date(row.day): int(row.cost) for row in await session.execute(DAILY_COSTS, parameters)}


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
    return record_of(
        UsageRow,
        row,
        **shares,
        day=utc_date(found["day"]) if "day" in found else None,
        project_id=found.get("project"),
        api_key_id=found.get("api_key"),
        token_counts={kind: int(found[f"{kind}_tokens"]) for kind in COUNTS_OF_EVENT},
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


WINDOW_DAYS = 28  # four of each weekday; older days say less than they cost in lag
WEEKDAY_DAYS_MIN = 14  # two of each weekday; with less, one odd day would pass for a weekday's habit
INTERVAL_DAYS_MIN = 5  # with less, Student's t is so wide that an interval says nothing
CONFIDENCE = 0.8
DAY_S = 86_400
# Student's t for a two-sided interval of 80 %, by degrees of freedom; beyond the table that of the normal distribution is close.
T_80 = {1: 3.078, 2: 1.886, 3: 1.638, 4: 1.533, 5: 1.476, 6: 1.440, 7: 1.415, 8: 1.397, 9: 1.383, 10: 1.372, 12: 1.356, 15: 1.341}
T_80_FAR = 1.325  # of 20 degrees; 1.282 at infinity
RECENT_DAYS = 7
CHANGE_SHARE = Fraction(3, 10)  # a week that is so far off the three before is told: the rate lags behind it


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one month, in picos. Without history there is no estimate; with little, no interval.

    complete_day_count: the days that the rate is made of. method, cautions: sentences for the reader.
    """

    so_far_picos: int
    expected_picos: int | None
    low_picos: int | None
    high_picos: int | None
    complete_day_count: int
    method: str
    cautions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a day is expected to cost, and how much days scatter around that.

    means: picos by weekday (Monday is 0), seven times the same where weekdays are not told apart. scatter_picos: None where the
    history is too short for an interval.
    """

    means: tuple[Fraction, ...]
    by_weekday: bool
    day_counts: tuple[int, ...]
    scatter_picos: float | None
    freedom_count: int


def forecast(days: Mapping[date, int], month: date, now: datetime) -> Forecast:
    """The month that begins at `month`, seen at `now` (aware).

    days: picos by day of use (UTC); a day that is not there cost nothing, and the history begins at the first that is.
    """
    now = now.astimezone(UTC)
    ends = (month + timedelta(days=31)).replace(day=1)
    so_far = sum(picos for day, picos in days.items() if month <= day < ends)
    if now.date() >= ends:
        return Forecast(so_far, so_far, so_far, so_far, 0, "The month is over: this is what it cost so far.", ())
    history = complete_days(days, now.date())
    if not history:
        return Forecast(so_far, None, None, None, 0, "No complete day of usage yet: there is nothing to go by.", ())
    rate = daily_rate(history, now.date())
    left = days_left(max(month, now.date()), ends, now)
    rest = sum((rate.means[day.weekday()] * share for day, share in left), Fraction(0))
    expected = so_far + round(rest)  # nobody owes an estimate, so it has no remainder to carry
    margin = interval_margin(rate, left)
    return Forecast(
        so_far_picos=so_far,
        expected_picos=expected,
        low_picos=None if margin is None else max(so_far, expected - margin),
        high_picos=None if margin is None else expected + margin,
        complete_day_count=len(history),
        method=method_text(len(history)),
        cautions=tuple(cautions(history)),
    )


def complete_days(days: Mapping[date, int], today: date) -> list[int]:
    """Picos of the days before today, oldest first: at most the window, and none from before the first usage."""
    past = [day for day in days if day < today]
    if not past:
        return []
    first = max(min(past), today - timedelta(days=WINDOW_DAYS))
    return [days.get(first + timedelta(days=index), 0) for index in range((today - first).days)]


def daily_rate(history: Sequence[int], today: date) -> Rate:
    """Means by weekday where there are two weeks of history, else one mean for all; and the scatter around them."""
    weekdays = [(today - timedelta(days=len(history) - index)).weekday() for index in range(len(history))]
    by_weekday = len(history) >= WEEKDAY_DAYS_MIN
    groups = [[p for p, w in zip(history, weekdays, strict=True) if w == weekday or not by_weekday] for weekday in range(7)]
    means = tuple(Fraction(sum(group), len(group)) for group in groups)
    freedom = len(history) - (7 if by_weekday else 1)
    scatter = None
    if len(history) >= INTERVAL_DAYS_MIN:
        squares = sum((picos - means[weekday]) ** 2 for picos, weekday in zip(history, weekdays, strict=True))
        scatter = math.sqrt(squares / freedom)
    return Rate(means, by_weekday, tuple(map(len, groups)), scatter, freedom)


def days_left(first: date, ends: date, now: datetime) -> list[tuple[date, Fraction]]:
    """The days from `first` on that are not over, each with the share of it that is still to come."""
    left = []
    for index in range((ends - first).days):
        day = first + timedelta(days=index)
        gone_s = (now - datetime.combine(day, time(), UTC)).total_seconds()
        left.append((day, Fraction(DAY_S - min(max(int(gone_s), 0), DAY_S), DAY_S)))
    return left


def interval_margin(rate: Rate, left: Sequence[tuple[date, Fraction]]) -> int | None:
    """Half the width of the interval in picos; None where the history is too short for one.

    The days left scatter independently; the error of a mean hits all the days that rest on it at once.
    """
    if rate.scatter_picos is None:
        return None
    shares = [[float(share) for day, share in left if day.weekday() == weekday] for weekday in range(7)]
    groups = shares if rate.by_weekday else [[share for group in shares for share in group]]
    counts = rate.day_counts if rate.by_weekday else rate.day_counts[:1]
    variance = sum(sum(group) + sum(group) ** 2 / count for group, count in zip(groups, counts, strict=True))
    known = [freedom for freedom in T_80 if freedom <= rate.freedom_count]
    t = T_80_FAR if rate.freedom_count >= 20 else T_80[max(known)]
    return math.ceil(t * rate.scatter_picos * math.sqrt(variance))


def method_text(day_count: int) -> str:
    of = f"the last {day_count} complete days (UTC)" if day_count > 1 else "the one complete day (UTC) there is"
    if day_count >= WEEKDAY_DAYS_MIN:
        return f"Used so far, plus for each day left the mean of the same weekday in {of}."
    return f"Used so far, plus for each day left the mean of {of}."


def cautions(history: Sequence[int]) -> list[str]:
    """What the reader should know before trusting the numbers."""
    said = ["No trend, holidays, plan discounts or credit are taken into account."]
    if len(history) < INTERVAL_DAYS_MIN:
        said.append(
            f"{len(history)} complete day{'s are' if len(history) > 1 else ' is'} too little for an interval: take it as a guess."
        )
    elif len(history) < WEEKDAY_DAYS_MIN:
        said.append(f"Less than {WEEKDAY_DAYS_MIN} complete days: weekdays and weekends are taken for alike.")
    if len(history) >= WINDOW_DAYS:
        recent = Fraction(sum(history[-RECENT_DAYS:]), RECENT_DAYS)
        before = Fraction(sum(history[:-RECENT_DAYS]), len(history) - RECENT_DAYS)
        if before and abs(recent / before - 1) > CHANGE_SHARE:
            change = f"{round(abs(recent / before - 1) * 100)} % {'above' if recent > before else 'below'}"
            said.append(f"The last {RECENT_DAYS} days were {change} those before: the estimate lags behind.")
    return said
