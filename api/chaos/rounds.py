"""Rounds of load and death: in each, some parts are killed, everything comes to rest, and every token is accounted for."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from api.chaos.audit import Outcome, audit, settle
from api.chaos.kills import Kill, Kind, draw, strike
from api.chaos.load import Load
from api.chaos.system import BOUNDS, ENGINES, System, running_system
from api.core.settings import Settings

KILLS_PER_ROUND = 5
BETWEEN_KILLS_S = (0.05, 0.8)  # from "still dying" to "just back"
TOKENS_BEFORE = 50  # that the clients have of a round before the first kill
LOAD_TIMEOUT_S = 90.0  # for the last answers of a round

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. rounds of kills_per_round; engine: a key of `system.ENGINES`."""

    rounds: int
    seed: int
    engine: str = "simulated"
    with_redis: bool = False
    kills_per_round: int = KILLS_PER_ROUND
    kinds: tuple[Kind, ...] = ()


@dataclass(slots=True)
class Row:
    """What kills of one kind did: requests that were under way when one struck, and their tokens.

    refused: without an answer, and without a token used. cut_off: without an end, after tokens were used.
    """

    kills: int = 0
    requests: int = 0
    refused: int = 0
    cut_off: int = 0
    received: int = 0
    billed: int = 0
    in_transit: int = 0
    lost: int = 0
    doubled: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a request."""
        self.requests += 1
        if outcome.asked.told is None:
            traceless = not outcome.asked.received and not outcome.billed
            self.refused += traceless
            self.cut_off += not traceless
        self.received += outcome.asked.received
        self.billed += outcome.billed
        self.in_transit += outcome.in_transit
        self.lost += outcome.lost
        self.doubled += outcome.doubled


@dataclass(slots=True)
class Report:
    """What was done and found. rows: by kind, and under None the requests that no kill struck. back_s: medians by part."""

    kills: list[Kill] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    back_s: dict[str, float] = field(default_factory=dict)

    def rows(self) -> dict[Kind | None, Row]:
        """One row for each kind that was drawn. A request counts for the first kill that struck it."""
        rows: dict[Kind | None, Row] = {kind: Row() for kind in (*Kind, None)}
        for kill in self.kills:
            rows[kill.kind].kills += 1
        for outcome in self.outcomes:
            rows[first_kill(self.kills, outcome)].add(outcome)
        return {kind: row for kind, row in rows.items() if row.kills or row.requests}


def first_kill(kills: Iterable[Kill], outcome: Outcome) -> Kind | None:
    """What struck a request first, if anything did while it was under way."""
    asked = outcome.asked
    for kill in kills:
        if asked.began_at <= kill.at <= asked.ended_at and kill.api in (None, asked.api):
            return kill.kind
    return None


async def run_rounds(directory: Path, settings: Settings, plan: Plan, tell: Tell) -> Report:
    """All rounds. settings: of the API processes. Stops after the first round that finds something wrong.

    Raises: StackFailed, PostgresNotStarted.
    """
    rng = random.Random(plan.seed)
    report = Report()
    async with running_system(directory, settings, with_redis=plan.with_redis) as system:
        asked = Load([api.address for api in system.apis], system.connection.api_key, next(iter(settings.models)), rng)
        for number in range(plan.rounds):
            kills = await one_round(system, asked, plan, rng, report)
            outcomes, wrong = await asyncio.to_thread(audit, system.postgres.url, directory, asked.asked)
            report.outcomes = outcomes
            report.wrong += wrong + [death for part in system.parts for death in part.deaths]
            names = "; ".join(kill.kind for kill in kills)
            tell(f"round {number + 1}: {names}; {len(asked.asked):,} requests, {asked.received:,} tokens received so far")
            if report.wrong:
                break
        report.back_s = times_back(system)
    return report


async def one_round(system: System, load: Load, plan: Plan, rng: random.Random, report: Report) -> Sequence[Kill]:
    """Load, kills, and rest; what does not come to rest goes into the report."""
    kills: list[Kill] = []
    before = load.received
    load.begin()
    async with asyncio.TaskGroup() as tasks:
        clients = tasks.create_task(load.run(), name="clients")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await load.reached(before + TOKENS_BEFORE)
                while len(kills) < plan.kills_per_round:
                    await asyncio.sleep(rng.uniform(*BETWEEN_KILLS_S))
                    if (kill := await strike(system, rng.choice(plan.kinds) if plan.kinds else draw(rng), rng)) is not None:
                        kills.append(kill)
                load.stop()
                await clients
        except TimeoutError:
            report.wrong.append(f"clients still waited for their answers {LOAD_TIMEOUT_S:.0f} s after the round began")
            clients.cancel()
    report.kills += kills
    report.wrong += await settle(system)
    return kills


def times_back(system: System) -> dict[str, float]:
    """Median time from a death until a part was there again, in seconds; of the API processes together."""
    downs = {"API process": [s for api in system.apis for s in api.down_s], "PostgreSQL": system.down_s}
    return {name: statistics.median(seconds) for name, seconds in downs.items() if seconds}


def chaos_settings(engine: str) -> Settings:
    """Of the API processes: the engine, and bounds that let as much as possible happen."""
    return replace(Settings(), **BOUNDS, **ENGINES[engine])
