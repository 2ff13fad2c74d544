"""Scenarios of holds as text tables: one row per operation, the expected answer in the last column.

    clock 2026-11-20 12:00:30              ok
    quota alice tokens_per_minute 100      ok
    admit alice r1 10+20                   leased 20
    extend r1 15 20                        leased 40
    settle r1 25                           used 10+25 cost 205
    counter alice tokens_per_minute        35/0

`admit` takes input + first slice and optionally the minimum slice (`10+20>5`); `extend` takes the
delivered and the requested tokens, `settle` the delivered ones, each with `~n` cached input tokens
if there are any. `counter` prints used/held of each window, the oldest first. Each operation is a
separate batch; operations joined by `&` are one. All invariants are checked after each row.

Each table is played twice, with equal answers: by processes with caches, and by ones that start
anew for each batch. So it covers both paths of a batch.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import assert_never

from metering.core.errors import MeteringError
from metering.core.models import Outcome, QuotaDimension
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    Extended,
    Fits,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    RequestSettled,
    Settle,
    Settled,
    Void,
)
from metering.quotas.quota_rules import Payer
from metering.quotas.quotas import QuotaExceeded
from tests.metering.hold_world import MODEL, HoldWorld
from tests.metering.invariants import check_invariants

# Plays a table in the world of the test.
Play = Callable[[str], Awaitable["Scenario"]]


@dataclass(slots=True)
class Request:
    """Request of a scenario: its latest hold."""

    op: Admit
    process_id: uuid.UUID


@dataclass(slots=True)
class Scenario:
    """Objects behind the names of a table. remembering: connections of owners."""

    world: HoldWorld
    remembering: dict[str, HoldConnection] | None = None
    payers: dict[str, Payer] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    owners: dict[str, uuid.UUID] = field(default_factory=dict)
    quotas: dict[tuple[str, str], uuid.UUID] = field(default_factory=dict)
    owner: str = "server"

    def payer(self, name: str) -> Payer:
        """Return the tenant of a name; create it on first use."""
        if name not in self.payers:
            self.payers[name] = self.world.tenant(
                name if self.remembering is None else f"{name}-remembered"
            )
        return self.payers[name]

    @property
    def process_id(self) -> uuid.UUID:
        """Id of the acting process."""
        return self.owners.setdefault(self.owner, uuid.uuid4())

    async def act(self, words: list[str]) -> str:
        """Run one row; return its answer."""
        match words:
            case ["clock", day, time]:
                self.world.set_time(datetime.fromisoformat(f"{day}T{time}").replace(tzinfo=UTC))
                return "ok"
            case ["owner", name]:
                self.owner = name
                return "ok"
            case ["quota", name, dimension, limit]:
                quota_id = self.world.quota(self.payer(name), QuotaDimension(dimension), int(limit))
                self.quotas[name, dimension] = quota_id
                return "ok"
            case ["limit", name, dimension, limit]:
                self.world.execute(
                    "UPDATE quotas SET limit_value = %s WHERE id = %s",
                    int(limit),
                    self.quotas[name, dimension],
                )
                return "ok"
            case ["drop", name, dimension]:
                self.world.execute(
                    "UPDATE quotas SET deleted_at = now() WHERE id = %s",
                    self.quotas[name, dimension],
                )
                return "ok"
            case ["counter", name, dimension]:
                return (
                    " ".join(
                        f"{used}/{held}"
                        for used, held in self.world.counters(self.quotas[name, dimension])
                    )
                    or "none"
                )
            case ["state", request]:
                hold_id = self.requests[request].op.hold_id
                return str(self.world.one("SELECT state FROM holds WHERE id = %s", hold_id))
            case ["events", request]:
                hold_id = self.requests[request].op.hold_id
                query = (
                    "SELECT input_token_count, delivered_token_count FROM usage_events WHERE"
                    " hold_id = %s ORDER BY part"
                )
                return (
                    " ".join(
                        f"{sent}+{delivered}" for sent, delivered in self.world.rows(query, hold_id)
                    )
                    or "none"
                )
            case _:
                operations = [self.operation(part.split()) for part in " ".join(words).split(" & ")]
                return " & ".join(map(reported, await self.execute(operations)))

    async def execute(self, operations: list[HoldOperation]) -> list[HoldAnswer | Exception]:
        """Run one batch of the acting process."""
        if self.remembering is None:
            return await self.world.run(*operations, process_id=self.process_id)
        if self.owner not in self.remembering:
            self.remembering[self.owner] = HoldConnection(self.world.url, self.process_id)
        return await self.remembering[self.owner].execute(operations)

    def operation(self, words: list[str]) -> HoldOperation:
        """Return the operation of a row."""
        match words:
            case ["admit", name, request, amount, *payload]:
                sent, wanted, least = numbers(r"(\d+)\+(\d+)(?:>(\d+))?", amount)
                known = self.requests.get(request)
                op = Admit(
                    hold_id=uuid.uuid4(),
                    payer=self.payer(name),
                    request_id=known.op.request_id if known else uuid.uuid4(),
                    payload_hash=b"key:" + " ".join(payload).encode().ljust(28, b"."),
                    model=MODEL,
                    input_token_count=sent,
                    first_slice_token_count=wanted,
                    least_slice_token_count=least or 1,
                )
                if known is None or self.world.one(
                    "SELECT count(*) FROM holds WHERE id = %s AND state = 'voided'",
                    known.op.hold_id,
                ):
                    self.requests[request] = Request(op, self.process_id)
                return op
            case ["extend", request, amount, wanted]:
                delivered, cached = numbers(r"(\d+)(?:~(\d+))?", amount)
                return Extend(self.requests[request].op.hold_id, delivered, cached, int(wanted))
            case ["settle", request, amount, *recovered]:
                delivered, cached = numbers(r"(\d+)(?:~(\d+))?", amount)
                op = self.requests[request].op
                return Settle(
                    op.hold_id,
                    op.input_token_count,
                    cached,
                    delivered,
                    delivered,
                    Outcome.STOP,
                    recovered=bool(recovered),
                )
            case ["void", request]:
                return Void(self.requests[request].op.hold_id)
            case ["expire", request]:
                return Expire(self.requests[request].op.hold_id)
            case ["renew", owner, *requests]:
                return Renew(
                    self.owners[owner],
                    frozenset(self.requests[request].op.hold_id for request in requests),
                )
            case _:
                raise AssertionError(f"no such act: {words}")


def numbers(form: str, text: str) -> tuple[int, ...]:
    """Return the groups of a pattern; 0 for missing ones."""
    match = re.fullmatch(form, text)
    assert match is not None, text
    return tuple(int(group or 0) for group in match.groups())


def reported(answer: HoldAnswer | Exception) -> str:
    """Return an answer in a table's notation."""
    match answer:
        case Admitted() | Extended():
            return f"leased {answer.leased_token_count}"
        case Settled():
            return used(answer)
        case Ended():
            return "done" if answer.done else "nothing"
        case Renewed():
            return "done"
        case Fits():
            return "fits"
        case QuotaExceeded():
            return f"refused {' '.join(sorted(state.dimension for state in answer.failing))}"
        case RequestSettled():
            return f"request_settled {used(answer.settled)}"
        case MeteringError():
            return answer.reason.lower()
        case Exception():
            raise answer
        case _:
            assert_never(answer)


def used(settled: Settled) -> str:
    """Return usage in a table's notation."""
    cached = f"~{settled.cached_input_token_count}" if settled.cached_input_token_count else ""
    return (
        f"used {settled.input_token_count}{cached}+{settled.delivered_token_count} cost"
        f" {settled.cost_picos}"
    )


async def run(world: HoldWorld, table: str) -> Scenario:
    """Run a table with caches and without; return the second scenario."""
    begins = world.now
    remembering: dict[str, HoldConnection] = {}
    await play(Scenario(world, remembering), table, each_row=False)
    for connection in remembering.values():
        await connection.close()
    world.set_time(begins)
    scenario = Scenario(world)
    await play(scenario, table, each_row=True)
    return scenario


async def play(scenario: Scenario, table: str, *, each_row: bool) -> None:
    """Run every row of a table. each_row: check the invariants after each."""
    for line in filter(None, map(str.strip, table.splitlines())):
        act, expected = re.split(r"\s{2,}", line, maxsplit=1)
        answer = await scenario.act(act.split())
        assert answer == expected, f"{line}\n    answered: {answer}"
        if each_row:
            check_invariants(scenario.world.url)
    check_invariants(scenario.world.url)
