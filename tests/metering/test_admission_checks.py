"""Room checks before any work: the answer of an admission, without effects."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from metering.core.errors import KeyInvalid, RequestIdReused, RequestInFlight
from metering.core.models import QuotaDimension
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Admitted, Fits, HoldAnswer
from metering.quotas.quotas import QuotaExceeded
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants


async def requested(holds: HoldConnection, op: Admit) -> HoldAnswer | Exception:
    """Return the answer to a room check."""
    [answer] = await holds.execute([replace(op, only_asks=True)])
    return answer


async def test_asking_takes_nothing_however_often(world: HoldWorld, holds: HoldConnection) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 30)
    world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, 1)
    before = world.contents()
    op = admit(payer)

    assert [await requested(holds, op) for _ in range(3)] == [Fits()] * 3
    assert {
        name: rows for name, rows in world.contents().items() if rows != before[name]
    }.keys() <= {"quota_counters"}
    assert world.counters(quota) in ([], [(0, 0)])
    assert world.hold_count() == 0

    [admitted] = await holds.execute([op])
    assert isinstance(admitted, Admitted), "the only room is still there"
    check_invariants(world.url)


@pytest.mark.parametrize("limit", [0, 29])
async def test_asking_is_refused_alike(world: HoldWorld, holds: HoldConnection, limit: int) -> None:
    payer = world.tenant()
    world.quota(payer, QuotaDimension.TOKENS_PER_MINUTE, limit)
    op = admit(payer, least_tokens=20)

    [refused] = await holds.execute([op])
    answer = await requested(holds, op)

    assert isinstance(refused, QuotaExceeded)
    assert isinstance(answer, QuotaExceeded)
    assert [(s.rule.id, s.used, s.held) for s in answer.failing] == [
        (s.rule.id, s.used, s.held) for s in refused.failing
    ]
    assert answer.requested == refused.requested
    assert answer.retry_helps == refused.retry_helps
    assert answer.retry_after_s > 0
    assert holds.refusals.counts == {
        (QuotaDimension.TOKENS_PER_MINUTE, answer.failing[0].subject): 2
    }


async def test_a_shadow_quota_refuses_no_request(world: HoldWorld, holds: HoldConnection) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 0)
    world.execute("UPDATE quotas SET enforced = false WHERE id = %s", quota)

    assert await requested(holds, admit(payer)) == Fits()
    assert world.one("SELECT coalesce(sum(would_refuse_count), 0)::int FROM quota_counters") == 0


async def test_a_raised_limit_is_in_force_at_once(world: HoldWorld, holds: HoldConnection) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 0)
    assert isinstance(await requested(holds, admit(payer)), QuotaExceeded)
    raised = (
        "UPDATE quotas SET override_limit_value = 100, override_until = now() + interval '1 day',"
        " override_reason = 'r' WHERE id = %s"
    )
    world.execute(raised, quota)

    assert await requested(holds, admit(payer)) == Fits()


async def test_asking_reports_what_admission_does(world: HoldWorld, holds: HoldConnection) -> None:
    payer = world.tenant()
    op = admit(payer)
    await holds.execute([op])

    assert isinstance(await requested(holds, op), RequestInFlight)
    assert isinstance(
        await requested(holds, replace(op, payload_hash=op.payload_hash[:4] + b"x" * 28)),
        RequestIdReused,
    )
    world.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", payer.api_key_id)
    assert isinstance(await requested(holds, admit(payer)), KeyInvalid)


async def test_a_request_that_fits_needs_no_query(world: HoldWorld, holds: HoldConnection) -> None:
    payer = world.tenant()
    world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 90)
    op = admit(payer)
    assert not holds.seems_to_fit(op), "nothing is known of the key yet"

    await holds.execute([op])
    assert holds.seems_to_fit(admit(payer))
    assert not holds.seems_to_fit(admit(payer, input_tokens=61))

    await holds.execute([admit(payer), admit(payer)])
    assert not holds.seems_to_fit(admit(payer))
    await holds.execute([settle(op.hold_id, 1)])
    check_invariants(world.url)
