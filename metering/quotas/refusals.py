"""Refused admissions of one process: counts by quota, and the retry-after of each.

A refusal is not written to the database. Counts and reservations belong to this process and end
with it.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import psycopg
import structlog

from common.retry_after import RequestKey, Reservations
from metering.core.models import QuotaDimension, QuotaSubject
from metering.quotas.forecast import (
    Forecast,
    History,
    RunningRequest,
    reserve,
)
from metering.quotas.quota_rules import Charge, QuotaRule
from metering.quotas.quotas import QuotaExceeded
from metering.store.pipeline import Connection

# Maximum age of the data on running requests: refusals come in bursts, and each refresh is a query.
REFRESH_S = 0.25

# Quotas that refuse at the same time; beyond it all reservations are dropped.
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
    api_key_id: uuid.UUID
    request: RequestKey | None  # None: no room is reserved for it


class Refusals:
    """Counter of refusals; gives each refused request its retry-after."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[QuotaDimension, QuotaSubject]] = Counter()
        self.forecasts: dict[int, Forecast] = {}  # by the number of the quota

    @property
    def counts(self) -> Mapping[tuple[QuotaDimension, QuotaSubject], int]:
        """Refused admissions since the start, by the first failing quota."""
        return dict(self._counts)

    async def note(self, connection: Connection, now: datetime, refused: Sequence[Refused]) -> None:
        """Count the refusals of a batch and set the retry-after of each.

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
                self.reserve(each, now)
        except psycopg.Error as away:
            log.info("retry_after_unknown", cause=str(away).strip())
        except Exception:  # the other operations of the batch are not affected
            log.exception("retry_after_failed")

    def reserve(self, refused: Refused, now: datetime) -> None:
        """Reserve room for a request once. An early retry gets the same moment again."""
        error, request, now_s = refused.error, refused.request, now.timestamp()
        demands = [
            (self.forecasts[state.rule.number], state, minimum) for state, minimum in error.met
        ]
        if request is not None:
            left_s = min(
                self.forecasts[state.rule.number].reservations.left_s(request, now_s)
                for state in error.failing
            )
            if left_s:
                error.fits_in_s = left_s
                return
            self.on_returned(request, [state.rule for state, _ in error.met])
        assert error.charge is not None
        error.fits_in_s = reserve(demands, error.charge, now_s, request, refused.api_key_id)

    def on_returned(self, request: RequestKey, rules: Iterable[QuotaRule]) -> None:
        """Record that a request was retried or admitted, which uses its reservations."""
        for rule in rules:
            if (forecast := self.forecasts.get(rule.number)) is not None:
                forecast.reservations.returned(request)

    def learn(
        self,
        rule: QuotaRule,
        now: datetime,
        history: History,
        process_count: int,
        running: Sequence[RunningRequest],
    ) -> None:
        """Replace the forecast of a quota, keeping its reservations.

        `process_count` never shrinks: processes without running requests still reserve room.
        """
        known = self.forecasts.get(rule.number)
        self.forecasts[rule.number] = Forecast(
            rule,
            now.timestamp(),
            history,
            max(process_count, known.process_count if known is not None else 1),
            running,
            known.reservations if known is not None else Reservations(),
        )

    async def _refresh(
        self, connection: Connection, now: datetime, refused: Sequence[Refused]
    ) -> None:
        """Refresh those forecasts of the refusing quotas that are older than `REFRESH_S`."""
        stale: dict[uuid.UUID, tuple[QuotaRule, Charge, uuid.UUID]] = {}
        for organization_id, error, *_ in refused:
            assert error.charge is not None, "only a request with a charge waits for room"
            for state, _ in error.met:
                known = self.forecasts.get(state.rule.number)
                if (
                    known is None
                    or known.rule is not state.rule
                    or now.timestamp() - known.at_s >= REFRESH_S
                ):
                    stale[state.quota_id] = (state.rule, error.charge, organization_id)
        if not stale:
            return
        if len(self.forecasts) > FORECAST_COUNT_MAX:
            self.forecasts.clear()
        histories = await read_histories(
            connection, {organization_id for _, _, organization_id in stale.values()}
        )
        running: defaultdict[uuid.UUID, list[RunningRequest]] = defaultdict(list)
        owners: defaultdict[uuid.UUID, set[uuid.UUID]] = defaultdict(set)
        cursor = await connection.execute(SELECT_RUNNING, (list(stale), RUNNING_COUNT_MAX))
        rows = await cursor.fetchall()
        for quota_id, process_id, age_s, *amounts, admitted_at, charged_at in rows:
            prices, (sent, cached, leased, posted, reasoning) = stale[quota_id][1].prices, amounts
            charge = Charge(
                prices, sent, cached, leased, posted, admitted_at, charged_at, (), reasoning
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
