"""Table of endings: each cell is true for every way that leads there, with real holds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from pathlib import Path

import pytest

from api.core.errors import (
    AddressNotAllowed,
    CancelledByAdmin,
    CancelledEarly,
    Cause,
    Draining,
    FieldViolation,
    InvalidRequest,
    KeyRevokedMidway,
    SiblingEnded,
)
from api.core.statuses import CODES_BY_CLASS
from api.generation.charges import Action, EndCharge, EndPhase
from api.generation.endings import (
    CAUSES,
    OUTCOMES,
    PHASES,
    TABLE,
    WAYS,
    UsageSoFar,
    cause_of,
    charge_of,
    phase_of,
)
from inference.errors import (
    EngineError,
    EngineFailed,
    EngineUnavailable,
    RequestImpossible,
    SafetyUnavailable,
)
from metering.core.errors import DatabaseUnavailable, HoldEnded, KeyInvalid, RequestIdReused
from metering.core.models import Outcome, QuotaDimension
from metering.holds.operations import Admit, Expire, Settle, Void, new_hold_id
from metering.holds.recovery import sweep_expired_holds
from metering.quotas.quota_rules import Payer
from metering.quotas.quotas import QuotaExceeded
from tests.api.test_admission import Rig, request, running
from tests.metering.hold_world import HoldWorld
from tests.metering.invariants import check_invariants

LIMIT = 10**6
End = tuple[Outcome | None, Exception | None]
# Ends of a request other than the ways that `WAYS` lists by outcome.
ERRORS: dict[Cause, list[Exception | None]] = {
    Cause.COMPLETION: [],
    Cause.CLIENT: [
        InvalidRequest([FieldViolation("credit.token_count", "must be at least 1, got -1")]),
        RequestImpossible("is too complex to follow", "response_format.lark"),
        CancelledEarly("before its texts were embedded"),
        SiblingEnded(Cause.CLIENT),
    ],
    Cause.LIMIT: [SiblingEnded(Cause.LIMIT)],
    Cause.OPERATOR: [
        CancelledByAdmin("ended"),
        KeyRevokedMidway("revoked"),
        AddressNotAllowed(None),
        SiblingEnded(Cause.OPERATOR),
    ],
    Cause.SERVICE: [
        None,
        EngineFailed("lost"),
        EngineUnavailable("restarting", 1.0),
        SafetyUnavailable("away", 1.0),
        Draining("shutting down"),
        HoldEnded("not renewed"),
        DatabaseUnavailable("away"),
        OSError("disk full"),
        RuntimeError("a bug"),
        SiblingEnded(Cause.SERVICE),
    ],
}
RUNNING = (EndPhase.HELD, EndPhase.PREFILLING, EndPhase.GENERATING, EndPhase.DELIVERING)


def ends_by(cause: Cause) -> list[End]:
    """Return every way to end by a cause."""
    outcomes: list[End] = [
        (outcome, None) for way in WAYS if way.cause is cause for outcome in way.outcomes
    ]
    return [*outcomes, *((None, error) for error in ERRORS[cause])]


def limited(world: HoldWorld, name: str) -> Payer:
    """Create a tenant with a quota of every kind."""
    payer = world.tenant(name)
    for dimension in QuotaDimension:
        world.quota(payer, dimension, LIMIT)
    return payer


def used(world: HoldWorld, payer: Payer) -> dict[str, int]:
    """Return the used amount of each quota; fail if any amount is held."""
    rows = world.rows(
        "SELECT dimension, sum(used)::bigint, sum(held)::bigint FROM quota_counters JOIN quotas q"
        " ON q.id = quota_id WHERE subject_id = %s GROUP BY 1",
        payer.organization_id,
    )
    assert all(held == 0 for _, _, held in rows)
    return {dimension: amount for dimension, amount, _ in rows if amount}


def charged(charge: EndCharge, delivered: int) -> dict[str, int]:
    """Return the expected use of quotas after a request of 10 input tokens, 4 of them cached."""
    sent, received = 10 * charge.bills_input, delivered * charge.bills_output
    picos = charge.bills_input * (6 * 3 + 4 * 1) + received * 7
    of_measure = {
        "concurrent_requests": 0,
        "requests": int(charge.action in (Action.SETTLE, Action.UNCHANGED)),
        "tokens": sent + received,
        "input_tokens": sent,
        "output_tokens": received,
        "cost_picos": picos,
        "prepaid_credit_picos": picos,
    }
    amounts = {str(each): of_measure[each.partition("_per_")[0]] for each in QuotaDimension}
    return {name: amount for name, amount in amounts.items() if amount}


async def end_in(rig: Rig, payer: Payer, phase: EndPhase, end: End, *, extended: bool) -> int:
    """Run a request to a phase and end it there; return its delivered tokens.

    extended: its lease has grown before.
    """
    outcome, error = end
    with contextlib.suppress(type(error) if error is not None else asyncio.InvalidStateError):
        async with rig.admitted(request(payer)) as lease:
            if phase is not EndPhase.HELD:
                lease.usage.input_token_count, lease.usage.cached_input_token_count = 10, 4
            if phase is EndPhase.GENERATING:
                lease.usage.generated_token_count = 25
            if phase is EndPhase.DELIVERING:
                await rig.generate(lease, 25 if extended else 3)
            elif extended:
                await lease.cover(25)
            assert phase_of(lease.usage) is phase
            if error is not None:
                raise error
            lease.outcome = outcome
    return lease.usage.delivered_token_count


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("phase", RUNNING)
async def test_a_request_with_a_hold_is_charged_as_the_table_says(
    world: HoldWorld, tmp_path: Path, phase: EndPhase, cause: Cause
) -> None:
    cell = charge_of(phase, cause)
    extensions = (False,) if phase is EndPhase.HELD else (False, True)
    async with running(world, tmp_path) as rig:
        for number, (end, extended) in enumerate(itertools.product(ends_by(cause), extensions)):
            payer = limited(world, f"t{number}")

            delivered = await end_in(rig, payer, phase, end, extended=extended)

            assert used(world, payer) == charged(cell, delivered), (end, extended)
            [(state, outcome, billed)] = world.rows(
                "SELECT state, outcome, e.input_token_count + billed_token_count FROM holds h LEFT"
                " JOIN usage_events e ON e.hold_id = h.id WHERE h.organization_id = %s",
                payer.organization_id,
            )
            if cell.action is Action.VOID:
                assert (state, outcome, billed) == ("voided", None, None)
            else:
                reported = end[0] or OUTCOMES[cause]
                assert (state, outcome, billed) == (
                    "settled",
                    reported,
                    10 * cell.bills_input + delivered * cell.bills_output,
                )
        assert rig.capacity.taken_count == 0
    check_invariants(world.url, all_ended=True)
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


@pytest.mark.parametrize("cause", Cause)
async def test_no_hold_leaves_no_trace(world: HoldWorld, tmp_path: Path, cause: Cause) -> None:
    payer = limited(world, "acme")
    refused: type[Exception] = QuotaExceeded
    async with running(world, tmp_path) as rig:
        requested = request(payer)
        if cause is Cause.CLIENT:
            other = world.tenant("other")
            async with rig.admitted(
                Admit(new_hold_id(), other, requested.request_id, bytes(32), "demo", 10, 9, 0)
            ):
                pass
            refused = RequestIdReused
            async with rig.admitted(requested) as lease:
                lease.outcome = Outcome.CANCELLED
            requested = Admit(
                new_hold_id(), payer, requested.request_id, bytes(31) + b"x", "demo", 10, 9, 0
            )
        elif cause is Cause.LIMIT:
            world.execute("UPDATE quotas SET limit_value = 9 WHERE dimension = 'tokens_per_day'")
        elif cause is Cause.OPERATOR:
            world.execute("UPDATE api_keys SET revoked_at = now()")
            refused = KeyInvalid
        elif cause is Cause.SERVICE:
            rig.capacity.drain()
            refused = Draining
        before = world.contents()

        if cause is not Cause.COMPLETION:
            with pytest.raises(refused) as caught:
                await rig.admission.admit(requested, UsageSoFar())
            assert cause_of(None, caught.value) is cause

        assert charge_of(EndPhase.BEFORE_HOLD, cause) == EndCharge(Action.NONE)
        assert world.contents() == before


@pytest.mark.parametrize("cause", Cause)
async def test_a_settlement_is_final(world: HoldWorld, tmp_path: Path, cause: Cause) -> None:
    """By any second end: of the process, of the recovery of its journal, of the sweep."""
    payer = limited(world, "acme")
    async with running(world, tmp_path) as rig:
        await end_in(rig, payer, EndPhase.DELIVERING, (Outcome.STOP, None), extended=True)
        hold_id = world.one("SELECT id FROM holds")
        before = world.contents()

        outcome = OUTCOMES[cause]
        settled = Settle(hold_id, 10, 4, 25, 25, outcome, recovered=True)
        again = await world.run(settled, Void(hold_id), Expire(hold_id))
        await sweep_expired_holds(world.url)

        assert charge_of(EndPhase.SETTLED, cause) == EndCharge(Action.UNCHANGED)
        assert not any(isinstance(answer, Exception) for answer in again)
        assert world.contents() == before


def test_the_table_has_every_cell_and_every_cell_names_a_test() -> None:
    assert set(TABLE) == set(itertools.product(EndPhase, Cause))
    assert set(PHASES) == set(EndPhase)
    assert set(CAUSES) == set(Cause)
    for cell in TABLE.values():
        assert Path(cell.test).is_file(), cell.test


def test_only_a_fault_of_the_service_is_free_and_only_before_the_first_token() -> None:
    for (phase, cause), cell in TABLE.items():
        if phase in RUNNING and cell.charge.action is Action.VOID:
            assert cause is Cause.SERVICE or (phase, cause) == (EndPhase.HELD, Cause.COMPLETION)
            assert phase is not EndPhase.DELIVERING
        assert cell.charge.bills_input <= (phase not in (EndPhase.BEFORE_HOLD, EndPhase.HELD))
        assert cell.charge.bills_output == (phase is EndPhase.DELIVERING)


def test_every_outcome_has_one_cause() -> None:
    outcomes = [outcome for way in WAYS for outcome in way.outcomes]

    assert sorted(outcomes) == sorted(Outcome)


def test_every_error_of_an_engine_is_some_way_to_end() -> None:
    """A new error counts as the service's fault until it gets a row; this test demands one."""
    known = tuple(error for way in WAYS for error in way.errors)
    unknown = {
        error.__name__
        for error in CODES_BY_CLASS
        if issubclass(error, EngineError) and not issubclass(error, known)
    }

    assert unknown == {"CheckpointInvalid", "InvariantViolated"}, "they stop an engine"
