"""Resale statements: what a customer charges one of its end users for a month.

A statement has the usage of one end user, or all usage without one, by model and kind of token,
with the customer's cost and the amount by its resale prices (`pricing/resale_prices.py`). The costs
of all statements of a month add up to the customer's usage, to the pico: both are sums over the
same usage events. Late usage is in the month of its bill, as on the customer's invoice. Rented
replicas (`rentals.py`) are lines of their own, in seconds, without a cost: Weir bills none. A price
that begins within a second applies from the next one on.

The close of a month freezes its statements in two statements of SQL, for any number of end users.
Frozen rows have no names: the name of an end user never changes, and erasing it leaves the id.
Statements of open months, and of months closed before statements were frozen, are computed when
they are read. Each line is rounded to the pico, half up. The total is rounded to the minor unit,
and its remainder is carried to the next statement of the same end user.
"""

from __future__ import annotations

import csv
import io
import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import NotFound
from metering.core.models import Organization, TokenKind, record_of
from metering.core.money import exact_text, minor_unit, round_to_minor_unit, round_total
from metering.invoicing.invoice_document import (
    AmountLine,
    InvoiceDocument,
    Issuer,
    SummaryRow,
)
from metering.invoicing.month_report import TAX_NOTE, csv_cell, time_text
from metering.ledger.ledger import TransactionKind, month_bounds, month_text
from metering.pricing.prices import COUNTS_OF_EVENT, MULTIPLIER_SCALE, PRICES
from metering.tenants.billing_profiles import BillingProfile, billing_profile
from metering.tenants.usage_subjects import NOBODY, end_users_page, find_end_user

STATEMENT_FORMAT = 1
# Items of the price per request and of rented replicas; the others are kinds of token.
REQUESTS, REPLICA_SECONDS = "requests", "replica_seconds"
ITEM_ORDER = [REQUESTS, *map(str, TokenKind), REPLICA_SECONDS]
HOUR_S = 3600
NOT_GIVEN = "usage without an end user"
CSV_COLUMNS = [
    "record_type",
    "organization_name",
    "organization_id",
    "month",
    "time_zone",
    "end_user",
    "end_user_id",
    "model",
    "item",
    "quantity",
    "cost",
    "amount",
    "rounded_amount",
    "currency_code",
    "late_month",
    "resale_price_version",
    "state",
    "statement_format",
]
OWN_PRICES = {kind: f"r.{kind}_picos_per_token" for kind in TokenKind} | {
    TokenKind.REASONING: "coalesce(r.reasoning_picos_per_token, r.output_picos_per_token)"
}
KIND_COUNTS = ", ".join(f"sum({count}) AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
ITEMS = ", ".join(
    (
        f"('{REQUESTS}', e.requests::numeric, 0::numeric)",
        *(f"('{kind}', e.{kind}, e.{kind} * {price})" for kind, price in PRICES.items()),
    )
)
OWN_PRICE = " ".join(f"WHEN '{kind}' THEN {price}" for kind, price in OWN_PRICES.items())
# The price in force `at` a time for the model of a row: its own, or that of all models.
VERSION_JOINS = """
    LEFT JOIN versions own
        ON own.model = {of}.model AND NOT own.withdrawn
       AND own.effective_at <= {at} AND {at} < own.ends_at
    LEFT JOIN versions general
        ON general.model = '' AND NOT general.withdrawn
       AND general.effective_at <= {at} AND {at} < general.ends_at"""
# Seconds of rented replicas in a month, by price version. In an open month they are those until
# now. Rentals are cut where a price begins.
RENTED = f"""
versions AS MATERIALIZED (
    SELECT id, model, withdrawn, effective_at,
           lead(effective_at, 1, 'infinity') OVER (PARTITION BY model ORDER BY effective_at)
               AS ends_at
    FROM resale_prices
    WHERE organization_id = :organization_id
), rented AS (
    SELECT u.end_user_id, u.model, coalesce(own.id, general.id) AS resale_price_id,
           sum(u.replica_count * extract(epoch FROM cut.ends_at - cut.starts_at)) AS seconds
    FROM replica_rentals u
    CROSS JOIN LATERAL (
        SELECT greatest(u.starts_at, :begins) AS starts_at,
               least(
                   coalesce(u.ends_at, 'infinity'), :ends,
                   coalesce(CAST(:until AS timestamptz), date_trunc('second', now()))
               ) AS ends_at
    ) AS part
    CROSS JOIN LATERAL (
        SELECT at AS starts_at, lead(at, 1, part.ends_at) OVER (ORDER BY at) AS ends_at
        FROM (
            SELECT part.starts_at
            UNION
            SELECT date_trunc('second', effective_at + interval '999999 microseconds')
            FROM versions
            WHERE model IN ('', u.model)
        ) AS border (at)
        WHERE at >= part.starts_at AND at < part.ends_at
    ) AS cut
    {VERSION_JOINS.format(of="u", at="cut.starts_at")}
    WHERE u.organization_id = :organization_id AND part.starts_at < part.ends_at AND {{chosen}}
    GROUP BY 1, 2, 3
)"""
RENTED_PICOS = f"div(seconds * coalesce(r.replica_hour_picos, 0) + {HOUR_S // 2}, {HOUR_S})"
# Lines of a month's statements from its usage events and rentals: those of all end users, or of
# some. Events are read once, into sums.
LINES = f"""{RENTED},
transactions AS MATERIALIZED (
    SELECT id, effective_at,
           CAST(date_trunc('month', effective_at, 'UTC') AS date) AS usage_month
    FROM ledger_transactions
    WHERE organization_id = :organization_id
      AND billing_month = :month
      AND kind = '{TransactionKind.USAGE}'
), events AS (
    SELECT u.end_user_id, u.price_version_id, t.usage_month,
           coalesce(own.id, general.id) AS resale_price_id,
           count(*) FILTER (WHERE u.part = 0) AS requests, {KIND_COUNTS}
    FROM usage_events u
    JOIN transactions t ON t.id = u.ledger_transaction_id
    JOIN price_versions p ON p.id = u.price_version_id
    {VERSION_JOINS.format(of="p", at="u.admitted_at")}
    WHERE u.organization_id = :organization_id
      AND u.settled_at < :ends
      AND u.settled_at >= least(:begins, (SELECT min(effective_at) FROM transactions))
      AND {{chosen}}
    GROUP BY 1, 2, 3, 4
), items AS (
    SELECT e.end_user_id, p.model, e.resale_price_id, e.usage_month, part.item,
           sum(part.quantity) AS quantity, sum(part.cost_picos) AS cost_picos
    FROM events e
    JOIN price_versions p ON p.id = e.price_version_id,
         LATERAL (VALUES {ITEMS}) AS part (item, quantity, cost_picos)
    WHERE part.quantity > 0
    GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT end_user_id, model, resale_price_id, CAST(:month AS date), '{REPLICA_SECONDS}', seconds,
           0
    FROM rented
), lines AS MATERIALIZED (
    SELECT i.*, CASE i.item
               WHEN '{REQUESTS}' THEN i.quantity * coalesce(r.request_picos, 0)
               WHEN '{REPLICA_SECONDS}' THEN {RENTED_PICOS.replace("seconds", "i.quantity")}
               ELSE coalesce(
                   i.quantity * CASE i.item {OWN_PRICE} END,
                   div(
                       i.cost_picos * coalesce(r.markup_milli, {MULTIPLIER_SCALE})
                           + {MULTIPLIER_SCALE // 2},
                       {MULTIPLIER_SCALE}
                   )
               )
           END AS amount_picos
    FROM items i
    LEFT JOIN resale_prices r ON r.id = i.resale_price_id
)"""
COMPUTED = "WITH " + LINES + "\nSELECT * FROM lines"
ALL = COMPUTED.format(chosen="true")
OF_END_USERS = text(COMPUTED.format(chosen="u.end_user_id = ANY(CAST(:ids AS uuid[]))"))
OF_NOBODY = text(COMPUTED.format(chosen="u.end_user_id IS NULL"))
COST_COMPUTED = text(
    f"SELECT coalesce(sum(cost_picos), 0) AS stated_picos FROM ({ALL}) AS every_line"
)
RENTED_COMPUTED = text(
    f"WITH {RENTED.format(chosen='true')}"
    f" SELECT coalesce(sum({RENTED_PICOS}), 0)"
    " FROM rented LEFT JOIN resale_prices r ON r.id = rented.resale_price_id"
)
CARRIED = """
SELECT total.exact_picos
FROM (
    SELECT s.amount_picos + s.carried_in_picos - s.total_rounded_picos AS exact_picos
    FROM resale_statements s
    WHERE s.organization_id = :organization_id AND s.month < :month AND {who}
    ORDER BY s.month DESC
    LIMIT 1
) AS total
"""
# The rounding is that of `money.round_total`: half away from zero, and none of a sum of zero.
FREEZE = text(f"""
WITH {LINES.format(chosen="true")}, totals AS (
    SELECT end_user_id, sum(cost_picos) AS cost_picos, sum(amount_picos) AS amount_picos
    FROM lines
    GROUP BY 1
), carried AS MATERIALIZED (
    SELECT t.*, coalesce(CASE
               WHEN t.end_user_id IS NULL THEN ({CARRIED.format(who="s.end_user_id IS NULL")})
               ELSE ({CARRIED.format(who="s.end_user_id = t.end_user_id")})
           END, 0) AS carried_in_picos
    FROM totals t
), statements AS (
    INSERT INTO resale_statements (organization_id, month, end_user_id, cost_picos, amount_picos,
                                   carried_in_picos, total_rounded_picos)
    SELECT :organization_id, :month, end_user_id, cost_picos, amount_picos, carried_in_picos,
           CASE WHEN amount_picos = 0 THEN 0
                ELSE sign(amount_picos + carried_in_picos) * :unit
                     * div(abs(amount_picos + carried_in_picos) + :half_unit, :unit)
           END
    FROM carried
    ORDER BY end_user_id  -- all remainders are read before rows are added, which reads would meet
    RETURNING id, end_user_id
)
INSERT INTO resale_statement_lines
SELECT s.id,
       row_number() OVER (
           PARTITION BY s.id
           ORDER BY l.usage_month, l.model, l.resale_price_id NULLS FIRST,
                    array_position(CAST(:items AS text[]), l.item)
       ),
       l.usage_month, l.model, l.item, l.resale_price_id, l.quantity, l.cost_picos, l.amount_picos
FROM lines l
JOIN statements s
    ON coalesce(s.end_user_id, '{NOBODY}') = coalesce(l.end_user_id, '{NOBODY}')
""")
# The planner takes the lines for few, and would compare each with every statement.
FREEZING = text("SELECT set_config('enable_nestloop', 'off', true)")
FROZEN = text("SELECT set_config('enable_nestloop', 'on', true)")
FROZEN_LINES = """
SELECT s.end_user_id, s.carried_in_picos, l.*
FROM resale_statements s
JOIN resale_statement_lines l ON l.statement_id = s.id
WHERE s.organization_id = :organization_id AND s.month = :month AND {who}
"""
FROZEN_OF_END_USERS = text(FROZEN_LINES.format(who="s.end_user_id = ANY(CAST(:ids AS uuid[]))"))
FROZEN_OF_NOBODY = text(FROZEN_LINES.format(who="s.end_user_id IS NULL"))
CARRIED_IN = text("""
SELECT DISTINCT ON (end_user_id) end_user_id,
       amount_picos + carried_in_picos - total_rounded_picos AS carried_picos
FROM resale_statements
WHERE organization_id = :organization_id
  AND month < :month
  AND (end_user_id = ANY(CAST(:ids AS uuid[])) OR :nobody AND end_user_id IS NULL)
ORDER BY end_user_id, month DESC
""")
MONTH_STATE = text("""
SELECT c.organization_name, c.currency_code, c.billing_profile, b.closed_at,
       EXISTS (
           SELECT
           FROM resale_statements s
           WHERE s.organization_id = c.organization_id AND s.month = c.month
       ) AS frozen
FROM month_closings c
JOIN billing_months b USING (organization_id, month)
WHERE c.organization_id = :organization_id AND c.month = :month
""")
RESELLS = text("""
SELECT EXISTS (
    SELECT FROM usage_subjects WHERE organization_id = :organization_id AND kind = 'end_user'
) OR EXISTS (
    SELECT FROM resale_prices WHERE organization_id = :organization_id
)
""")
# Costs of the month's usage in the ledger; those of frozen statements, and how far these differ
# from their lines.
POSTED = text(f"""
SELECT o.id AS organization_id, o.name AS organization, o.currency_code,
       coalesce(-sum(e.amount_picos), 0) AS posted_picos
FROM organizations o
LEFT JOIN ledger_transactions t
    ON t.organization_id = o.id
   AND t.billing_month = :month
   AND t.kind = '{TransactionKind.USAGE}'
LEFT JOIN ledger_entries e ON e.transaction_id = t.id AND e.token_kind IS NOT NULL
WHERE o.id = :organization_id
GROUP BY o.id, o.name, o.currency_code
""")
FROZEN_SUMS = text("""
SELECT coalesce(sum(l.cost_picos), 0) AS stated_picos,
       coalesce(sum(l.rented_picos), 0) AS rented_picos,
       count(*) FILTER (WHERE differs) AS unequal_count,
       coalesce(sum(
           abs(s.cost_picos - coalesce(l.cost_picos, 0))
               + abs(s.amount_picos - coalesce(l.amount_picos, 0))
       ), 0) AS unequal_picos
FROM resale_statements s
LEFT JOIN (
    SELECT l.statement_id, sum(l.cost_picos) AS cost_picos, sum(l.amount_picos) AS amount_picos,
           sum(l.amount_picos) FILTER (WHERE l.item = :replica_seconds) AS rented_picos
    FROM resale_statements s
    JOIN resale_statement_lines l ON l.statement_id = s.id
    WHERE s.organization_id = :organization_id AND s.month = :month
    GROUP BY 1
) AS l ON l.statement_id = s.id,
LATERAL (
    SELECT (s.cost_picos, s.amount_picos) IS DISTINCT FROM (l.cost_picos, l.amount_picos) AS differs
) AS compared
WHERE s.organization_id = :organization_id AND s.month = :month
""")


@dataclass(frozen=True, slots=True)
class EndUser:
    """End user by id and name; an erased one has no name, and usage without one neither."""

    id: uuid.UUID | None
    name: str = ""

    @property
    def shown(self) -> str:
        """Name, or the id of an erased end user."""
        return self.name or (NOT_GIVEN if self.id is None else str(self.id))


@dataclass(frozen=True, slots=True)
class StatementLine:
    """Tokens of one kind and model, its requests, or seconds of its rented replicas, at one version
    of the resale prices.

    `resale_price_version` is 0 for usage without a resale price, which is charged at cost.
    `late_month` is the month of use if it was closed before the usage was posted, else empty.
    """

    model: str
    item: str
    quantity: int
    cost_picos: int
    amount_picos: int
    resale_price_version: int = 0
    late_month: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """Statement of one end user and month; `closed_at` is None while the month is open."""

    organization_id: uuid.UUID
    organization_name: str
    month: str
    currency_code: str
    end_user: EndUser
    lines: tuple[StatementLine, ...]
    carried_in_picos: int
    closed_at: datetime | None
    profile: BillingProfile

    @property
    def state(self) -> str:
        return "open" if self.closed_at is None else "closed"

    @property
    def request_count(self) -> int:
        return sum(line.quantity for line in self.lines if line.item == REQUESTS)

    @property
    def token_count(self) -> int:
        return sum(line.quantity for line in self.lines if line.item in set(TokenKind))

    @property
    def replica_second_count(self) -> int:
        """Seconds of rented replicas, of each replica apart."""
        return sum(line.quantity for line in self.lines if line.item == REPLICA_SECONDS)

    @property
    def cost_picos(self) -> int:
        """Cost of the usage to the customer, before its plan."""
        return sum(line.cost_picos for line in self.lines)

    @property
    def amount_picos(self) -> int:
        """Exact sum of the lines."""
        return sum(line.amount_picos for line in self.lines)

    @property
    def rounded_picos(self) -> tuple[int, ...]:
        """Amount of each line in whole minor units."""
        return tuple(
            round_to_minor_unit(each.amount_picos, self.currency_code) for each in self.lines
        )

    @property
    def total_rounded_picos(self) -> int:
        """Amount to charge: with the carried remainder, in whole minor units."""
        return round_total(self.amount_picos, self.carried_in_picos, self.currency_code)

    @property
    def carried_out_picos(self) -> int:
        return self.amount_picos + self.carried_in_picos - self.total_rounded_picos


@dataclass(frozen=True, slots=True)
class StatedMonth:
    """Usage of a month in the ledger and in the statements of end users.

    `unequal_count` frozen statements differ from their lines, in costs and amounts by
    `unequal_picos`. Rented replicas have no cost, so they are in neither sum: their amounts in
    frozen lines, `rented_picos`, are compared with those of the recorded rentals.
    """

    organization_id: uuid.UUID
    organization: str
    currency_code: str
    posted_picos: int
    stated_picos: int
    unequal_count: int = 0
    unequal_picos: int = 0
    rented_picos: int = 0
    recorded_rented_picos: int = 0


async def resells(session: AsyncSession, organization_id: uuid.UUID) -> bool:
    """Return whether a customer has statements: if it has end users or resale prices."""
    return bool(await session.scalar(RESELLS, {"organization_id": organization_id}))


async def freeze_statements(
    session: AsyncSession, organization_id: uuid.UUID, month: date, currency_code: str
) -> None:
    """Store the statements of a month, in the transaction that closes it."""
    if await resells(session, organization_id):
        unit = minor_unit(currency_code)
        rounding = {"unit": unit, "half_unit": unit // 2, "items": ITEM_ORDER}
        await session.execute(FREEZING)
        whole = _of_month(organization_id, month, is_over=True)
        await session.execute(FREEZE, whole | rounding)
        await session.execute(FROZEN)


async def stated_month(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> StatedMonth | None:
    """Sum a customer's statements of a month, and its usage; None if it has no statements."""
    if not await resells(session, organization_id):
        return None
    key = {"organization_id": organization_id, "month": month}
    posted = (await session.execute(POSTED, key)).one()
    recorded = 0
    closed = (await session.execute(MONTH_STATE, key)).one_or_none()
    if closed is not None and closed.frozen:
        sums = await session.execute(FROZEN_SUMS, key | {"replica_seconds": REPLICA_SECONDS})
        whole = _of_month(organization_id, month, is_over=True)
        recorded = int(await session.scalar(RENTED_COMPUTED, whole) or 0)
    else:
        sums = await session.execute(COST_COMPUTED, _of_month(organization_id, month))
    counts = {name: int(value) for name, value in sums.one()._mapping.items()}
    return record_of(
        StatedMonth,
        posted,
        posted_picos=int(posted.posted_picos),
        recorded_rented_picos=recorded,
        **counts,
    )


async def statement_page(
    session: AsyncSession,
    owner: Organization,
    month: str,
    *,
    page_size: int = 100,
    page_token: str = "",
) -> tuple[list[Statement], str]:
    """List statements of a month `YYYY-MM`: that of usage without an end user, then by name.

    Returns the token of the next page too. A page has the statements of `page_size` end users of
    the customer, of whom some may have no usage in the month. Raises: InvalidValue.
    """
    begins = month_bounds(month)[0].date()
    rows, token = await end_users_page(
        session, owner.id, page_size=page_size, page_token=page_token
    )
    users = [EndUser(row.id, row.name or "") for row in rows]
    chosen = users if page_token else [EndUser(None), *users]
    return await _read(session, owner, begins, chosen), token


async def find_statement(
    session: AsyncSession, owner: Organization, month: str, end_user: str
) -> Statement:
    """Read the statement of an end user, by name or id; empty means usage without one.

    Raises: InvalidValue for a malformed month; NotFound for an unknown end user, and for one
    without usage in the month.
    """
    begins = month_bounds(month)[0].date()
    user = EndUser(None)
    if end_user:
        row = await find_end_user(session, owner.id, end_user)
        if row is None:
            raise NotFound("end user", f"{end_user} of {owner.name}")
        user = EndUser(row.id, row.name or "")
    found = await _read(session, owner, begins, [user])
    if not found:
        what = f"usage of {user.shown}" if end_user else NOT_GIVEN
        raise NotFound(
            "statement",
            f"{month} of {owner.name}",
            f"The month has no {what}. Usage appears seconds after a request; ask again then.",
        )
    return found[0]


def _of_month(organization_id: uuid.UUID, month: date, *, is_over: bool = False) -> dict[str, Any]:
    """Build the parameters of LINES. Rentals count until now, unless the month is over."""
    begins, ends = month_bounds(month_text(month))
    key = {"organization_id": organization_id, "month": month, "begins": begins, "ends": ends}
    return key | {"until": ends if is_over else None}


async def _read(
    session: AsyncSession, owner: Organization, month: date, users: Sequence[EndUser]
) -> list[Statement]:
    """Read the statements of these end users, in their order; those without usage have none."""
    key = {"organization_id": owner.id, "month": month}
    closed = (await session.execute(MONTH_STATE, key)).one_or_none()
    frozen = closed is not None and closed.frozen
    ids = [user.id for user in users if user.id is not None]
    nobody = len(ids) < len(users)
    queries = (
        (FROZEN_OF_END_USERS if frozen else OF_END_USERS, bool(ids)),
        (FROZEN_OF_NOBODY if frozen else OF_NOBODY, nobody),
    )
    lines: dict[uuid.UUID | None, list[StatementLine]] = defaultdict(list)
    carried: dict[uuid.UUID | None, int] = {}
    for query, is_needed in queries:
        if is_needed:
            chosen = {"ids": ids} if query in (FROZEN_OF_END_USERS, OF_END_USERS) else {}
            known = key if frozen else _of_month(owner.id, month)
            for row in await session.execute(query, known | chosen):
                lines[row.end_user_id].append(_line(row, month))
                if frozen:
                    carried[row.end_user_id] = int(row.carried_in_picos)
    if not frozen:
        rows = await session.execute(CARRIED_IN, key | {"ids": ids, "nobody": nobody})
        carried = {row.end_user_id: int(row.carried_picos) for row in rows}
    profile = await billing_profile(session, owner.id) or BillingProfile()
    made = Statement(
        owner.id, owner.name, month_text(month), owner.currency_code, EndUser(None), (), 0, None,
        profile,
    )  # fmt: skip
    if closed is not None:
        stored = closed.billing_profile
        made = replace(
            made,
            organization_name=closed.organization_name,
            currency_code=closed.currency_code,
            closed_at=closed.closed_at,
            profile=BillingProfile() if stored is None else BillingProfile.from_json(stored),
        )
    return [
        replace(
            made,
            end_user=user,
            lines=tuple(sorted(lines[user.id], key=_order)),
            carried_in_picos=carried.get(user.id, 0),
        )
        for user in users
        if user.id in lines
    ]


def _line(row: Any, month: date) -> StatementLine:
    late = "" if row.usage_month == month else month_text(row.usage_month)
    amounts = int(row.quantity), int(row.cost_picos), int(row.amount_picos)
    return StatementLine(row.model, row.item, *amounts, row.resale_price_id or 0, late)


def _order(line: StatementLine) -> tuple[object, ...]:
    item = ITEM_ORDER.index(line.item)
    return bool(line.late_month), line.late_month, line.model, line.resale_price_version, item


def to_json(statement: Statement) -> str:
    """Serialize a statement. Amounts are exact decimal strings in currency units."""
    rounded = iter(statement.rounded_picos)
    document = {
        **_identity(statement),
        "closed_at": None if statement.closed_at is None else time_text(statement.closed_at),
        "lines": [_fields(statement, line, next(rounded)) for line in statement.lines],
        **{name: exact_text(picos, statement.currency_code) for name, picos in _sums(statement)},
        "tax_note": TAX_NOTE,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def to_csv(statement: Statement) -> str:
    """Serialize a statement as RFC 4180 CSV with a header; the sums follow the lines.

    Exact amounts add up to `total_rounded` by way of `carried_in` and `carried_out`, rounded ones
    by way of `rounding`.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    rounded = iter(statement.rounded_picos)
    identity = _identity(statement)
    rows: list[dict[str, Any]] = []
    for line in statement.lines:
        kind = "late_usage" if line.late_month else "usage"
        kind = "rental" if line.item == REPLICA_SECONDS else kind
        rows.append({"record_type": kind} | _fields(statement, line, next(rounded)))
    for name, picos in _sums(statement):
        shown = exact_text(-picos if name == "carried_out" else picos, statement.currency_code)
        column = {"cost": "cost", "rounding": "rounded_amount"}.get(name, "amount")
        row = {"record_type": name, column: shown}
        rows.append(row | ({"rounded_amount": shown} if name == "total_rounded" else {}))
    for row in rows:
        filled = {name: "" if value is None else value for name, value in (identity | row).items()}
        writer.writerow({name: csv_cell(str(value)) for name, value in filled.items()})
    return file.getvalue()


def _identity(statement: Statement) -> dict[str, Any]:
    user = statement.end_user
    return {
        "statement_format": STATEMENT_FORMAT,
        "organization_name": statement.organization_name,
        "organization_id": str(statement.organization_id),
        "month": statement.month,
        "time_zone": "UTC",
        "currency_code": statement.currency_code,
        "state": statement.state,
        "end_user": user.name or None,
        "end_user_id": None if user.id is None else str(user.id),
    }


def _fields(statement: Statement, line: StatementLine, rounded_picos: int) -> dict[str, Any]:
    currency = statement.currency_code
    return {
        "model": line.model,
        "item": line.item,
        "quantity": line.quantity,
        "cost": exact_text(line.cost_picos, currency),
        "amount": exact_text(line.amount_picos, currency),
        "rounded_amount": exact_text(rounded_picos, currency),
        "late_month": line.late_month or None,
        "resale_price_version": line.resale_price_version or None,
    }


def _sums(statement: Statement) -> tuple[tuple[str, int], ...]:
    return (
        ("cost", statement.cost_picos),
        ("total", statement.amount_picos),
        ("carried_in", statement.carried_in_picos),
        ("carried_out", statement.carried_out_picos),
        ("rounding", statement.total_rounded_picos - sum(statement.rounded_picos)),
        ("total_rounded", statement.total_rounded_picos),
    )


def statement_document(statement: Statement, fonts: Issuer) -> InvoiceDocument:
    """Build the document for the end user, whose issuer is the customer: it has no costs.

    `fonts` is the issuer of the operator's invoices, of whom only the fonts are used.
    """
    begins, ends = month_bounds(statement.month)
    profile, user = statement.profile, statement.end_user
    facts = [
        ("Billing period", f"{begins:%Y-%m-%d} to {ends - timedelta(days=1):%Y-%m-%d}"),
        ("Time zone", "UTC"),
        ("Currency", statement.currency_code),
    ]
    if statement.closed_at is not None:
        facts.append(("Date", f"{statement.closed_at.astimezone(UTC):%Y-%m-%d}"))
    is_open = statement.closed_at is None
    return InvoiceDocument(
        title="Draft statement" if is_open else "Statement",
        mark="DRAFT, month not closed" if is_open else "",
        reference="",
        issuer=Issuer(
            name=profile.legal_name or statement.organization_name,
            address=profile.lines,
            font=fonts.font,
            bold_font=fonts.bold_font,
        ),
        customer_name=user.shown,
        customer_id="" if user.id is None or not user.name else str(user.id),
        currency_code=statement.currency_code,
        facts=tuple(facts),
        usage=None,
        sections=tuple(_sections(statement)),
        summary=tuple(_summary(statement)),
        notes=(
            "The exact amounts add up to the total; each amount is rounded by itself. Tokens are"
            " counted at the time they were settled, in UTC, and replicas by the second.",
        ),
    )


def _sections(statement: Statement) -> Iterable[tuple[str, tuple[AmountLine, ...]]]:
    """Yield the lines of each model, late usage apart. What costs nothing and counts is shown."""
    groups: dict[str, list[AmountLine]] = defaultdict(list)
    for line, rounded in zip(statement.lines, statement.rounded_picos, strict=True):
        late = f"Late usage of {line.late_month} · " if line.late_month else ""
        shown = AmountLine(_quantity_text(line), line.amount_picos, rounded)
        groups[late + line.model].append(shown)
    for heading, lines in groups.items():
        yield heading, tuple(lines)


def _quantity_text(line: StatementLine) -> str:
    """Format a quantity, such as "1,200 input tokens" or "48 h 30 min of dedicated replicas"."""
    if line.item != REPLICA_SECONDS:
        what = "request" if line.item == REQUESTS else f"{line.item.replace('_', ' ')} token"
        return f"{line.quantity:,} {what}{'' if line.quantity == 1 else 's'}"
    minutes, seconds = divmod(line.quantity, 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return f"{' '.join(f'{n:,} {unit}' for n, unit in parts if n)} of dedicated replicas"


def _summary(statement: Statement) -> Iterable[SummaryRow]:
    rounded = sum(statement.rounded_picos)
    total = statement.total_rounded_picos
    yield SummaryRow("Usage", statement.amount_picos, rounded)
    if statement.carried_in_picos:
        yield SummaryRow("Rounding carried from earlier statements", statement.carried_in_picos)
    if statement.carried_out_picos:
        yield SummaryRow("Rounding carried to the next statement", -statement.carried_out_picos)
    if total != rounded:
        yield SummaryRow("Rounding", billed_picos=total - rounded)
    yield SummaryRow("Tax", text=TAX_NOTE.removeprefix("tax "))
    yield SummaryRow("Total" if total >= 0 else "Total in your favour", total, total, strong=True)
