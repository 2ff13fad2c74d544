"""Reading the posted charges of a month, and writing them as FOCUS CSV, some at a time: a month may have a hundred thousand rows.

Null is an empty field. The rows of a closed month never change, nor does their order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.focus import COLUMNS, FocusMonth, UsageCharge
from metering.billing.pricing import COUNTS_OF_EVENT
from metering.billing.reports import MonthReport
from metering.billing.usage_statements import KEYS, Grouping, UsageFilter, parameters_of, utc_date, where
from metering.models import ServiceTier

BATCH_ROWS = 500  # groups read and written at a time: some milliseconds of work

_SUMS = ", ".join(
    f"sum({count}) AS {kind}_tokens, count(*) FILTER (WHERE part = 0 AND {count} > 0) AS {kind}_requests, "
    f"coalesce(sum({count}) FILTER (WHERE outcome = ANY(:cancelled)), 0) AS {kind}_cancelled"
    for kind, (count, _) in COUNTS_OF_EVENT.items()
)
_PRICES = ", ".join(
    f"v.{price} AS {kind}_price, coalesce(l.{price}, v.{price}) AS {kind}_list_price"
    for kind, (_, price) in COUNTS_OF_EVENT.items()
)
# The list price beside a customer's own: that in force at the end of the day of use, of the same tier if it has one.
CHARGES = """
WITH used AS (
    SELECT {day} AS day, u.project_id, u.api_key_id, u.price_version_id, {sums}
    FROM usage_events u
    WHERE {where} AND u.rated_at IS NOT NULL
    GROUP BY 1, 2, 3, 4
)
SELECT used.*, p.name AS project_name, k.name AS api_key_name, v.model, v.tier, {prices}
FROM used JOIN projects p ON p.id = used.project_id JOIN api_keys k ON k.id = used.api_key_id
JOIN price_versions v ON v.id = used.price_version_id
LEFT JOIN LATERAL (
    SELECT * FROM price_versions l
    WHERE v.organization_id IS NOT NULL AND l.organization_id IS NULL AND l.model = v.model AND l.currency_code = v.currency_code
      AND l.tier IN (v.tier, '{interactive}') AND l.effective_at < used.day + interval '1 day'
    ORDER BY l.tier = v.tier DESC, l.effective_at DESC LIMIT 1
) l ON true
ORDER BY used.day, used.project_id, used.api_key_id, used.price_version_id
"""

FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r")  # what OWASP names for CSV injection
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


async def focus_csv(session: AsyncSession, report: MonthReport, issuer_name: str) -> AsyncIterator[str]:
    """The file in pieces. issuer_name: who provides and bills; may be empty."""
    of = UsageFilter(report.month, report.organization_id)
    parameters = await parameters_of(session, of)
    statement = CHARGES.format(
        where=where(of, parameters), day=KEYS[Grouping.DAY], sums=_SUMS, prices=_PRICES, interactive=ServiceTier.INTERACTIVE
    )
    month = FocusMonth(report, issuer_name)
    yield csv_text([dict(zip(COLUMNS, COLUMNS, strict=True))])
    found = await session.stream(text(statement), parameters)
    async for rows in found.partitions(BATCH_ROWS):
        yield csv_text(month.usage(charge) for row in rows for charge in charges_of(row))
    yield csv_text(month.charges())


def charges_of(row: Row[Any]) -> Iterator[UsageCharge]:
    """A charge per kind of token that there was any of."""
    found = row._mapping
    for kind in COUNTS_OF_EVENT:
        if token_count := int(found[f"{kind}_tokens"]):
            yield UsageCharge(
                day=utc_date(row.day),
                project_id=row.project_id,
                project_name=row.project_name,
                api_key_id=row.api_key_id,
                api_key_name=row.api_key_name,
                model=row.model,
                price_version=row.price_version_id,
                tier=ServiceTier(row.tier),
                token_kind=kind,
                token_count=token_count,
                cancelled_token_count=int(found[f"{kind}_cancelled"]),
                request_count=found[f"{kind}_requests"],
                unit_price_picos=found[f"{kind}_price"],
                list_price_picos=found[f"{kind}_list_price"],
            )


def cell(value: str) -> str:
    """Return the value with a quote before what a spreadsheet would take for a formula. Numbers stay as they are."""
    if not value.startswith(FORMULA_BEGINNINGS) or NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def csv_text(rows: Iterable[dict[str, str]]) -> str:
    """RFC 4180 without a header; a column that a row lacks is null."""
    target = io.StringIO()
    writer = csv.DictWriter(target, COLUMNS, restval="", lineterminator="\r\n")
    writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return target.getvalue()
