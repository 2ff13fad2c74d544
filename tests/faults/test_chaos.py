"""Chaos runs: a short run passes its audit, and the audit detects planted faults."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from chaos.rounds import (
    EXPORT_FILE,
    JOURNALS,
    WEIGHTS,
    Kill,
    Kind,
    Outcome,
    Plan,
    Report,
    SentRequest,
    audit,
    chaos_settings,
    exported_quantities,
    run_rounds,
)
from metering.ledger.rating import rate_all_pending
from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions
from tests.metering.usage import Consumed, add_usage, new_customer, new_price

KILLS_PER_ROUND = 3  # each takes 3 s of CPU; `weir chaos` makes as many as one asks for
ROUNDS = int(os.environ.get("WEIR_TEST_CHAOS_ROUNDS", "1"))
KINDS = (Kind.API, Kind.ENGINE, Kind.POSTGRES, Kind.WORKER, Kind.EXPORTER, Kind.BROKER)


@pytest.mark.faults
async def test_a_run_of_kills_loses_and_doubles_no_token(postgres_home: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    plan = Plan(rounds=ROUNDS, seed=seed, kills_per_round=KILLS_PER_ROUND, kinds=KINDS)

    report = await run_rounds(postgres_home, chaos_settings("simulated"), plan, print)

    assert report.wrong == []
    assert len(report.kills) == KILLS_PER_ROUND * ROUNDS
    assert sum(outcome.sent.received for outcome in report.outcomes) > 0


@pytest.mark.parametrize(
    ("received", "reported", "billed", "forgiven", "lost", "doubled", "unreceived", "sound"),
    [
        (10, 10, 10, 0, 0, 0, 0, True),
        (10, None, 10, 0, 0, 0, 0, True),
        (10, None, 10, 5, 0, 0, 0, True),
        (10, None, 8, 2, 0, 0, 0, True),
        (0, None, 0, 0, 0, 0, 0, True),
        (10, None, 13, 0, 0, 0, 3, False),
        (10, None, 13, 5, 0, 0, 3, False),
        (10, None, 8, 1, 1, 0, 0, False),
        (100, None, 0, 100, 36, 0, 0, False),
        (10, 10, 9, 0, 1, 0, 0, False),
        (10, 10, 9, 1, 1, 0, 0, False),
        (10, None, 0, 0, 10, 0, 0, False),
        (10, 10, 20, 0, 0, 10, 10, False),
        (9, 10, 10, 0, 0, 0, 1, False),
    ],
)
def test_the_audit_classifies_the_outcome_of_a_request(
    received: int,
    reported: int | None,
    billed: int,
    forgiven: int,
    lost: int,
    doubled: int,
    unreceived: int,
    sound: bool,
) -> None:
    outcome = Outcome(SentRequest("r", 0, 0.0, 1.0, received, reported), billed, forgiven)

    assert (outcome.lost, outcome.doubled, outcome.unreceived) == (lost, doubled, unreceived)
    assert (outcome.problem == "") is sound


def test_a_request_counts_for_the_first_kill_that_struck_it() -> None:
    kills = [Kill(Kind.API, 5.0, api=1), Kill(Kind.WORKER, 6.0), Kill(Kind.POSTGRES, 7.0)]
    report = Report(kills=kills)
    report.outcomes = [
        Outcome(SentRequest("other process", 0, 4.0, 6.5, 3, 3), 3),
        Outcome(SentRequest("same process", 1, 4.0, 6.5, 2, None), 4),
        Outcome(SentRequest("before", 1, 1.0, 2.0, 1, 1), 1),
        Outcome(SentRequest("never let in", 1, 6.9, 7.5, 0, None), 0),
    ]

    rows = report.rows()

    assert {kind: row.requests for kind, row in rows.items()} == {
        Kind.API: 1,
        Kind.WORKER: 1,
        Kind.POSTGRES: 1,
        None: 1,
    }
    api = rows[Kind.API]
    assert (api.cut_off, api.unreceived, rows[Kind.POSTGRES].refused) == (1, 2, 1)


def test_every_kind_of_kill_is_drawn() -> None:
    assert set(WEIGHTS) == set(Kind)


async def test_the_audit_is_complete(sessions: Sessions, database_url: str, tmp_path: Path) -> None:
    """Usage without a request, missing usage, an incomplete export, a refused journal."""
    async with sessions.begin() as session:
        price: ModelPrice = await new_price(session)
        await add_usage(
            session, await new_customer(session, "acme"), price, [Consumed(output_token_count=7)]
        )
    await rate_all_pending(sessions)
    (tmp_path / JOURNALS).mkdir()
    (tmp_path / JOURNALS / "x.refused").touch()

    outcomes, wrong = audit(
        database_url, tmp_path, [SentRequest(str(uuid.uuid4()), 0, 0.0, 1.0, received=5)]
    )

    assert [outcome.lost for outcome in outcomes] == [5]
    assert any("5 received, None reported, 0 billed" in each for each in wrong)
    assert any("was not sent by a client: 7 tokens" in each for each in wrong)
    assert (
        "7 tokens used, 7 in the ledger, 0 in delivered batches, 0 in the exporter's file" in wrong
    )
    assert "x.refused was refused by recovery" in wrong


def test_a_duplicate_quantity_in_the_file_is_refused(tmp_path: Path) -> None:
    line = json.dumps({"identifier": str(uuid.uuid4()), "token_count": 3}) + "\n"
    file = tmp_path / EXPORT_FILE
    file.write_text(line)
    assert list(exported_quantities(file).values()) == [3]

    file.write_text(line * 2)

    with pytest.raises(ValueError, match="is exported twice"):
        exported_quantities(file)


def test_a_run_starts_children_without_the_fork_support_of_grpc() -> None:
    code = "import chaos.rounds, os; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    assert subprocess.check_output([sys.executable, "-c", code], env={}, text=True) == "0\n"
