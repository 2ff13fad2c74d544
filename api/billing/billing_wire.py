"""Months, reports, invoices and adjustments as messages. Pure."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import billing_service_pb2 as pb
from weir.v1 import months_pb2
from weir.v1.types_pb2 import Money

from api.access.auth import Authenticator, Scope
from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.errors import TooManyReports
from api.core.messages import billing_profile_message
from metering.core.errors import NotFound
from metering.core.models import Organization, TokenKind
from metering.export.export_models import PaymentState
from metering.export.invoice_payments import InvoicePayment
from metering.invoicing.adjustments import AdjustmentRecord, AdjustmentState
from metering.invoicing.invoices import Invoice, InvoiceLine
from metering.invoicing.month_report import TAX_NOTE, Charge, ChargeKind, MonthReport, ReportLine
from metering.invoicing.months import MonthEntry
from metering.ledger.models import MonthState
from metering.store.db import Sessions, patience, read_one_moment
from metering.tenants.tenants import Principal, find_organization

TOKEN_KINDS: Mapping[TokenKind, pb.TokenKind.ValueType] = {
    TokenKind.INPUT: pb.TOKEN_KIND_INPUT,
    TokenKind.CACHED_INPUT: pb.TOKEN_KIND_CACHED_INPUT,
    TokenKind.OUTPUT: pb.TOKEN_KIND_OUTPUT,
    TokenKind.EMBEDDING: pb.TOKEN_KIND_EMBEDDING,
}

MONTH_STATES: Mapping[str, months_pb2.MonthState.ValueType] = {
    MonthState.OPEN: months_pb2.MONTH_STATE_OPEN,
    MonthState.CLOSING: months_pb2.MONTH_STATE_CLOSING,
    MonthState.CLOSED: months_pb2.MONTH_STATE_CLOSED,
}

CHARGE_KINDS: Mapping[ChargeKind, months_pb2.ChargeKind.ValueType] = {
    kind: months_pb2.ChargeKind.Value(f"CHARGE_KIND_{kind.name}") for kind in ChargeKind
}

PAYMENT_STATES: Mapping[PaymentState, months_pb2.PaymentState.ValueType] = {
    state: months_pb2.PaymentState.Value(f"PAYMENT_STATE_{state.name}") for state in PaymentState
}

ADJUSTMENT_STATES: Mapping[AdjustmentState, months_pb2.AdjustmentState.ValueType] = {
    state: months_pb2.AdjustmentState.Value(f"ADJUSTMENT_STATE_{state.name}") for state in AdjustmentState
}

WAITING_PER_KEY_MAX = 16  # reports of one key, beside those that run: a page of the console asks for some at once
REPORT_S = 25.0  # a month of many millions of requests is summed up in some seconds; clients give a call half a minute


def report_message(report: MonthReport) -> pb.GetMonthReportResponse:
    """One month of one organization."""
    counts, reconciliation, currency_code = report.request_counts, report.reconciliation, report.currency_code
    parts = iter(report.rounded_parts_picos)
    message = pb.GetMonthReportResponse(
        organization_name=report.organization_name,
        organization_id=str(report.organization_id),
        month=report.month,
        lines=[line_message(line, currency_code, next(parts)) for line in report.lines],
        charges=[charge_message(charge, currency_code, next(parts)) for charge in report.charges],
        request_counts=pb.RequestCounts(
            total_count=counts.total_count,
            completed_count=counts.completed_count,
            cancelled_count=counts.cancelled_count,
            limited_count=counts.limited_count,
            failed_count=counts.failed_count,
        ),
        total=wire.money(currency_code, report.total_picos),
        total_rounded=wire.money(currency_code, report.total_rounded_picos),
        unrated_event_count=report.unrated_event_count,
        reconciliation=pb.Reconciliation(
            usage_token_count=reconciliation.usage_token_count,
            ledger_token_count=reconciliation.ledger_token_count,
            unrated_token_count=reconciliation.unrated_token_count,
            balanced=reconciliation.balanced,
        ),
        state=MONTH_STATES[report.state],
        carried_in=wire.money(currency_code, report.carried_in_picos),
        carried_out=wire.money(currency_code, report.carried_out_picos),
        prepaid_credit=months_pb2.PrepaidCreditSummary(
            granted=wire.money(currency_code, report.credit.granted_picos),
            expired=wire.money(currency_code, report.credit.expired_picos),
            left=wire.money(currency_code, report.credit.left_picos),
        ),
        tax_note=TAX_NOTE,
        report_format=report.format_version,
        billing_profile=None if report.billing_profile is None else billing_profile_message(report.billing_profile),
    )
    for note in report.credit_notes:
        amount = wire.money(currency_code, note.amount_picos)
        message.credit_notes.add(number=note.number, invoice_number=note.invoice_number, amount=amount, reason=note.reason)
    if report.closed is not None:
        message.invoice_number = report.closed.invoice_number
        message.close_time.CopyFrom(wire.known_time(report.closed.closed_at))
        message.closed_by = report.closed.closed_by
        message.receipts_root = report.closed.receipts_root
    return message


def line_message(line: ReportLine, currency_code: str, rounded_picos: int) -> pb.MonthReportLine:
    """One line of the month."""
    return pb.MonthReportLine(
        model=line.model,
        token_kind=TOKEN_KINDS[line.token_kind],
        price_version=line.price_version,
        request_count=line.request_count,
        token_count=line.token_count,
        cancelled_token_count=line.cancelled_token_count,
        unit_price_picos=line.unit_price_picos,
        amount=wire.money(currency_code, line.amount_picos),
        late_month=line.late_month,
        tier=line.tier,
        rounded_amount=wire.money(currency_code, rounded_picos),
    )


def charge_message(charge: Charge, currency_code: str, rounded_picos: int) -> months_pb2.MonthCharge:
    """One line beside the usage."""
    return months_pb2.MonthCharge(
        kind=CHARGE_KINDS[charge.kind],
        description=charge.description,
        amount=wire.money(currency_code, charge.amount_picos),
        rounded_amount=wire.money(currency_code, rounded_picos),
        model=charge.model,
        token_count=charge.token_count or 0,
        source_id="" if charge.source_id is None else str(charge.source_id),
    )


def month_message(entry: MonthEntry, payments: Sequence[InvoicePayment]) -> months_pb2.Month:
    """Where one month stands, and how far Stripe's invoices of it are paid."""
    return months_pb2.Month(
        organization_name=entry.organization_name,
        organization_id=str(entry.organization_id),
        month=entry.month,
        state=MONTH_STATES[entry.state],
        closing_time=wire.timestamp(entry.closing_at),
        closing_by=entry.closing_by,
        close_time=wire.timestamp(entry.closed_at),
        closed_by=entry.closed_by,
        invoice_number=entry.invoice_number,
        total=optional_money(entry.currency_code, entry.total_picos),
        json_sha256=entry.json_sha256,
        csv_sha256=entry.csv_sha256,
        report_format=entry.report_format,
        receipts_root=entry.receipts_root,
        payments=map(payment_message, payments),
    )


def payment_message(payment: InvoicePayment) -> months_pb2.InvoicePayment:
    """One invoice at Stripe."""
    return months_pb2.InvoicePayment(
        stripe_invoice_id=payment.stripe_invoice_id,
        stripe_number=payment.stripe_number,
        state=PAYMENT_STATES[payment.state],
        amount_due=wire.money(payment.currency_code, payment.amount_due_picos),
        amount_paid=wire.money(payment.currency_code, payment.amount_paid_picos),
        hosted_url=payment.hosted_url,
        finalize_time=wire.timestamp(payment.finalized_at),
        pay_time=wire.timestamp(payment.paid_at),
        failure_time=wire.timestamp(payment.payment_failed_at),
    )


def optional_money(currency_code: str, picos: int | None) -> Money | None:
    """An amount; None stays unset."""
    return None if picos is None else wire.money(currency_code, picos)


def invoice_message(invoice: Invoice, payments: Sequence[InvoicePayment]) -> months_pb2.Invoice:
    """A whole invoice, and how far Stripe's invoices of its month are paid."""
    currency_code = invoice.currency_code
    return months_pb2.Invoice(
        number=invoice.number,
        organization_id=str(invoice.organization_id),
        organization_name=invoice.organization_name,
        month=invoice.month,
        issue_time=wire.known_time(invoice.issued_at),
        issued_by=invoice.issued_by,
        lines=[invoice_line_message(line, currency_code) for line in invoice.lines],
        exact_total=wire.money(currency_code, invoice.exact_picos),
        carried_in=wire.money(currency_code, invoice.carried_in_picos),
        carried_out=wire.money(currency_code, invoice.carried_out_picos),
        total=wire.money(currency_code, invoice.total_picos),
        credited=wire.money(currency_code, invoice.credited_picos),
        tax_note=TAX_NOTE,
        payments=map(payment_message, payments),
    )


def invoice_line_message(line: InvoiceLine, currency_code: str) -> months_pb2.InvoiceLine:
    """A line of an invoice."""
    return months_pb2.InvoiceLine(
        kind=line.kind,
        description=line.description,
        exact_amount=wire.money(currency_code, line.exact_picos),
        amount=wire.money(currency_code, line.amount_picos),
        model=line.model,
        price_version=line.price_version or 0,
        token_kind=line.token_kind or "",
        token_count=line.token_count or 0,
        unit_price_picos=line.unit_price_picos or 0,
        usage_month=line.usage_month,
        source_id="" if line.source_id is None else str(line.source_id),
    )


def adjustment_message(record: AdjustmentRecord) -> months_pb2.Adjustment:
    """An adjustment or a credit note."""
    return months_pb2.Adjustment(
        adjustment_id=str(record.id),
        organization_id=str(record.organization_id),
        amount=wire.money(record.currency_code, record.amount_picos),
        reason=record.reason,
        invoice_number=record.invoice_number,
        state=ADJUSTMENT_STATES[record.state],
        author=record.author,
        create_time=wire.known_time(record.created_at),
        decided_by=record.decided_by,
        decide_time=wire.timestamp(record.decided_at),
        billing_month=record.billing_month,
        credit_note_number=record.credit_note_number,
    )


def picos_of(amount: Money) -> int:
    """The picos of an amount that came in."""
    return amount.units * wire.PICOS_PER_UNIT + amount.picos


class Reports:
    """The database connections for reports, of which one key has all but one at most. Others of the key wait, a bounded number."""

    def __init__(self, sessions: Sessions, connections_max: int) -> None:
        """sessions: on a pool of so many connections, which nothing else uses."""
        self._sessions = sessions
        self._per_key_max = max(connections_max - 1, 1)
        self._turns: dict[uuid.UUID, asyncio.Semaphore] = {}
        self._counts: Counter[uuid.UUID] = Counter()  # of each key, its reports that run or wait

    @contextlib.asynccontextmanager
    async def turn(self, reader: Principal) -> AsyncIterator[Sessions]:
        """Sessions for one report, once the key may have one. Raises: TooManyReports."""
        key_id = reader.api_key_id
        if self._counts[key_id] >= self._per_key_max + WAITING_PER_KEY_MAX:
            raise TooManyReports(self._counts[key_id])
        self._counts[key_id] += 1
        try:
            async with self._turns.setdefault(key_id, asyncio.Semaphore(self._per_key_max)):
                yield self._sessions
        finally:
            self._counts[key_id] -= 1
            if not self._counts[key_id]:
                del self._counts[key_id], self._turns[key_id]


class BillingCalls(AdminCalls):
    """Reading for `billing` and `admin` keys, beside what admins may do: `api/access/auth.py` says which call is which."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions, reports: Reports) -> None:
        """sessions: for what admins change. reports: for everything that only reads."""
        super().__init__(authenticator, sessions)
        self._reports = reports

    @contextlib.asynccontextmanager
    async def _reading(self, reader: Principal) -> AsyncIterator[AsyncSession]:
        """A session whose statements see one moment and may take as long as a report takes. Raises: TooManyReports."""
        with patience(REPORT_S + 2):
            async with self._reports.turn(reader) as sessions, sessions() as session:
                await read_one_moment(session, REPORT_S)
                yield session


def may_see(reader: Principal, organization_id: object) -> bool:
    """A `billing` key sees its own organization; any other one does not exist for it."""
    return Scope.ADMIN in reader.scopes or organization_id == reader.organization_id


async def visible(session: AsyncSession, reader: Principal, ref: str) -> Organization:
    """The organization by name or id. Raises: NotFound, also for one that the reader may not see."""
    organization = await find_organization(session, ref)
    if not may_see(reader, organization.id):
        raise NotFound("organization", ref)
    return organization


async def visible_or_own(session: AsyncSession, reader: Principal, ref: str) -> Organization:
    """The same; the reader's own if none is named."""
    return await visible(session, reader, ref or str(reader.organization_id))
