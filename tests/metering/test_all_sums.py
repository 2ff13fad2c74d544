"""Every sum of usage and money, after whatever has happened, against an oracle that the test keeps.

Random requests, prices, kills, month ends, credit and erasures. Reports, ledger, invoices, FOCUS
files, statements of end users and receipts agree with `oracle.py` to the pico, for each dimension;
documents of closed months keep their bytes.

`WEIR_TEST_SUMS` has the seeds to run, `WEIR_TEST_SUMS_STEPS` the steps of each month.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from metering.core.errors import MeteringError
from metering.core.models import (
    Outcome,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    ServiceTier,
    TokenKind,
)
from metering.export.reconciliation import Stage, conclude, our_month
from metering.holds import hold_cache
from metering.holds.hold_cache import HoldCache
from metering.holds.hold_connection import HoldConnection
from metering.holds.journal import Delivered, UsageJournal
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Extend,
    Extended,
    HoldOperation,
    Renew,
    Settle,
    Settled,
    Void,
)
from metering.holds.recovery import recover_journals, sweep_expired_holds
from metering.invoicing import resale
from metering.invoicing.invoice_document import invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.month_report import to_csv, to_json
from metering.invoicing.resale import (
    Statement,
    statement_page,
)
from metering.ledger.rating import create_partitions, rate_all_pending
from metering.plans.plans import LineKind
from metering.plans.prepaid import grant_credit
from metering.pricing.prices import PriceTerms, get_price, set_price
from metering.pricing.resale_prices import ResaleTerms, set_resale_price
from metering.quotas.quota_admin import set_quota
from metering.quotas.quota_rules import Payer
from metering.receipts.signing import Signer
from metering.reports import usage_reports as reports
from metering.reports.focus import Tags, focus_csv
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.tenants import create_project, find_organization
from metering.tenants.usage_subjects import END_USER, find_usage_subject
from tests.metering.closing_world import ISSUER, ClosingWorld
from tests.metering.hold_world import HoldWorld
from tests.metering.invariants import check_invariants
from tests.metering.oracle import (
    KINDS,
    Key,
    Oracle,
    Person,
    Price,
    Resale,
    Use,
    grouping,
    month_of,
    next_month,
    row_of,
    tokens_of,
    without,
)
from tests.metering.queries import fetch_rows
from tests.metering.receipt_invariants import check_receipts
from tests.metering.test_erasure import erase
from tests.metering.usage import Consumed, Customer, add_usage, new_customer

SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SUMS", "1,2").split(",")]
STEPS = int(os.environ.get("WEIR_TEST_SUMS_STEPS", "20"))
COMPARED = 0.2  # share of the steps after which some sums are compared
BEGINNING = datetime(2028, 1, 30, 21, tzinfo=UTC)  # before a leap day, which is in the second month
MONTHS = (date(2028, 1, 1), date(2028, 2, 1), date(2028, 3, 1))
MODELS = ("demo", "large")
NAMES = ("ann-7d1f", "bob-7d1f", "cy-7d1f", "dée-7d1f")
LABEL_KEYS = ("team", "user")
LABELS: tuple[dict[str, str], ...] = (
    {}, {"team": ""}, {"team": "search"}, {"team": "(not given)"}, {"user": NAMES[0]},
    {"team": NAMES[1], "user": NAMES[1]}, {"team": "search", "user": "=é="},
)  # fmt: skip
ENDS = [Outcome.STOP] * 3 + [each for each in Outcome if each is not Outcome.STOP]
EXPIRY = timedelta(minutes=1)
LISTED = tuple(map(reports.Grouping, ("project", "api_key", "model", "end_user")))
LEDGER = """
    SELECT t.billing_month, e.price_version_id, e.token_kind, sum(e.token_count) AS tokens,
           -sum(e.amount_picos) AS picos
    FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id
    WHERE t.organization_id = :id AND t.kind = 'usage' AND e.token_kind IS NOT NULL
    GROUP BY 1, 2, 3
"""
EVENTS = """
    SELECT part, outcome, price_version_id, cost_picos, settled_at
    FROM usage_events WHERE organization_id = :id
"""


@dataclass(slots=True)
class Live:
    """A running request. `reported` tokens were delivered at the last extension."""

    op: Admit
    customer: Customer
    person: Person | None
    labels: dict[str, str]
    admitted: Admitted
    price: Price
    cached: int
    expires_at: datetime
    delivered: int = 0
    reasoning: int = 0
    taken: tuple[int, int] = (0, 0)
    reported: tuple[int, int] = (0, 0)
    parts: int = 0  # usage events of an expiry

    def use(
        self, counts: tuple[int, int, int, int], outcome: str, at: datetime, **more: Any
    ) -> Use:
        """Return the usage event of these counts of input, cached input, output and reasoning."""
        return Use(
            self.op.hold_id,
            self.parts,
            self.customer.name,
            self.customer.key.project_name,
            self.customer.key.name,
            self.price,
            self.person,
            dict(self.labels),
            self.admitted.admitted_at,
            at,
            tokens_of(*counts, embedding=self.op.embedding),
            outcome,
            **more,
        )


class Process:
    """An api process: connection, journal, and the requests that it runs."""

    def __init__(self, url: str, directory: Path, signer: Signer) -> None:
        self.id = uuid.uuid4()
        self.url, self.signer = url, signer
        self.journal = UsageJournal(directory, self.id)
        self.live: dict[uuid.UUID, Live] = {}
        self.holds = self.connect()

    def connect(self) -> HoldConnection:
        """Return a connection of the process."""
        return HoldConnection(
            self.url, self.id, expiry_s=EXPIRY.total_seconds(), signer=self.signer
        )

    async def execute(self, *operations: HoldOperation) -> list[Any]:
        """Run one batch."""
        return await self.holds.execute(operations)


@dataclass(slots=True)
class Documents:
    """Documents of a closed month, and its statements by end user, as they were at the close."""

    month: tuple[str | bytes, ...]
    statements: dict[Person | None, tuple[Statement, tuple[str | bytes, ...]]]


class Bench:
    """Two customers, some processes, and the oracle that records all acts."""

    def __init__(self, world: HoldWorld, sessions: Sessions, directory: Path, seed: int) -> None:
        self.world, self.sessions, self.directory = world, sessions, directory
        self.random = random.Random(seed)
        self.oracle = Oracle()
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.customers: list[Customer] = []
        self.months: dict[str, ClosingWorld] = {}
        self.processes: list[Process] = []
        self.dead: list[Process] = []
        self.people: dict[tuple[str, str], Person] = {}
        self.documents: dict[tuple[str, date], Documents] = {}
        self.chained_to: dict[str, datetime] = {}  # time of a project's last receipt
        self.story: list[str] = []

    # Setting the scene

    async def begin(self) -> None:
        """Create customers, prices, limits and processes."""
        world = self.world
        world.execute("GRANT USAGE ON SCHEMA clock TO PUBLIC")
        world.execute("GRANT SELECT ON clock.time TO PUBLIC")
        async with self.sessions.begin() as session:
            for name in ("acme", "bolt"):
                first = await new_customer(session, name)
                await create_project(session, organization=name, name="chat", actor="test")
                others = [
                    await create_api_key(
                        session, organization=name, project=project, name=key, actor="test"
                    )
                    for project, key in (("search", "more"), ("chat", "bot"))
                ]
                self.customers += [
                    first, *(Customer(first.organization_id, name, *each) for each in others)
                ]  # fmt: skip
                self.months[name] = ClosingWorld(self.sessions, first)
        await self.price(model="demo", organization="")
        await self.price(model="large", organization="")
        for dimension in (QuotaDimension.COST_PICOS_PER_MONTH, QuotaDimension.TOKENS_PER_DAY):
            async with self.sessions.begin() as session:
                await set_quota(
                    session,
                    subject=QuotaSubject.ORGANIZATION,
                    subject_ref="acme",
                    key=QuotaKey(dimension, for_each="end_user"),
                    terms=QuotaTerms(10**15),
                    actor="test",
                )
        self.processes = [self.process() for _ in range(3)]
        self.world.advance(60)

    def process(self) -> Process:
        """Start an api process."""
        return Process(self.world.url, self.directory, self.signer)

    # Acts

    async def pass_time(self, longest: timedelta) -> None:
        """Advance the clock; living processes renew their holds."""
        by = self.random.choice([1, 1, 20, 20, 3600]) * self.random.random() * longest / 3600
        self.world.set_time(
            self.world.now + timedelta(microseconds=by // timedelta(microseconds=1))
        )
        await self.renew()

    async def renew(self, paused: Process | None = None) -> None:
        """Renew the holds of all processes but one."""
        for each in self.processes:
            if each is not paused:
                await each.execute(Renew(each.id, frozenset(each.live)))
                for live in each.live.values():
                    if not live.parts:
                        live.expires_at = self.world.now + EXPIRY

    def step_back(self) -> None:
        """Set the clock back by up to some minutes."""
        earlier = self.world.now - timedelta(seconds=self.random.randrange(1, 400))
        self.world.set_time(max(earlier, BEGINNING + timedelta(seconds=1)))

    async def price(self, **chosen: Any) -> None:
        """Set a price of a model, on the list or a customer's own."""
        dice, now = self.random, self.world.now
        model = chosen.get("model", dice.choice(MODELS))
        organization = chosen.get("organization", dice.choice(["", "acme"]))
        rates = {f"{kind}_picos_per_token": 2 * dice.randrange(5 * 10**8) for kind in KINDS}
        if dice.random() < 0.5:
            del rates["reasoning_picos_per_token"]
        multiplier = dice.choice([None, 500, 500])
        terms: dict[str, Any] = rates | {"batch_multiplier_milli": multiplier}
        async with self.sessions.begin() as session:
            await set_price(
                session, PriceTerms(model=model, organization=organization, **terms), actor="test"
            )
        for version, tier, milli in self.world.rows(
            "SELECT id, tier, multiplier_milli FROM price_versions WHERE id > %s",
            max((each.version for each in self.oracle.prices), default=self.world.price_version),
        ):
            rates.setdefault("reasoning_picos_per_token", rates["output_picos_per_token"])
            picos = {kind: rates[f"{kind}_picos_per_token"] * milli // 1000 for kind in KINDS}
            self.oracle.prices.append(Price(version, model, organization, tier, now, picos))

    async def resale(self) -> None:
        """Set or withdraw a resale price."""
        dice, now = self.random, self.world.now
        model = dice.choice(["", *MODELS])
        own = {kind: dice.randrange(10**6) for kind in KINDS if dice.random() < 0.2}
        terms: dict[str, Any] = {"model": model, "withdrawn": True}
        markup, request = dice.randrange(5000), dice.choice([0, 123_456])
        if dice.random() < 0.8:
            terms = {"model": model, "markup_milli": markup, "request_picos": request} | {
                f"{kind}_picos_per_token": picos for kind, picos in own.items()
            }
        async with self.sessions.begin() as session:
            owner = await find_organization(session, "acme")
            try:
                made = await set_resale_price(session, owner, ResaleTerms(**terms), actor="test")
            except MeteringError:  # nothing to withdraw, or another price of this instant
                return
        withdrawn = made.withdrawn
        self.oracle.resale.append(
            Resale(made.id, "acme", model, now, withdrawn, markup, request, own)
        )

    async def admit(self) -> None:
        """Admit some requests in one batch."""
        dice = self.random
        process = dice.choice(self.processes)
        admits: list[tuple[Admit, Customer]] = []
        for _ in range(dice.randrange(1, 7)):
            customer = dice.choice(self.customers)
            embedding = dice.random() < 0.2
            op = Admit(
                uuid.uuid4(),
                payer_of(customer),
                uuid.uuid4(),
                b"key:" + bytes(28),
                dice.choice(MODELS),
                dice.randrange(1, 200),
                0 if embedding else dice.randrange(1, 60),
                0 if embedding else 1,
                dict(dice.choice(LABELS)),
                dice.choice([ServiceTier.INTERACTIVE, ServiceTier.BATCH]),
                embedding,
                end_user=dice.choice(["", *NAMES]),
            )
            admits.append((op, customer))
        answers = await process.execute(*(op for op, _ in admits))
        for (op, customer), answer in zip(admits, answers, strict=True):
            assert isinstance(answer, Admitted), answer
            assert answer.admitted_at == self.world.now
            price = self.oracle.price_at(customer.name, op.model, op.tier, self.world.now)
            assert answer.prices.version == price.version
            person = None
            if op.end_user:
                key = customer.name, op.end_user
                person = self.people.setdefault(key, Person(op.end_user))
            cached = (
                0 if op.embedding else dice.choice([0, dice.randrange(op.input_token_count + 1)])
            )
            process.live[op.hold_id] = Live(
                op,
                customer,
                person,
                dict(op.labels),
                answer,
                price,
                cached,
                self.world.now + EXPIRY,
            )

    def some_live(self) -> tuple[Process, Live] | None:
        """Choose a running request."""
        running = [(each, live) for each in self.processes for live in each.live.values()]
        return self.random.choice(running) if running else None

    async def deliver(self) -> None:
        """Deliver tokens of a request, and extend its lease now and then."""
        chosen = self.some_live()
        if chosen is None or chosen[1].op.embedding:
            return
        process, live = chosen
        dice, leased = self.random, live.admitted.leased_token_count
        more = dice.randrange(leased - live.delivered + 1)
        if more:
            live.delivered += more
            live.reasoning += dice.choice([0, dice.randrange(more + 1)])
            counts = live.op.input_token_count, live.cached, live.delivered, live.delivered
            process.journal.record([Delivered(live.op.hold_id, *counts, live.reasoning)])
            if dice.random() < 0.8:
                live.taken = live.delivered, live.reasoning
                process.journal.took(live.op.hold_id, *live.taken)
        if dice.random() < 0.5 and live.taken[0] == live.delivered:
            wanted = dice.randrange(1, 50)
            extension = Extend(live.op.hold_id, live.delivered, live.cached, wanted, live.reasoning)
            [answer] = await process.execute(extension)
            if isinstance(answer, Extended):
                live.admitted.leased_token_count = answer.leased_token_count
                live.reported = live.delivered, live.reasoning
                live.expires_at = self.world.now + EXPIRY
            else:
                assert live.parts or "expired" in str(answer), answer

    async def end(self, chosen: tuple[Process, Live] | None = None) -> None:
        """Settle or void a request; now and then the answer is lost, and it is repeated."""
        chosen = chosen or self.some_live()
        if chosen is None:
            return
        process, live = chosen
        dice, op = self.random, live.op
        del process.live[op.hold_id]
        if not (live.delivered or live.reported[0]) and dice.random() < 0.4:
            [answer] = await process.execute(Void(op.hold_id))
            assert isinstance(answer, Ended)
            return
        outcome = dice.choice(ENDS)
        counts = op.input_token_count, live.cached, live.delivered, live.reasoning
        migrations = dice.choice([0, 0, 0, 2])
        generated = 0 if op.embedding else live.delivered + dice.randrange(3)
        settlement = Settle(
            op.hold_id, *counts[:2], generated, live.delivered, outcome,
            migration_count=migrations, reasoning_token_count=live.reasoning,
            journalled_token_count=live.delivered,
        )  # fmt: skip
        at = self.settled_at(live)
        if dice.random() < 0.2:
            cut = asyncio.create_task(process.execute(settlement))
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            cut.cancel()
            await asyncio.wait([cut])
        [answer] = await process.execute(settlement)
        assert isinstance(answer, Settled), answer
        process.journal.forget(op.hold_id)
        use = self.settled(live, counts, outcome, at, migration_count=migrations)
        assert answer.cost_picos == sum(
            each.cost for each in self.oracle.uses if each.hold_id == op.hold_id
        )
        assert use.labels == live.labels

    def settled_at(self, live: Live) -> datetime:
        """Return when a settlement of now takes place: never before the project's last one."""
        key = str(live.customer.key.project_id)
        self.chained_to[key] = max(self.world.now, self.chained_to.get(key, BEGINNING))
        return self.chained_to[key]

    def settled(
        self,
        live: Live,
        counts: tuple[int, int, int, int],
        outcome: str,
        at: datetime,
        **more: Any,
    ) -> Use:
        """Enter a settlement in the oracle; of an expired hold, what its expiry did not bill."""
        if live.parts and live.reported[0]:
            billed = live.op.input_token_count, live.cached, *live.reported
            sent, cached, output, reasoning = (
                max(now - before, 0) for now, before in zip(counts, billed, strict=True)
            )
            counts = sent, cached, output, reasoning
        use = live.use(counts, outcome, at, **more)
        if live.parts and not live.reported[0]:
            use.part = 0
        self.oracle.uses.append(use)
        return use

    def kill(self) -> None:
        """Kill a process between admission and settlement; another one starts."""
        process = self.random.choice(self.processes)
        self.processes.remove(process)
        os.close(process.journal._fd)  # the files stay, and their lock is released
        self.dead.append(process)
        self.processes.append(self.process())

    async def expire(self) -> None:
        """Let the holds of dead processes, and of one that was paused, expire."""
        paused = self.random.choice([None, *self.processes])
        self.world.advance(EXPIRY.total_seconds() + 1)
        await self.renew(paused)
        await sweep_expired_holds(self.world.url, signer=self.signer)
        for each in [*self.dead, *([paused] if paused else [])]:
            for live in each.live.values():
                if live.parts or live.expires_at > self.world.now:
                    continue
                if live.reported[0]:
                    counts = live.op.input_token_count, live.cached, *live.reported
                    at = self.settled_at(live)
                    self.oracle.uses.append(live.use(counts, "failed", at))
                live.parts = 1

    async def recover(self) -> None:
        """Recover the journals of dead processes."""
        if not self.dead:
            return
        done = await recover_journals(self.directory, self.world.url, signer=self.signer)
        assert done.journal_count == len(self.dead)
        for process in self.dead:
            for live in process.live.values():
                output, reasoning = live.taken
                journalled = live.delivered > 0
                if (live.parts and journalled) or output:
                    sent = (live.op.input_token_count, live.cached) if output else (0, 0)
                    at = self.settled_at(live)
                    self.settled(live, (*sent, output, reasoning), "failed", at)
            await process.holds.close()
        self.dead.clear()

    async def use_late(self) -> None:
        """Enter usage of a closed month, as a transaction that took long over its end does."""
        customer = self.random.choice(self.customers[:3])
        closed = self.oracle.last_closed.get("acme")
        if closed is None:
            return
        at = datetime(closed.year, closed.month, 1, tzinfo=UTC) + timedelta(
            days=self.random.randrange(28), seconds=self.random.randrange(86_400)
        )
        price = self.random.choice(
            [each for each in self.oracle.prices if each.begins <= at] or [None]
        )
        if price is None or price.organization == "bolt":
            return
        name = self.random.choice(["", *NAMES])
        known = self.people.get(("acme", name))
        if name and known is None:
            return
        labels = dict(self.random.choice(LABELS))
        hold_id = uuid.uuid4()
        sent, output = self.random.randrange(100), self.random.randrange(100)
        counts = sent, self.random.randrange(sent + 1), output, self.random.randrange(output + 1)
        async with self.sessions.begin() as session:
            of = await get_price(session, price.version)
            consumed = Consumed(
                *counts[:3], "stop", at, hold_id=hold_id, reasoning_token_count=counts[3]
            )
            found = await find_usage_subject(session, customer.organization_id, END_USER, "", name)
            if found is not None:
                consumed = replace(consumed, end_user_id=found.id)
            await add_usage(session, customer, of, [consumed], labels=labels)
        key = customer.key
        tokens = tokens_of(*counts, embedding=False)
        self.oracle.uses.append(
            Use(
                hold_id, 0, "acme", key.project_name, key.name, price, known, labels, at, at,
                tokens, "stop",
            )
        )  # fmt: skip

    async def adjust(self) -> None:
        """Adjust an amount, grant credit, or refund a part of an invoice."""
        dice, month = self.random, month_of(self.world.now)
        finance = self.months["acme"]
        finance.clock.now = self.world.now
        amount = dice.randrange(1, 10**11)
        if dice.random() < 0.5:
            signed = dice.choice([-1, 1]) * amount
            adjusted = await finance.adjust(signed)
            self.oracle.adjusted["acme", date.fromisoformat(f"{adjusted.billing_month}-01")] += (
                signed
            )
        else:
            last = dice.choice([month, next_month(month)])
            async with self.sessions.begin() as session:
                await grant_credit(
                    session, organization="acme", amount_picos=amount, last_month=last,
                    reason="paid", actor="ann",
                )  # fmt: skip
            self.oracle.grants["acme"].append((month, last, amount))

    async def rate(self) -> None:
        """Post usage to the ledger, and create partitions now and then."""
        if self.random.random() < 0.3:
            async with self.sessions.begin() as session:
                await create_partitions(session)
        await rate_all_pending(self.sessions)
        self.oracle.rate()

    async def erase(self) -> None:
        """Erase an end user of a customer."""
        customer = self.random.choice([self.customers[0], self.customers[0], self.customers[-1]])
        organization, name = customer.name, self.random.choice(NAMES)
        person = self.people.pop((organization, name), None)
        async with self.sessions() as session:
            found = await find_usage_subject(session, customer.organization_id, END_USER, "", name)
        await erase(
            self.sessions, customer.organization_id, name, rows_max=self.random.choice([2, 99])
        )
        self.oracle.erase(organization, person, name, "" if found is None else str(found.id))
        for process in (*self.processes, *self.dead):
            for live in process.live.values():
                if live.customer.name == organization:
                    live.labels = without(live.labels, name)
        for table in ("holds", "usage_events", "usage_subjects"):
            named = f"SELECT FROM {table} t WHERE organization_id = %s AND strpos(t::text, %s) > 0"
            assert self.world.rows(named, customer.organization_id, name) == []

    async def step(self, longest: timedelta) -> None:
        """Do something."""
        acts: dict[str, tuple[int, Callable[[], Any]]] = {
            "admit": (6, self.admit),
            "deliver": (8, self.deliver),
            "end": (8, self.end),
            "price": (1, self.price),
            "resale": (1, self.resale),
            "kill": (2, self.kill),
            "expire": (2, self.expire),
            "recover": (1, self.recover),
            "late": (1, self.use_late),
            "adjust": (1, self.adjust),
            "rate": (2, self.rate),
            "erase": (1, self.erase),
            "step back": (1, self.step_back),
        }
        names = list(acts)
        [name] = self.random.choices(names, [acts[each][0] for each in names])
        self.story.append(f"{self.world.now:%m-%d %H:%M:%S.%f} {name}")
        for _ in range(3 if name in ("deliver", "end") else 1):
            if (done := acts[name][1]()) is not None:
                await done
        if name != "step back":
            await self.pass_time(longest)

    async def close(self, month: date) -> None:
        """Close a month of both customers, with the requests that still run in it or without."""
        for process in self.processes:
            for live in list(process.live.values()):
                if self.random.random() < 0.7:
                    await self.end((process, live))
        for name, finance in self.months.items():
            finance.clock.now = self.world.now
            self.story.append(f"close {name} {month}")
            closing = finance.close(f"{month:%Y-%m}", leave_running=True, before_first=True)
            report = (await closing).report
            self.oracle.rate()
            before = dict(self.oracle.carried_by)
            exact, total = self.oracle.close(name, month)
            assert (report.total_picos, report.total_rounded_picos) == (exact, total)
            for customer in self.customers:
                if customer.name == name:
                    key = str(customer.key.project_id)
                    ends = datetime.combine(next_month(month), datetime.min.time(), UTC)
                    self.chained_to[key] = max(ends, self.chained_to.get(key, BEGINNING))
            found = await self.statements(name, month)
            for person, lines in self.oracle.statements(name, month).items():
                amount = sum(each[2] for each in lines.values())
                self.oracle.carry(name, person, amount)
                assert found[person].carried_in_picos == before.get((name, person), 0)
                assert found[person].carried_out_picos == self.oracle.carried_by[name, person]
            self.documents[name, month] = Documents(
                await self.month_documents(name, month),
                {person: (each, rendered(each)) for person, each in found.items()},
            )

    # Comparisons

    async def compare(self, *, everything: bool = False) -> None:
        """Compare all sums with the oracle, or some of them."""
        dice = self.random
        check_invariants(self.world.url)
        present = month_of(self.world.now)
        months = [each for each in (*MONTHS, next_month(MONTHS[-1])) if each <= present]
        for name in self.months:
            for month in months if everything else [dice.choice(months)]:
                await self.compare_month(name, month)
            await self.compare_reports(name, months, everything=everything)
            await self.compare_ledger(name)
        if everything:
            check_receipts(self.world.url)

    async def compare_month(self, name: str, month: date) -> None:
        """Compare invoice, statements, FOCUS file and reconciliation of a month."""
        oracle, text = self.oracle, f"{month:%Y-%m}"
        report = await self.months[name].report(text)
        lines = {
            (line.late_month, line.price_version, str(line.token_kind)): (
                line.request_count,
                line.token_count,
                line.cancelled_token_count,
                line.amount_picos,
            )
            for line in report.lines
        }
        assert lines == oracle.lines(name, month)
        charged = oracle.charged(name, month)
        assert report.request_counts.total_count == sum(use.part == 0 for use in charged)
        if report.closed is None:
            charges = [
                sum(each.amount_picos for each in report.charges if each.kind is kind)
                for kind in (LineKind.ADJUSTMENT, LineKind.CREDIT)
            ]
            assert tuple(charges) == oracle.charges(name, month)
        found = await self.statements(name, month)
        assert {
            person: {
                (line.late_month, line.model, line.item, line.resale_price_version): (
                    line.quantity,
                    line.cost_picos,
                    line.amount_picos,
                )
                for line in each.lines
            }
            for person, each in found.items()
        } == oracle.statements(name, month)
        assert await self.focus(name, text) == oracle.focus(name, month, LABEL_KEYS)
        async with self.sessions() as session:
            ours = await our_month(session, text)
        pending = [
            use
            for use in oracle.uses
            if use.used_in == month and use.month is None and use.cost >= 0
        ]
        unequal = {each.stage for each in conclude(text, ours).differences}
        assert unequal <= (
            {Stage.RATING} if any(sum(u.tokens.values()) for u in pending) else set()
        )
        if (kept := self.documents.get((name, month))) is not None:
            assert await self.month_documents(name, month) == kept.month
            assert (await self.months[name].verify(text)).differences == ()
            for person, (then, files) in kept.statements.items():
                now = found[person]
                if person is None or person.name == then.end_user.name:
                    assert rendered(now) == files
                else:
                    assert replace(now, end_user=then.end_user) == then
                    assert then.end_user.name not in str(rendered(now)[:2])

    async def compare_reports(self, name: str, months: list[date], *, everything: bool) -> None:
        """Compare reports of months and of ranges of days, by each dimension."""
        dice, oracle = self.random, self.oracle
        first = months[0] + timedelta(days=dice.randrange(29))
        ranges = [
            reports.Days(months[0], months[-1] + timedelta(days=30)),  # everything
            reports.Days(first, first + timedelta(days=6)),  # a week
            reports.Days(first, first),
        ]
        periods: list[date | reports.Days] = [*months, *ranges]
        for period in periods if everything else dice.sample(periods, 2):
            what = reports.UsageFilter(
                period if isinstance(period, reports.Days) else f"{period:%Y-%m}",
                self.months[name].customer.organization_id,
            )
            if isinstance(period, reports.Days):
                begins = period.first
                used = [
                    use
                    for use in oracle.uses
                    if use.organization == name
                    and period.first <= use.settled_at.date() <= period.last
                ]
            else:
                begins, used = period, oracle.charged(name, period)
            dimensions = [each for each in reports.Grouping if each is not reports.Grouping.REQUEST]
            alone = dimensions if everything else dice.sample(dimensions, 2)
            for by in (*((each,) for each in alone), tuple(dice.sample(dimensions, 3))):
                await self.compare_groups(what, by, used, begins)
            requests = await self.rows(what, reports.Groups((reports.Grouping.REQUEST,)))
            assert Counter(
                (
                    row.settled_at,
                    row.outcome,
                    *(value_of(row, each) for each in LISTED),
                    row_key(row),
                )
                for row in requests
            ) == Counter(
                (use.settled_at, use.outcome, *key, row_of([use], begins))
                for key, uses in grouped(used, LISTED, "").items()
                for use in uses
            )
            async with self.sessions() as session:
                total = await reports.usage_total(session, what)
                assert row_key(total) == row_of(used, begins)
            await self.compare_filter(what, used, begins)

    async def compare_filter(
        self, what: reports.UsageFilter, used: list[Use], begins: date
    ) -> None:
        """Compare what a key sees, of one end user or label."""
        customer = self.random.choice(
            [each for each in self.customers if each.organization_id == what.organization_id]
        )
        people = dict.fromkeys(use.person for use in used if use.person)
        person = self.random.choice([None, *people])
        labels = self.random.choice(LABELS)
        of_project = self.random.random() < 0.3
        chosen = [
            use
            for use in used
            if use.project == customer.key.project_name
            and (of_project or use.key == customer.key.name)
            and (person is None or use.person is person)
            and labels.items() <= use.labels.items()
        ]
        async with self.sessions() as session:
            if person is not None:
                found = (
                    await reports.find_end_user_id(session, customer.organization_id, person.name)
                    if person.name
                    else uuid.UUID(person.id)
                )
                what = replace(what, end_user_id=found)
            key_id = None if of_project else customer.key.id
            project_id = customer.key.project_id
            what = replace(what, project_id=project_id, api_key_id=key_id, labels=labels)
            own = await reports.own_usage(session, what, reports.Groups(()))
        assert row_key(own.total) == row_of(chosen, begins)
        assert {(row.day, row.model): row_key(row) for row in own.rows} == {
            key: row_of(uses, begins) for key, uses in grouped(chosen, ("day", "model"), "").items()
        }

    async def compare_groups(
        self,
        what: reports.UsageFilter,
        by: tuple[reports.Grouping, ...],
        used: list[Use],
        begins: date,
    ) -> None:
        """Compare the rows of a grouping, read in pages."""
        label_key = self.random.choice([*LABEL_KEYS, "absent"])
        groups = reports.Groups(
            by,
            label_key if reports.Grouping.LABEL in by else "",
            largest_first=self.random.random() < 0.3,
        )
        rows = await self.rows(what, groups)
        if groups.largest_first:
            costs = [row.cost_picos for row in rows]
            assert costs == sorted(costs, reverse=True)
        expected = grouped(used, by, label_key)
        found = {values_of(row, by): row_key(row) for row in rows}
        assert len(found) == len(rows)
        assert found == {key: row_of(uses, begins) for key, uses in expected.items()}, (
            what,
            groups,
        )

    async def compare_ledger(self, name: str) -> None:
        """Compare the ledger by month of bill, price and kind, and the cost of all receipts."""
        of = {"id": self.months[name].customer.organization_id}
        posted: dict[Key, tuple[int, int]] = {}
        for use in self.oracle.uses:
            if use.organization == name and use.month is not None:
                for kind in KINDS:
                    if use.tokens[kind]:
                        key = use.month, use.price.version, kind
                        tokens, picos = posted.get(key, (0, 0))
                        posted[key] = tokens + use.tokens[kind], picos + use.cost_of(kind)
        rows = await fetch_rows(self.sessions, LEDGER, of)
        assert {tuple(row[:3]): (int(row[3]), int(row[4])) for row in rows} == posted
        events = Counter(tuple(row) for row in await fetch_rows(self.sessions, EVENTS, of))
        expected = Counter(
            (use.part, use.outcome, use.price.version, use.cost, use.settled_at)
            for use in self.oracle.uses
            if use.organization == name
        )
        assert sorted((events - expected).items(), key=str) == sorted(
            (expected - events).items(), key=str
        )

    # Reading

    async def rows(
        self, what: reports.UsageFilter, groups: reports.Groups
    ) -> list[reports.UsageRow]:
        """Read all rows of a report, in pages."""
        rows: list[reports.UsageRow] = []
        token, size = "", self.random.choice([1, 7, 1000])
        async with self.sessions() as session:
            while True:
                page = await reports.usage_page(session, what, groups, page_size=size, token=token)
                rows += page.rows
                if not (token := page.next_token):
                    return rows

    async def statements(self, name: str, month: date) -> dict[Person | None, Statement]:
        """Read all statements of a month, by end user."""
        found: list[Statement] = []
        token, size = "", self.random.choice([1, 2, 100])
        async with self.sessions() as session:
            owner = await find_organization(session, name)
            while True:
                page, token = await statement_page(
                    session, owner, f"{month:%Y-%m}", page_size=size, page_token=token
                )
                found += page
                if not token:
                    break
        people = {
            use.person.shown: use.person
            for use in self.oracle.uses
            if use.organization == name and use.person
        }
        by_person = {
            None if each.end_user.id is None else people[each.end_user.shown]: each
            for each in found
        }
        assert len(by_person) == len(found)
        return by_person

    async def month_documents(self, name: str, month: date) -> tuple[str | bytes, ...]:
        """Return JSON, CSV, FOCUS file without tags and PDF of a month."""
        report = await self.months[name].report(f"{month:%Y-%m}")
        async with self.sessions() as session:
            focus = "".join([piece async for piece in focus_csv(session, report, ISSUER.name)])
        return to_json(report), to_csv(report), focus, render_pdf(invoice_document(report, ISSUER))

    async def focus(self, name: str, month: str) -> dict[Key, tuple[int, int, int]]:
        """Return cost and tokens of the usage in a FOCUS file; its sum is that of the bill."""
        report = await self.months[name].report(month)
        async with self.sessions() as session:
            pieces = focus_csv(session, report, ISSUER.name, Tags(LABEL_KEYS, end_user=True))
            rows = list(csv.DictReader(io.StringIO("".join([piece async for piece in pieces]))))
        billed = sum(map(picos_of, (row["BilledCost"] for row in rows)))
        owed = report.total_rounded_picos if report.closed else report.total_picos
        assert billed == owed or not (report.closed and report.closed.invoice_number)
        found: dict[Key, tuple[int, int, int]] = {}
        for row in rows:
            if row["ChargeCategory"] == "Usage":
                day = date.fromisoformat(row["ChargePeriodStart"][:10])
                tags = row["Tags"] and json.dumps(json.loads(row["Tags"]), sort_keys=True)
                key = day, row["ResourceName"], int(row["x_PriceVersion"]), row["x_TokenKind"], tags
                assert key not in found
                counts = int(row["ConsumedQuantity"]), int(row["x_CancelledTokenCount"])
                found[key] = picos_of(row["BilledCost"]), *counts
        return found


def payer_of(customer: Customer) -> Payer:
    """Return the payer of a customer's key."""
    return Payer(customer.organization_id, customer.key.project_id, customer.key.id, "USD")


def picos_of(text: str) -> int:
    """Return an exact amount in picos."""
    return int(Decimal(text) * 10**12)


def rendered(statement: Statement) -> tuple[str | bytes, ...]:
    """Return JSON and CSV of a statement."""
    return resale.to_json(statement), resale.to_csv(statement)


def grouped(uses: Iterable[Use], by: Iterable[str], label_key: str) -> dict[Key, list[Use]]:
    """Group uses."""
    keys = [grouping(each, label_key) for each in by]
    groups: dict[Key, list[Use]] = defaultdict(list)
    for use in uses:
        groups[tuple(key(use) for key in keys)].append(use)
    return groups


def value_of(row: reports.UsageRow, by: reports.Grouping) -> Hashable:
    """Return the key of a row in a grouping, as the oracle have it."""
    if by is reports.Grouping.END_USER:
        return row.end_user or (row.end_user_id and str(row.end_user_id))
    names = {
        reports.Grouping.LABEL: "label_value",
        reports.Grouping.ORGANIZATION: "organization_name",
        reports.Grouping.PROJECT: "project_name",
        reports.Grouping.API_KEY: "api_key_name",
    }
    value: Hashable = getattr(row, names.get(by, by))
    return value


def values_of(row: reports.UsageRow, by: Iterable[reports.Grouping]) -> Key:
    """Return the keys of a row in groupings."""
    return tuple(value_of(row, each) for each in by)


def row_key(row: reports.UsageRow) -> Key:
    """Return the fields of a row, as `row_of` does."""
    facts = row.request_count, row.migration_count, row.amount_picos, row.pending_picos
    shares = [
        (each.request_count, each.token_count, each.amount_picos)
        for each in (row.cancelled, row.limited, row.failed)
    ]
    return (tuple(row.token_counts[TokenKind(kind)] for kind in KINDS), facts, *shares, row.late)


@pytest.fixture
async def bench(
    request: pytest.FixtureRequest,
    world: HoldWorld,
    application: Sessions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Bench]:
    """Yield a world with its customers, in a database with another time zone than UTC."""
    database = world.one("SELECT quote_ident(current_database())")
    world.execute(f"ALTER DATABASE {database} SET TimeZone = 'Asia/Kathmandu'")
    # Caches estimate the database's time, which stands still between two acts.
    clock = partial(HoldCache, clock=lambda: world.now.timestamp())
    monkeypatch.setattr(hold_cache, "HoldCache", clock)
    bench = Bench(world, application, tmp_path, request.param)
    world.set_time(BEGINNING)
    try:
        await bench.begin()
        yield bench
    finally:
        for process in (*bench.processes, *bench.dead):
            await process.holds.close()
        for process in bench.processes:
            process.journal.close()


@pytest.mark.parametrize("bench", SEEDS, indirect=True)
async def test_every_sum_is_that_of_the_oracle(bench: Bench) -> None:
    try:
        for month in MONTHS:
            ends = datetime.combine(next_month(month), datetime.min.time(), UTC)
            for left in range(STEPS, 0, -1):
                await bench.step(max((ends - bench.world.now) / left, timedelta(seconds=2)))
                if bench.random.random() < COMPARED:
                    await bench.compare()
            bench.world.set_time(max(bench.world.now, ends + timedelta(hours=1)))
            await bench.renew()
            await bench.close(month)
            await bench.compare()
        await bench.expire()
        await bench.recover()
        for process in bench.processes:
            for live in list(process.live.values()):
                await bench.end((process, live))
        await bench.rate()
        await bench.erase()
        await bench.compare(everything=True)
        check_invariants(bench.world.url, all_ended=True)
    except BaseException:
        print(*bench.story, sep="\n")
        raise
