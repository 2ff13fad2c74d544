"""Months, reports, invoices and adjustments as messages. Pure."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import billing_service_pb2 as pb
from weir.v1 import months_pb2

from api.access.auth import Authenticator, Scope
from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.errors import TooManyReports
from api.core.messages import billing_profile_message
from metering.core.errors import NotFound
from metering.core.models import Organization
from metering.export.stripe_inbox import InvoicePayment
from metering.invoicing.adjustments import AdjustmentRecord
from metering.invoicing.invoices import Invoice
from metering.invoicing.month_report import TAX_NOTE, MonthReport
from metering.invoicing.months import MonthEntry
from metering.store.db import Sessions, patience, read_one_moment
from metering.tenants.tenants import Principal, find_organization

WAITING_PER_KEY_MAX = 16  # reports of one key, beside those that run: a page of the console asks for some at once
REPORT_S = 25.0  # a month of many millions of requests is summed up in some seconds; clients give a call half a minute


def report_message(report: MonthReport) -> pb.GetMonthReportResponse:
    closed, currency = report.closed, report.currency_code
    parts = iter(report.rounded_parts_picos)
    return wire.message_of(
        pb.GetMonthReportResponse,
        report,
        lines=[wire.message_of(pb.MonthReportLine, each, currency, rounded_amount=next(parts)) for each in report.lines],
        charges=[wire.message_of(months_pb2.MonthCharge, each, currency, rounded_amount=next(parts)) for each in report.charges],
        prepaid_credit=report.credit,
        tax_note=TAX_NOTE,
        report_format=report.format_version,
        billing_profile=None if report.billing_profile is None else billing_profile_message(report.billing_profile),
        invoice_number=None if closed is None else closed.invoice_number,
        close_time=None if closed is None else closed.closed_at,
        closed_by=None if closed is None else closed.closed_by,
        receipts_root=None if closed is None else closed.receipts_root,
    )


def month_message(entry: MonthEntry, payments: Sequence[InvoicePayment]) -> months_pb2.Month:
    """Where one month stands, and how far Stripe's invoices of it are paid."""
    return wire.message_of(months_pb2.Month, entry, closing_time=entry.closing_at, payments=map(payment_message, payments))


def payment_message(payment: InvoicePayment) -> months_pb2.InvoicePayment:
    times = {"pay_time": payment.paid_at, "failure_time": payment.payment_failed_at}
    return wire.message_of(months_pb2.InvoicePayment, payment, **times)


def invoice_message(invoice: Invoice, payments: Sequence[InvoicePayment]) -> months_pb2.Invoice:
    """A whole invoice, and how far Stripe's invoices of its month are paid."""
    currency = invoice.currency_code
    return wire.message_of(
        months_pb2.Invoice,
        invoice,
        lines=[wire.message_of(months_pb2.InvoiceLine, each, currency, exact_amount=each.exact_picos) for each in invoice.lines],
        exact_total=invoice.exact_picos,
        tax_note=TAX_NOTE,
        payments=map(payment_message, payments),
    )


def adjustment_message(record: AdjustmentRecord) -> months_pb2.Adjustment:
    return wire.message_of(months_pb2.Adjustment, record, adjustment_id=record.id)


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
