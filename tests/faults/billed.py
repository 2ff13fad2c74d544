"""Comparison of received tokens, usage and ledger: the same tokens and the same money."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from chaos.rounds import Wire
from metering.ledger.rating import rate_all_pending
from metering.store.db import create_engine, create_sessions
from tests.service import Service, Stream, Tenant


@dataclass(frozen=True, slots=True)
class Received:
    """Output that a client got of a request before its server died.

    unmarked_token_count: tokens of its last message, which may have been sent and not marked as
    taken; 0 if the end of the request was received.
    """

    request_id: str
    token_count: int
    unmarked_token_count: int

    @classmethod
    def of(cls, stream: Stream, request_id: str) -> Received:
        """Return what a stream has received of a request."""
        last = 0 if stream.ends(request_id) else stream.last_token_count(request_id)
        return cls(request_id, len(stream.token_ids(request_id)), last)


@contextlib.asynccontextmanager
async def lossless_stream(service: Service, secret: str) -> AsyncIterator[Stream]:
    """Yield a stream that receives all that the transport of the server had taken when it died.

    A client of gRPC drops messages that it has not read when its connection breaks.
    """
    async with (
        Wire(service.address).open() as address,
        service.stream(secret, address=address) as stream,
    ):
        yield stream


def check_charged(service: Service, tenant: Tenant, requests: Iterable[Received]) -> None:
    """Check the bill of requests of a lossless stream whose server may have died.

    No token is billed that the transport had not taken. Of those that it had, at most the last
    message of each request is free. No token is billed twice.
    """
    events = service.database.events(tenant)
    assert len({(event["hold_id"], event["part"]) for event in events}) == len(events)
    for one in requests:
        own = [event for event in events if str(event["request_id"]) == one.request_id]
        billed = sum(event["delivered_token_count"] for event in own)
        assert billed <= one.token_count, f"billed {billed} tokens, never received: {one}"
        assert one.token_count - one.unmarked_token_count <= billed, f"billed {billed}, lost: {one}"
        if own:
            journalled = sum(event["journalled_token_count"] for event in own)
            assert one.token_count <= journalled, f"sent without a record: {one}"


async def rate(service: Service) -> None:
    """Post all usage to the ledger, as the worker does."""
    engine = create_engine(service.database_url, pool_size=1)
    try:
        await rate_all_pending(create_sessions(engine))
    finally:
        await engine.dispose()


def check_ledger(service: Service) -> None:
    """Check that tokens and money of the ledger equal those of the usage events."""
    [usage] = service.database.rows(
        """SELECT coalesce(sum(input_token_count + billed_token_count), 0)::bigint AS tokens,
                  coalesce(sum(cost_picos), 0)::bigint AS picos,
                  count(*) FILTER (WHERE rated_at IS NULL) AS unrated
           FROM usage_events"""
    )
    [ledger] = service.database.rows(
        """SELECT coalesce(sum(token_count), 0)::bigint AS tokens,
           coalesce(-sum(amount_picos), 0)::bigint AS picos
           FROM ledger_entries WHERE token_kind IS NOT NULL"""
    )
    assert usage["unrated"] == 0
    assert (usage["tokens"], usage["picos"]) == (ledger["tokens"], ledger["picos"])
