"""Comparison of usage and ledger: the same tokens and the same money."""

from __future__ import annotations

from metering.ledger.rating import rate_all_pending
from metering.store.db import create_engine, create_sessions
from tests.service import Service


async def rate(service: Service) -> None:
    """Post all usage to the ledger, as the worker does."""
    engine = create_engine(service.database_url, pool_size=1)
    try:
        await rate_all_pending(create_sessions(engine))
    finally:
        await engine.dispose()


def check_ledger(service: Service) -> None:
    """Check that tokens and money of the ledger equal those of the usage events."""
    [usage] = service.books.rows(
        """SELECT coalesce(sum(input_token_count + billed_token_count), 0)::bigint AS tokens,
                  coalesce(sum(cost_picos), 0)::bigint AS picos,
                  count(*) FILTER (WHERE rated_at IS NULL) AS unrated
           FROM usage_events"""
    )
    [ledger] = service.books.rows(
        """SELECT coalesce(sum(token_count), 0)::bigint AS tokens,
           coalesce(-sum(amount_picos), 0)::bigint AS picos
           FROM ledger_entries WHERE token_kind IS NOT NULL"""
    )
    assert usage["unrated"] == 0
    assert (usage["tokens"], usage["picos"]) == (ledger["tokens"], ledger["picos"])
