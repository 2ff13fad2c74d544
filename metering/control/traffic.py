"""Traffic of each model over time: counts and histograms of all api processes, added up in rows.

A row is one model in one step. Steps of three lengths are kept, each for as long as a chart shows
it, so the table has some hundred rows per model, however many processes and requests there are.
Every process adds its increments every `SAMPLE_S` seconds, in the order of the key, so that two
processes do not deadlock. If the answer of a write is lost, its counts may be added twice: nothing
is billed by charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

SAMPLE_S = 15  # the shortest step, and the time between two writes of a process
# Processes write within this time after a step has ended, at different moments.
SPREAD_S = 2.0
# A step is complete this long after its end; until then, counts belong to it.
GRACE_S = 5


class Period(Enum):
    """Shown period: number of steps, and length of one in seconds."""

    QUARTER_HOUR = 60, SAMPLE_S
    HOUR = 60, 60
    DAY = 96, 900

    @property
    def step_count(self) -> int:
        return self.value[0]

    @property
    def step_s(self) -> int:
        return self.value[1]


class Increment(msgspec.Struct, frozen=True):
    """Counts that a process adds for one model.

    `counts` are as in `Counts`. `running` and `waiting` are the present numbers of requests. The
    lists of buckets have the bounds of the histograms of `api/observability/observer.py`. `errors`
    are counts by reason.
    """

    model: str
    counts: list[int]
    running: int
    waiting: int
    first_token: list[int]
    inter_token: list[int]
    errors: dict[str, int]


class Counts(NamedTuple):
    """Counts of a model, in the order of the column `counts`."""

    requests: int
    errors: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    embedding_tokens: int


class Step(msgspec.Struct, array_like=True, frozen=True):
    """One step of one model; `index` counts from the first step of the period.

    `running` and `waiting` are averages over the step.
    """

    index: int
    counts: Counts
    running: float
    waiting: float
    first_token: list[int]
    inter_token: list[int]
    errors: dict[str, int]


class TrafficRows(NamedTuple):
    """Steps with traffic of a period, by model. `start_s` is the begin of the first step."""

    start_s: float
    models: dict[str, list[Step]]


def _added(column: str) -> str:
    """Return SQL for the sum of two lists, element by element."""
    return (
        f"ARRAY(SELECT coalesce(a, 0) + coalesce(b, 0)"
        f" FROM unnest(t.{column}, excluded.{column}) WITH ORDINALITY AS u(a, b, i) ORDER BY i)"
    )


# A gauge is sampled once per `SAMPLE_S`, so its average is the sum of its samples by their number.
ADD = text(f"""
INSERT INTO traffic AS t
    (step_s, started_at, model, counts, running, waiting, first_token, inter_token, errors)
SELECT s.step_s,
       date_bin(
           make_interval(secs => s.step_s), now() - interval '{GRACE_S} s', to_timestamp(0)
       ) AS started_at,
       w.model, w.counts, w.running * {SAMPLE_S} / s.step_s, w.waiting * {SAMPLE_S} / s.step_s,
       w.first_token, w.inter_token, w.errors
FROM jsonb_to_recordset(CAST(:increments AS jsonb)) AS w(
         model text, counts bigint[], running float8, waiting float8, first_token bigint[],
         inter_token bigint[], errors jsonb
     ),
     unnest(CAST(:steps AS int[])) AS s(step_s)
ORDER BY step_s, started_at, model
ON CONFLICT (step_s, started_at, model) DO UPDATE
SET counts = {_added("counts")},
    running = t.running + excluded.running,
    waiting = t.waiting + excluded.waiting,
    first_token = {_added("first_token")},
    inter_token = {_added("inter_token")},
    errors = (
        SELECT coalesce(jsonb_object_agg(reason, number), '{{}}')
        FROM (
            SELECT key AS reason, sum(CAST(value AS bigint)) AS number
            FROM (
                SELECT * FROM jsonb_each_text(t.errors)
                UNION ALL
                SELECT * FROM jsonb_each_text(excluded.errors)
            ) AS both_have
            GROUP BY key
        ) AS summed
    )
""")
FORGET_OLD = text(f"""
DELETE FROM traffic
WHERE (step_s, started_at, model) IN (
    SELECT t.step_s, t.started_at, t.model
    FROM unnest(CAST(:steps AS int[]), CAST(:step_counts AS int[])) AS p(step_s, step_count)
    JOIN traffic t
        ON t.step_s = p.step_s
       AND t.started_at < now() - make_interval(secs => p.step_s * (p.step_count + 2) + {GRACE_S})
    FOR UPDATE OF t SKIP LOCKED
)
""")
STEPS = {
    "steps": [each.step_s for each in Period],
    "step_counts": [each.step_count for each in Period],
}
# The end of the last complete step.
END = text(f"""
SELECT extract(
    epoch FROM date_bin(
        make_interval(secs => :step_s), now() - interval '{GRACE_S} s', to_timestamp(0)
    )
)::float8
""")
# As text: the lists of a model are decoded at once, in some tens of microseconds.
READ = text("""
SELECT model,
       json_agg(json_build_array(
           ((extract(epoch FROM started_at) - CAST(:start_s AS float8)) / :step_s)::int,
           counts, running, waiting, first_token, inter_token, errors
       ))::text
FROM traffic
WHERE step_s = :step_s
  AND started_at >= to_timestamp(:start_s)
  AND started_at < to_timestamp(:end_s)
GROUP BY model
""")


async def add_traffic(session: AsyncSession, increments: Sequence[Increment]) -> None:
    """Add what one process counted since its last write. The caller commits."""
    encoded = msgspec.json.encode(increments).decode()
    await session.execute(ADD, {"increments": encoded, "steps": STEPS["steps"]})


async def forget_old_traffic(session: AsyncSession) -> None:
    """Delete the steps that no chart shows. Rows that another process deletes are left to it."""
    await session.execute(FORGET_OLD, STEPS)


async def read_traffic(session: AsyncSession, period: Period) -> TrafficRows:
    """Read the complete steps of a period that had traffic."""
    step = {"step_s": period.step_s}
    end_s = (await session.execute(END, step)).scalar_one()
    start_s = end_s - period.step_s * period.step_count
    rows = await session.execute(READ, step | {"start_s": start_s, "end_s": end_s})
    return TrafficRows(
        start_s, {model: msgspec.json.decode(steps, type=list[Step]) for model, steps in rows}
    )
