"""Embedded tokens from admission to invoice: a separate kind with its price."""

from __future__ import annotations

import io
import uuid
from datetime import UTC, date, datetime
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pypdf import PdfReader

from metering.core.errors import InvariantViolated
from metering.core.models import QuotaDimension, TokenKind
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.export_settings import StripeSettings
from metering.export.reconciliation import our_month, stripe_counts
from metering.export.stripe_gateway import StripeGateway
from metering.export.stripe_sync import Sync
from metering.holds.hold_connection import HoldConnection
from metering.holds.journal import Delivered, UsageJournal
from metering.holds.operations import Admitted, Expire, Extend, Settled
from metering.holds.recovery import Recovered, recover_journals
from metering.invoicing.invoice_document import Issuer, invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.month_report import to_csv, to_json
from metering.ledger.rating import rate_all_pending
from metering.plans.plans import Allowance, PlanRules, Selector
from metering.plans.simulation import simulate
from metering.proof.check import Moment
from metering.quotas.quotas import QuotaExceeded
from metering.receipts.signing import Signer
from metering.reports.focus import focus_csv
from metering.reports.usage_reports import Grouping, Groups, UsageFilter, usage_page
from metering.store.db import Sessions
from tests.metering.closing_world import ClosingWorld
from tests.metering.exported_usage import check_delivered, hours_ago
from tests.metering.focus_rules import broken_rules, read
from tests.metering.hold_world import EMBEDDING_PICOS, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_export, check_invariants
from tests.metering.planted_faults import faults, unseen
from tests.metering.queries import fetch_column
from tests.metering.receipt_reading import decode
from tests.metering.usage import Acme, Consumed, Customer, new_price
from tests.stripe_double.server import KEY, stripe_double

OCTOBER = datetime(2025, 10, 10, 12, tzinfo=UTC)
# Counts of each quota for a request with 12 tokens.
REQUESTS = [each for each in QuotaDimension if each.startswith("requests_per_")]
WEIGHTS = {
    each: 12 * EMBEDDING_PICOS if "picos" in each else 0 if "output" in each else 12
    for each in QuotaDimension
}


async def test_an_embedding_counts_as_input_and_settles_as_embedded(world: HoldWorld) -> None:
    payer = world.tenant()
    quotas = {dimension: world.quota(payer, dimension, 10_000) for dimension in QuotaDimension}
    op = admit(payer, input_tokens=12, embedding=True)

    [admitted] = await world.run(op)
    held = {
        dimension: (world.counters(quota_id) or [(0, 0)])[0][1]
        for dimension, quota_id in quotas.items()
    }
    [settled] = await world.run(
        settle(op.hold_id, 0, input_tokens=12), signer=Signer(Ed25519PrivateKey.generate())
    )
    used = {
        dimension: (world.counters(quota_id) or [(0, 0)])[0][0]
        for dimension, quota_id in quotas.items()
    }

    assert isinstance(admitted, Admitted)
    assert admitted.leased_token_count == 0
    assert held == WEIGHTS | {
        QuotaDimension.CONCURRENT_REQUESTS: 1,
        **dict.fromkeys(REQUESTS, 0),
    }
    assert used == WEIGHTS | {
        QuotaDimension.CONCURRENT_REQUESTS: 0,
        **dict.fromkeys(REQUESTS, 1),
    }
    assert settled == Settled(op.hold_id, 0, 0, 0, 0, 0, 12 * EMBEDDING_PICOS, "USD", "stop", 12)
    [receipt] = settled.receipts
    assert decode(receipt.encoded).embedding_token_count == 12
    assert decode(receipt.encoded).input_token_count == 0
    check_invariants(world.url, all_ended=True)


async def test_embeddings_have_their_own_price_and_meet_the_limit(world: HoldWorld) -> None:
    """On one connection, so that the second of each kind is admitted from the cache."""
    payer = world.tenant()
    money = world.quota(
        payer, QuotaDimension.COST_PICOS_PER_DAY, 2 * 12 * EMBEDDING_PICOS + 2 * (10 * 3 + 20 * 7)
    )
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        for embedding in (True, False):
            for _ in range(2):
                assert of_type(
                    Admitted,
                    await holds.execute(
                        [admit(payer, input_tokens=12 if embedding else 10, embedding=embedding)]
                    ),
                )
        [refused] = await holds.execute([admit(payer, input_tokens=1, embedding=True)])

    assert isinstance(refused, QuotaExceeded)
    assert world.counters(money) == [(0, 2 * 12 * EMBEDDING_PICOS + 2 * (10 * 3 + 20 * 7))]
    check_invariants(world.url)


async def test_an_embedding_has_no_output(world: HoldWorld) -> None:
    payer = world.tenant()
    op, wrong = admit(payer, embedding=True), admit(payer)
    msgspec.structs.force_setattr(wrong, "embedding", True)

    [refused] = await world.run(wrong)
    await world.run(op)
    [extended] = await world.run(Extend(op.hold_id, 0, 0, 5))
    [delivered] = await world.run(settle(op.hold_id, 1))

    assert isinstance(refused, InvariantViolated)
    assert isinstance(extended, InvariantViolated)
    assert isinstance(delivered, InvariantViolated)
    check_invariants(world.url)


@pytest.mark.parametrize("expired", [False, True])
async def test_vectors_of_a_process_that_died_before_their_settlement_are_free(
    world: HoldWorld, tmp_path: Path, *, expired: bool
) -> None:
    """The answer follows the settlement. An expired hold also gives its quotas back."""
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.TOKENS_PER_DAY, 100)
    embedded, waiting = admit(payer, input_tokens=12, embedding=True), admit(payer, embedding=True)
    journal = UsageJournal(tmp_path, uuid.uuid4())
    await world.run(embedded, waiting, process_id=journal.process_id)
    journal.record([Delivered(embedded.hold_id, 12, 0, 0, 0)])  # as earlier versions wrote
    journal.close()
    if expired:
        world.advance(120)
        await world.run(Expire(embedded.hold_id))

    done = await recover_journals(tmp_path, world.url)

    assert done == Recovered(1, int(expired), 0)
    assert world.rows(
        "SELECT embedding_token_count, input_token_count, cost_picos, recovered FROM usage_events"
    ) == [(0, 0, 0, True)] * int(expired)
    assert world.counters(quota_id) == [(0, 0)]
    check_invariants(world.url, all_ended=True)


FAULTS = faults("""
    by its price version                      | UPDATE usage_events SET embedding_token_count =
                                              | embedding_token_count + 1
    11 input tokens in usage events           | UPDATE usage_events SET embedding_token_count = 11,
                                              | cost_picos = 22
    0 embedding tokens of 12 in an embedding  | UPDATE usage_events SET embedding_token_count = 0,
                                              | input_token_count = 12, cost_picos = 36
    receipt-matches-usage                     | UPDATE usage_events SET embedding_token_count = 0,
                                              | input_token_count = 12
    12 embedding tokens of 12 in a completion | UPDATE holds SET embedding = false
    counters-equal-holds                      | UPDATE holds SET embedding = false
    counters-equal-holds                      | UPDATE price_versions SET embedding_picos_per_token
                                              | = 3
    but holds used                            | UPDATE quota_counters SET used = used + 12 WHERE
                                              | used = 24
""")
LEDGER_FAULTS = faults("""
    0 tokens for 0 picos posted | UPDATE ledger_entries SET token_kind = 'input' WHERE token_kind =
                                | 'embedding'
    usage-equals-ledger         | UPDATE ledger_entries SET token_count = token_count + 1 WHERE
                                | token_kind = 'embedding'
    nothing-is-exported-twice   | UPDATE meter_batches SET token_kind = 'input' WHERE token_kind =
                                | 'embedding'
    exports only 0              | DELETE FROM meter_batches WHERE token_kind = 'embedding'
""")


async def test_planted_faults_of_embeddings_are_seen(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    for dimension in QuotaDimension:
        world.quota(payer, dimension, 10_000)
    op, live = (admit(payer, input_tokens=12, embedding=True) for _ in range(2))
    await world.run(op, live)
    await world.run(
        settle(op.hold_id, 0, input_tokens=12), signer=Signer(Ed25519PrivateKey.generate())
    )
    check_invariants(world.url)
    assert unseen(world.url, FAULTS, Moment.ALWAYS) == []

    await rate_all_pending(sessions)
    world.advance(7200)
    await form_batches(sessions)
    assert unseen(world.url, LEDGER_FAULTS, *Moment) == []


async def test_no_event_mixes_kinds_and_no_hold_to_embed_has_a_lease(world: HoldWorld) -> None:
    payer = world.tenant()
    op = admit(payer, embedding=True)
    await world.run(op)
    await world.run(settle(op.hold_id, 0))

    for change in (
        "embedding_token_count = -1",
        "input_token_count = 1",
        "generated_token_count = 1",
    ):
        with pytest.raises(Exception, match=r"embedding_alone|append-only"):
            world.execute(f"UPDATE usage_events SET {change}")
    with pytest.raises(Exception, match="append-only"):
        world.execute(
            "UPDATE usage_events SET embedding_token_count = embedding_token_count + 1, rated_at ="
            " now()"
        )
    with pytest.raises(Exception, match="embedding_without_output"):
        world.execute(
            "ALTER TABLE holds DISABLE TRIGGER USER; UPDATE holds SET leased_token_count = 1"
        )


async def test_a_month_with_embeddings_is_closed_and_shown_in_every_document(
    sessions: Sessions, customer: Customer
) -> None:
    world = ClosingWorld(sessions, customer)
    price = await world.price(datetime(2025, 1, 1, tzinfo=UTC), embedding_picos=20_000)
    free = PlanRules(allowances=(Allowance(Selector(token_kind=TokenKind.EMBEDDING), 400_000),))
    await world.plan("starter", date(2025, 10, 1), free)
    await world.use(price, Consumed(1_000, 0, 500, "stop", OCTOBER))
    await world.use(
        price, *(Consumed(settled_at=OCTOBER, embedding_token_count=500_000) for _ in range(2))
    )
    await world.use(price, Consumed(0, 0, 0, "cancelled", OCTOBER, embedding_token_count=7))

    await world.close("2025-10")
    report = await world.report("2025-10")
    async with sessions() as session:
        page = await usage_page(
            session, UsageFilter("2025-10", customer.organization_id), Groups((Grouping.MODEL,))
        )
        focus = "".join(
            [piece async for piece in focus_csv(session, report, "Weir Operations GmbH")]
        )
        [simulated] = await simulate(session, month="2025-10")
    pdf = PdfReader(
        io.BytesIO(render_pdf(invoice_document(report, Issuer("Weir Operations GmbH"))))
    )

    line = report.lines[-1]
    assert line.token_kind == TokenKind.EMBEDDING
    assert line.token_count == 1_000_007
    assert line.request_count == 3
    assert line.cancelled_token_count == 7
    assert line.amount_picos == 1_000_007 * 20_000
    assert [(charge.token_kind, charge.amount_picos) for charge in report.charges] == [
        (TokenKind.EMBEDDING, -400_000 * 20_000)
    ]
    assert (
        report.total_picos
        == 1_000 * 150_000 + 500 * 600_000 + 600_007 * 20_000
        == simulated.new_picos
    )
    assert report.reconciliation.balanced
    assert page.rows[0].token_counts[TokenKind.EMBEDDING] == 1_000_007
    assert (await world.verify("2025-10")).differences == ()
    assert '"token_kind": "embedding"' in to_json(report)
    assert ",embedding," in to_csv(report)
    assert broken_rules(focus) == []
    assert {row["SkuMeter"] for row in read(focus)} >= {"Embedding Tokens"}
    assert "embedding tokens" in " ".join(page.extract_text() for page in pdf.pages)


async def test_a_month_without_embeddings_says_nothing_of_them(
    sessions: Sessions, customer: Customer
) -> None:
    """Reports closed before embeddings existed stay unchanged."""
    world = ClosingWorld(sessions, customer)
    price = await world.price(datetime(2025, 1, 1, tzinfo=UTC), embedding_picos=20_000)
    await world.use(price, Consumed(1_000, 10, 500, "stop", OCTOBER))

    report = (await world.close("2025-10")).report

    assert [line.token_kind for line in report.lines] == [
        TokenKind.INPUT,
        TokenKind.CACHED_INPUT,
        TokenKind.OUTPUT,
    ]
    assert "embed" not in to_json(report) + to_csv(report)


async def test_embedded_tokens_have_a_meter_of_their_own_at_stripe(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        price = await new_price(session, embedding_picos_per_token=20_000)
    with stripe_double() as double:
        gateway = StripeGateway(StripeSettings(KEY, api_base=double.url))
        created = await Sync(sessions, gateway, False).run()
        acme = Acme(sessions, customer, price)
        await acme.use_and_rate(Consumed(settled_at=hours_ago(3), embedding_token_count=700))
        await form_batches(sessions)
        await deliver_pending(sessions, gateway)
        async with sessions() as session:
            ours = await our_month(session, f"{hours_ago(3):%Y-%m}")
        [row], [count] = ours.sums, await stripe_counts(sessions, gateway, ours)
        check_delivered(database_url, double.account)

    assert (
        f"price weir_{price.prices.version}_embedding: 0.000002 USD minor units per token"
        in created
    )
    assert (row.token_kind, row.due, count) == ("embedding", 700, 700)
    check_export(database_url)


async def test_a_model_that_embeds_for_nothing_takes_no_part_in_a_subscription_until_it_does(
    sessions: Sessions, customer: Customer
) -> None:
    async with sessions.begin() as session:
        price = await new_price(session)
    with stripe_double() as double:
        gateway = StripeGateway(StripeSettings(KEY, api_base=double.url))
        first = await Sync(sessions, gateway, False).run()
        acme = Acme(sessions, customer, price)
        await acme.use_and_rate(Consumed(settled_at=hours_ago(3), embedding_token_count=700))
        await form_batches(sessions)
        second = await Sync(sessions, gateway, False).run()

    assert not [each for each in first if "embedding" in each]
    assert [each for each in second if each.startswith("meter")] == [
        f"meter weir_{price.prices.version}_embedding"
    ]
    assert await fetch_column(sessions, "SELECT token_kind FROM meter_batches") == ["embedding"]
