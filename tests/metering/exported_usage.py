"""Usage in past hours, and a double of Stripe with its customers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import TokenKind
from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions, psycopg_conninfo
from tests.metering.queries import fetch_rows
from tests.metering.usage import Customer
from tests.stripe_double.account import Account


def hours_ago(hours: float) -> datetime:
    """Return a time within an hour that is over, at least if `hours` is 2 or more."""
    return datetime.now(UTC).replace(minute=20, second=0, microsecond=0) - timedelta(hours=hours)


def check_delivered(database_url: str, account: Account, namespace: str = "weir") -> None:
    """Raises: AssertionError unless the double counted the delivered tokens exactly."""
    query = """
        SELECT b.organization_id, b.price_version_id, b.token_kind, o.stripe_id,
               coalesce(sum(b.token_count) FILTER (WHERE b.state = 'delivered'),
               0)::bigint AS token_count
        FROM meter_batches b
        JOIN stripe_objects o ON o.kind = 'customer' AND o.ref = b.organization_id::text
        GROUP BY 1, 2, 3, 4
    """
    with psycopg.connect(psycopg_conninfo(database_url), row_factory=dict_row) as connection:
        rows = connection.execute(query).fetchall()
    for row in rows:
        counted = account.total(
            f"{namespace}_{row['price_version_id']}_{row['token_kind']}", row["stripe_id"]
        )
        assert counted == row["token_count"], row
    assert sum(int(each["payload"]["value"]) for each in account.meter_events) == sum(
        row["token_count"] for row in rows
    )


async def known_to_stripe(
    session: AsyncSession, account: Account, customer: Customer, price: ModelPrice
) -> str:
    """Create the customer and meters here and at Stripe; return the customer's id at Stripe."""
    organization = str(customer.organization_id)
    made = account.create(
        "customers", {"name": customer.name, "metadata": {"weir_organization_id": organization}}
    )
    await remember(session, "customer", organization, made["id"])
    for kind in TokenKind:
        version = price.prices.version
        meter = account.create(
            "billing/meters", {"event_name": f"weir_{version}_{kind}", "display_name": kind}
        )
        await remember(session, "meter", f"{version}:{kind}", meter["id"])
    return str(made["id"])


async def remember(session: AsyncSession, kind: str, ref: str, stripe_id: str) -> None:
    """Insert a row of `stripe_objects`."""
    statement = text(
        "INSERT INTO stripe_objects (account, kind, ref, stripe_id) VALUES ('test', :kind, :ref,"
        " :stripe_id)"
    )
    await session.execute(statement, {"kind": kind, "ref": ref, "stripe_id": stripe_id})


async def states(sessions: Sessions) -> dict[str, int]:
    """Return the number of batches by state."""
    rows = await fetch_rows(sessions, "SELECT state, count(*) FROM meter_batches GROUP BY 1")
    return {str(state): int(count) for state, count in rows}
