"""Refused admissions of one process: counts by quota, and the retry hint of each.

A refusal is not written to the database. Counts and promises belong to this process and end with
it.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import psycopg
import structlog

from metering.core.models import QuotaDimension, QuotaSubject
from metering.quotas.quota_rules import Charge, QuotaRule
from metering.quotas.quotas import QuotaExceeded
from metering.quotas.retry_hints import (
    RESERVATION_COUNT_MAX,
    UNKNOWN_KEY,
    Forecast,
    History,
    Requester,
    RequestKey,
    RetryReservations,
    RunningRequest,
    reserve,
)
from metering.store.pipeline import Connection

# Maximum age of the data on running requests: refusals come in bursts, and each refresh is a query.
REFRESH_S = 0.25

# Quotas that refuse at the same time; beyond it all promises are dropped.
FORECAST_COUNT_MAX = 10_000

RUNNING_COUNT_MAX = 20_000

HISTORY_COUNT = 64  # requests: enough for a 95th percentile


# Live holds of these quotas, the oldest first.
SELECT_RUNNING = """
SELECT q.quota_id, h.process_id, extract(epoch FROM now() - h.admitted_at)::float8,
       h.input_token_count, h.cached_input_token_count, h.leased_token_count,
       h.posted_token_count, h.reasoning_token_count, h.admitted_at, h.charged_at
FROM unnest(%s::uuid[]) AS q(quota_id)
JOIN holds h ON h.state = 'held' AND q.quota_id = ANY(h.quota_ids)
ORDER BY h.admitted_at
LIMIT %s
"""

SELECT_HISTORY = """
SELECT o.id, extract(epoch FROM e.settled_at - e.admitted_at)::float8, e.delivered_token_count
FROM unnest(%s::uuid[]) AS o(id),
LATERAL (
    SELECT settled_at, admitted_at, delivered_token_count
    FROM usage_events
    WHERE organization_id = o.id AND part = 0 AND NOT recovered
    ORDER BY settled_at DESC
    LIMIT %s
) e
"""


log = structlog.get_logger(__name__)


class Refused(NamedTuple):
    """An admission refused by a quota."""

    organization_id: uuid.UUID
    error: QuotaExceeded
    request: RequestKey | None = None  # None: no promise is remembered for it
    api_key_id: uuid.UUID = UNKNOWN_KEY


class ReservedRetry(NamedTuple):
    """Time of a promised retry in seconds, and the quotas that refused the request."""

    at_s: float
    quota_ids: frozenset[uuid.UUID]


class Refusals:
    """Counter of refusals; gives each refused request its retry hint."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[QuotaDimension, QuotaSubject]] = Counter()
        self._forecasts: dict[uuid.UUID, Forecast] = {}
        self._reserved: dict[RequestKey, ReservedRetry] = {}  # the latest last
        self._reservations = RetryReservations()

    @property
    def counts(self) -> Mapping[tuple[QuotaDimension, QuotaSubject], int]:
        """Refused admissions since the start, by the first failing quota."""
        return dict(self._counts)

    @property
    def awaits_returns(self) -> bool:
        """True if any request has a promised retry outstanding."""
        return bool(self._reserved)

    async def note(self, connection: Connection, now: datetime, refused: Sequence[Refused]) -> None:
        """Count the refusals of a batch and set the retry hint of each.

        Never raises, since the batch is committed and its responses must be sent.
        """
        self._counts.update(
            (each.error.failing[0].dimension, each.error.failing[0].subject) for each in refused
        )
        waiting = [
            each for each in refused if each.error.retry_helps and each.error.charge is not None
        ]
        try:
            await self._refresh(connection, now, waiting)
            for each in waiting:
                self._set_hint(each, now)
        except psycopg.Error as away:
            log.info("retry_hints_unknown", cause=str(away).strip())
        except Exception:  # the other operations of the batch are not affected
            log.exception("retry_hints_failed")

    def _set_hint(self, refused: Refused, now: datetime) -> None:
        """Promise room to a request once. An early retry gets the same time again."""
        error, request, now_s = refused.error, refused.request, now.timestamp()
        quota_ids = frozenset(state.quota_id for state in error.failing)
        reserved = self._reserved.pop(request, None) if request is not None else None
        if request is not None:
            self._reservations.note_retry(request, now_s)
        if reserved is None or reserved.at_s <= now_s or reserved.quota_ids != quota_ids:
            requester = Requester(refused.organization_id, refused.api_key_id)
            may = request is None or self._reservations.accepts(requester, now_s)
            self.reserve(error, now, refused.api_key_id if may else None)
            reserved = ReservedRetry(now_s + error.retry_after_s, quota_ids)
            if may and request is not None and error.retry_helps:
                self._reservations.add(request, requester, now_s, reserved.at_s)
        error.hint_s = reserved.at_s - now_s
        if request is not None and error.retry_helps:
            self._reserved[request] = reserved
            if len(self._reserved) > RESERVATION_COUNT_MAX:
                del self._reserved[next(iter(self._reserved))]

    def on_admitted(self, request: RequestKey) -> None:
        """Record that a request was admitted, which keeps the promise made to it."""
        if self._reserved.pop(request, None) is not None:
            self._reservations.note_retry(request, math.inf)

    def reserve(
        self, error: QuotaExceeded, now: datetime, api_key_id: uuid.UUID | None = UNKNOWN_KEY
    ) -> None:
        """Set the hint of a refusal to the time at which all its quotas are expected to have room.

        `api_key_id` is explained at `retry_hints.reserve`.
        """
        assert error.charge is not None
        forecasts = [
            (self._forecasts[state.quota_id], state, minimum) for state, minimum in error.met
        ]
        error.hint_s = reserve(forecasts, error.charge, now.timestamp(), api_key_id)

    def learn(
        self,
        rule: QuotaRule,
        now: datetime,
        history: History,
        process_count: int,
        running: Sequence[RunningRequest],
    ) -> None:
        """Replace the forecast of a quota, keeping its promises to keys whose requests return.

        `process_count` never shrinks: processes without running requests still make promises.
        """
        known = self._forecasts.get(rule.id)
        reservations = (
            [each for each in known.reservations if not self._reservations.is_doubted(each[2])]
            if known is not None
            else []
        )
        processes = max(process_count, known.process_count if known is not None else 1)
        self._forecasts[rule.id] = Forecast(
            rule, now.timestamp(), history, processes, running, reservations
        )

    async def _refresh(
        self, connection: Connection, now: datetime, refused: Sequence[Refused]
    ) -> None:
        """Refresh those forecasts of the refusing quotas that are older than `REFRESH_S`."""
        stale: dict[uuid.UUID, tuple[QuotaRule, Charge, uuid.UUID]] = {}
        for organization_id, error, *_ in refused:
            for state, _ in error.met:
                known = self._forecasts.get(state.quota_id)
                age_s = (
                    now.timestamp() - known.at_s
                    if known is not None and known.rule is state.rule
                    else REFRESH_S
                )
                if age_s >= REFRESH_S and error.charge is not None:
                    stale[state.quota_id] = (state.rule, error.charge, organization_id)
        if not stale:
            return
        if len(self._forecasts) > FORECAST_COUNT_MAX:
            self._forecasts.clear()
        histories = await read_histories(
            connection, {organization_id for _, _, organization_id in stale.values()}
        )
        running: defaultdict[uuid.UUID, list[RunningRequest]] = defaultdict(list)
        owners: defaultdict[uuid.UUID, set[uuid.UUID]] = defaultdict(set)
        cursor = await connection.execute(SELECT_RUNNING, (list(stale), RUNNING_COUNT_MAX))
        rows = await cursor.fetchall()
        for quota_id, process_id, age_s, *amounts, admitted_at, charged_at in rows:
            sent, cached, leased, posted, reasoning = amounts
            charge = Charge(
                stale[quota_id][1].prices,
                sent,
                cached,
                leased,
                posted,
                admitted_at,
                charged_at,
                reasoning_token_count=reasoning,
            )
            running[quota_id].append(RunningRequest(charge, age_s))
            owners[quota_id].add(process_id)
        for quota_id, (rule, _, organization_id) in stale.items():
            history = histories.get(organization_id, History())
            self.learn(rule, now, history, len(owners[quota_id]), running[quota_id])


async def read_histories(
    connection: Connection, organization_ids: Collection[uuid.UUID]
) -> dict[uuid.UUID, History]:
    """Read durations and outputs of the latest requests of each organization."""
    cursor = await connection.execute(SELECT_HISTORY, (list(organization_ids), HISTORY_COUNT))
    durations: defaultdict[uuid.UUID, list[float]] = defaultdict(list)
    outputs: defaultdict[uuid.UUID, list[int]] = defaultdict(list)
    for organization_id, duration_s, output in await cursor.fetchall():
        durations[organization_id].append(duration_s)
        outputs[organization_id].append(output)
    return {each: History(durations[each], outputs[each]) for each in durations}
