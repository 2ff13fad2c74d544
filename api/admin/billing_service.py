"""`BillingService` and `ReceiptService`: reports, months, invoices, corrections, usage by group,
forecast, resale to end users, and receipts.

Only the operator changes bills; resale prices change none. Keys with a role in an organization
reach that organization only, whatever a request names: `metering/store/border.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any

from google.protobuf.message import Message
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import alerts_pb2 as alert_pb
from weir.v1 import billing_service_pb2 as pb
from weir.v1 import billing_service_pb2_grpc as billing_grpc
from weir.v1 import end_users_pb2 as end_user_pb
from weir.v1 import months_pb2, receipts_pb2
from weir.v1 import receipt_service_pb2 as receipt_pb
from weir.v1 import receipt_service_pb2_grpc as pb_grpc
from weir.v1 import reconciliation_pb2 as reconcile_pb
from weir.v1 import resale_pb2 as resale_pb
from weir.v1 import usage_reports_pb2 as usage_pb

from api.access.auth import Authenticator
from api.access.pages import WHOLE
from api.access.roles import is_operator, role_of
from api.access.servicer import (
    AuthenticatedServicer,
    CallerTransaction,
    Reports,
    listing,
    once,
    reading,
    sessions_of,
)
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import (
    TIME_ZONE,
    alert_message,
    groupings,
    proven_receipt_message,
    quota_status,
    receipt_message,
    usage_row,
)
from metering.alerts.alerts import ListedAlert, list_alerts
from metering.core.audit import record_change
from metering.core.errors import InvalidValue, InvariantViolated, NotFound
from metering.core.models import Organization
from metering.core.money import round_to_minor_unit
from metering.export.invoice_payments import InvoicePayment, payments_by_month
from metering.export.reconciliation import Difference, StageSum, reconcile_locally
from metering.invoicing import adjustments, rentals, resale
from metering.invoicing.adjustments import AdjustmentRecord
from metering.invoicing.closing import CloseTerms, check_month, close_month
from metering.invoicing.documents import (
    Drawer,
    document_of_credit_note,
    document_of_month,
)
from metering.invoicing.invoice_document import Issuer
from metering.invoicing.invoices import Invoice, find_invoice_row, invoice_of_month, read_invoice
from metering.invoicing.month_report import TAX_NOTE, MonthReport, to_csv, to_json
from metering.invoicing.months import (
    MonthEntry,
    list_months,
    month_entry,
    month_report,
    verify_month,
)
from metering.ledger.ledger import month_bounds, month_text
from metering.pricing import resale_prices
from metering.pricing.resale_prices import ResalePrice, ResaleTerms
from metering.receipts.chaining import IssuedReceipt
from metering.receipts.months import list_receipt_keys, receipt_month, receipts_page
from metering.reports.end_users import ListedEndUser, get_end_user
from metering.reports.end_users import with_usage as end_users_with_usage
from metering.reports.focus import FOCUS_VERSION, Tags, focus_csv
from metering.reports.forecast import CONFIDENCE, Forecast, forecast
from metering.reports.organization_export import STATEMENT_MAX_S, write_export
from metering.reports.usage_reports import (
    Groups,
    UsageFilter,
    daily_costs,
    find_end_user_id,
    parse_day,
    period_of,
    usage_page,
)
from metering.store.border import Actor, acting
from metering.store.db import Sessions, database_now, patience
from metering.tenants.api_keys import find_api_key
from metering.tenants.authentication import Principal
from metering.tenants.tenants import find_organization, find_project
from metering.tenants.usage_subjects import EndUserState, end_users_page, state_of

FILE_NAMES = {
    usage_pb.MONTH_EXPORT_FORMAT_INVOICE_PDF: ("{number}-{}.pdf", "application/pdf"),
    usage_pb.MONTH_EXPORT_FORMAT_FOCUS_CSV: (
        f"focus-{FOCUS_VERSION}-{{}}.csv",
        "text/csv; charset=utf-8",
    ),
}
RECEIPTS_PER_PAGE = 500
END_USER_STATES: Mapping[int, EndUserState | None] = {
    end_user_pb.END_USER_STATE_UNSPECIFIED: None,
    **{
        end_user_pb.EndUserState.Value(f"END_USER_STATE_{each.name}"): each for each in EndUserState
    },
}
CHUNK_BYTES = 64 * 1024  # per message of a file, far below the limit of any client
FILE_BYTES_IN_MEMORY = 8 * 2**20  # larger files are on disk until the client has read them
DOCUMENTS = {
    months_pb2.MONTH_DOCUMENT_FORMAT_JSON: to_json,
    months_pb2.MONTH_DOCUMENT_FORMAT_CSV: to_csv,
}
STATEMENT_DOCUMENTS = {
    resale_pb.RESALE_STATEMENT_FORMAT_JSON: resale.to_json,
    resale_pb.RESALE_STATEMENT_FORMAT_CSV: resale.to_csv,
}
COUNTS = [
    field.name
    for field in reconcile_pb.StageSum.DESCRIPTOR.fields
    if field.name.endswith("_token_count")
]


def report_message(report: MonthReport) -> pb.GetMonthReportResponse:
    closed, currency = report.closed, report.currency_code
    parts = iter(report.rounded_parts_picos)
    return wire.message_of(
        pb.GetMonthReportResponse,
        report,
        lines=[
            wire.message_of(pb.MonthReportLine, each, currency, rounded_amount=next(parts))
            for each in report.lines
        ],
        charges=[
            wire.message_of(months_pb2.MonthCharge, each, currency, rounded_amount=next(parts))
            for each in report.charges
        ],
        prepaid_credit=report.credit,
        tax_note=TAX_NOTE,
        report_format=report.format_version,
        invoice_number=None if closed is None else closed.invoice_number,
        close_time=None if closed is None else closed.closed_at,
        closed_by=None if closed is None else closed.closed_by,
        receipts_root=None if closed is None else closed.receipts_root,
    )


def month_message(entry: MonthEntry, payments: Sequence[InvoicePayment]) -> months_pb2.Month:
    """Convert a month to a message, with the payments of its Stripe invoices."""
    return wire.message_of(
        months_pb2.Month,
        entry,
        closing_time=entry.closing_at,
        payments=map(payment_message, payments),
    )


async def one_month(
    session: AsyncSession, organization: Organization, month: str
) -> months_pb2.Month:
    """Look up a month `YYYY-MM` and convert it to a message. Raises: InvalidValue."""
    payments = await payments_by_month(session, organization.id)
    return month_message(await month_entry(session, organization, month), payments.get(month, ()))


def payment_message(payment: InvoicePayment) -> months_pb2.InvoicePayment:
    times = {"pay_time": payment.paid_at, "failure_time": payment.payment_failed_at}
    return wire.message_of(months_pb2.InvoicePayment, payment, **times)


def invoice_message(invoice: Invoice, payments: Sequence[InvoicePayment]) -> months_pb2.Invoice:
    """Convert an invoice to a message, with the payments of the month's Stripe invoices."""
    currency = invoice.currency_code
    return wire.message_of(
        months_pb2.Invoice,
        invoice,
        lines=[
            wire.message_of(months_pb2.InvoiceLine, each, currency, exact_amount=each.exact_picos)
            for each in invoice.lines
        ],
        exact_total=invoice.exact_picos,
        tax_note=TAX_NOTE,
        payments=map(payment_message, payments),
    )


def adjustment_message(record: AdjustmentRecord) -> months_pb2.Adjustment:
    return wire.message_of(months_pb2.Adjustment, record, adjustment_id=record.id)


async def named_or_own(session: AsyncSession, reader: Principal, ref: str) -> Organization:
    """Find an organization by name or id; empty means the reader's own. Raises: NotFound."""
    return await find_organization(session, ref or str(reader.organization_id))


async def visible_alerts(
    session: AsyncSession, *, reader: Principal, organization: str, **page: Any
) -> tuple[Sequence[ListedAlert], str]:
    """List a page of alerts: of one organization, else all that the reader may see."""
    of_all = not organization and is_operator(reader)
    owner_id = None if of_all else (await named_or_own(session, reader, organization)).id
    return await list_alerts(session, organization_id=owner_id, **page)


async def visible_end_users(
    session: AsyncSession,
    *,
    reader: Principal,
    organization: str,
    state: int,
    with_usage: bool,
    **page: Any,
) -> tuple[Sequence[ListedEndUser], str]:
    """List a page of an organization's end users, with their usage if asked for.

    Raises: InvalidValue, NotFound.
    """
    if state not in END_USER_STATES:
        raise InvalidValue("state", "must be active, archived or erased, or be left out")
    owner = await named_or_own(session, reader, organization)
    found, token = await end_users_page(session, owner.id, state=END_USER_STATES[state], **page)
    if with_usage:
        return await end_users_with_usage(session, owner, found), token
    return [ListedEndUser(each, state_of(each), owner.currency_code) for each in found], token


async def visible_end_user(
    session: AsyncSession, *, reader: Principal, organization: str, end_user: str
) -> end_user_pb.GetEndUserResponse:
    """Return an end user with its usage and its limits. Raises: NotFound."""
    owner = await named_or_own(session, reader, organization)
    found = await get_end_user(session, owner, end_user)
    return end_user_pb.GetEndUserResponse(
        end_user=end_user_message(found), quotas=map(quota_status, found.quotas)
    )


def end_user_message(listed: ListedEndUser) -> end_user_pb.EndUser:
    subject, quota = listed.subject, listed.tightest_quota
    return wire.message_of(
        end_user_pb.EndUser,
        listed,
        end_user_id=subject.id,
        name=subject.name or "",
        create_time=subject.created_at,
        last_use_day=f"{subject.last_used_on:%Y-%m-%d}",
        month_cost=listed.month_cost_picos,
        tightest_quota=None if quota is None else quota_status(quota),
    )


async def visible_months(
    session: AsyncSession, *, organization: str
) -> months_pb2.ListMonthsResponse:
    """List the months of an organization, with the payments of their invoices."""
    owner = await find_organization(session, organization)
    payments = await payments_by_month(session, owner.id)
    found = await list_months(session, owner)
    return months_pb2.ListMonthsResponse(
        months=[month_message(each, payments.get(each.month, ())) for each in found]
    )


async def visible_adjustments(
    session: AsyncSession, *, organization: str, **page: Any
) -> tuple[Sequence[AdjustmentRecord], str]:
    """List a page of the adjustments of an organization."""
    owner = await find_organization(session, organization)
    return await adjustments.list_adjustments(session, owner.id, **page)


async def visible_receipts(
    session: AsyncSession, *, organization: str, month: str, **page: Any
) -> tuple[Sequence[IssuedReceipt], str]:
    """List a page of an organization's receipts of a month, by time."""
    begins = month_bounds(month)[0].date()
    owner = await find_organization(session, organization)
    return await receipts_page(session, owner.id, begins, **page)


async def report_of(
    session: AsyncSession, *, organization: str, month: str
) -> pb.GetMonthReportResponse:
    owner = await find_organization(session, organization)
    return report_message(await month_report(session, organization=str(owner.id), month=month))


async def document_of(
    session: AsyncSession, *, organization: str, month: str, format: Any
) -> months_pb2.GetMonthDocumentResponse:
    """Return the report of a month as JSON or CSV. Raises: InvalidValue."""
    if (write := DOCUMENTS.get(format)) is None:
        raise InvalidValue("format", "must be JSON or CSV")
    owner = await find_organization(session, organization)
    report = await month_report(session, organization=str(owner.id), month=month)
    content = write(report).encode()
    entry = await month_entry(session, owner, month)
    closed = entry.json_sha256 if write is to_json else entry.csv_sha256
    sha256 = hashlib.sha256(content).hexdigest()
    if closed not in ("", sha256):
        raise InvariantViolated(
            f"the report of {month} of {owner.name} cannot be reproduced: it has the SHA-256"
            f" {sha256}, and had {closed} at its close; see what differs with `weir month verify`"
        )
    return months_pb2.GetMonthDocumentResponse(content=content, sha256=sha256, closed_sha256=closed)


async def forecast_of(
    session: AsyncSession, *, reader: Principal, organization: str, month: str
) -> usage_pb.GetForecastResponse:
    """Return the cost of a month so far, and a forecast for the whole month.

    Raises: InvalidValue.
    """
    owner = await named_or_own(session, reader, organization)
    now = await database_now(session)
    month = month or month_text(now.astimezone(UTC))
    begins, _ = month_bounds(month)
    if begins > now:
        raise InvalidValue("month", f"{month} has not begun: give the present month or one before")
    days = await daily_costs(session, owner.id, begins, now)
    return forecast_message(forecast(days, begins.date(), now), owner, month, now)


async def reconciliation_of(
    session: AsyncSession, *, reader: Principal, organization: str, month: str
) -> reconcile_pb.GetReconciliationResponse:
    """Compare the totals of a month at each stage of billing, in one snapshot."""
    owner = await named_or_own(session, reader, organization)
    found, is_exported = await reconcile_locally(session, month, owner.id)
    return reconcile_pb.GetReconciliationResponse(
        organization_name=owner.name,
        month=month,
        sums=map(sum_message, found.ours.sums),
        differences=map(difference_message, found.differences),
        exported=is_exported,
        due_time=wire.timestamp(found.ours.until),
    )


async def verification_of(
    session: AsyncSession, *, organization: str, month: str
) -> months_pb2.VerifyMonthResponse:
    """Recompute the documents of a closed month, and compare them with those of its close."""
    owner = await find_organization(session, organization)
    found = await verify_month(session, owner, month)
    return months_pb2.VerifyMonthResponse(
        month=await one_month(session, owner, month),
        json_sha256=found.digests.json_sha256.hex(),
        csv_sha256=found.digests.csv_sha256.hex(),
        reproduced=not found.differences,
        differences=found.differences,
    )


async def invoice_of(
    session: AsyncSession, *, number: str, organization: str, month: str
) -> months_pb2.GetInvoiceResponse:
    """Look up an invoice by its number, else that of a month. Raises: NotFound."""
    if number:
        row = await find_invoice_row(session, number)
    else:
        owner = await find_organization(session, organization)
        found = await invoice_of_month(session, owner.id, month_bounds(month)[0].date())
        if found is None:
            raise NotFound("invoice", f"{owner.name} {month}")
        row = found
    notes = await adjustments.credit_notes_of(session, row.id)
    invoice = await read_invoice(session, row)
    payments = await payments_by_month(session, row.organization_id)
    return months_pb2.GetInvoiceResponse(
        invoice=invoice_message(invoice, payments.get(invoice.month, ())),
        credit_notes=[adjustment_message(each) for each in notes if each.credit_note_number],
    )


async def visible_resale_prices(
    session: AsyncSession, *, reader: Principal, organization: str, **page: Any
) -> tuple[Sequence[ResalePrice], str]:
    """List a page of an organization's resale prices."""
    owner = await named_or_own(session, reader, organization)
    return await resale_prices.list_resale_prices(session, owner.id, **page)


async def visible_statements(
    session: AsyncSession, *, reader: Principal, organization: str, month: str, **page: Any
) -> tuple[Sequence[resale.Statement], str]:
    """List a page of the statements of a month."""
    owner = await named_or_own(session, reader, organization)
    return await resale.statement_page(session, owner, month, **page)


def resale_price_message(price: ResalePrice) -> resale_pb.ResalePrice:
    return wire.message_of(
        resale_pb.ResalePrice, price, version=price.id, effective_time=price.effective_at
    )


async def visible_rentals(
    session: AsyncSession, *, reader: Principal, organization: str, **page: Any
) -> tuple[Sequence[rentals.ListedRental], str]:
    """List a page of an organization's rentals of replicas."""
    owner = await named_or_own(session, reader, organization)
    return await rentals.list_rentals(session, owner, **page)


def rental_message(listed: rentals.ListedRental) -> resale_pb.ReplicaRental:
    rental = listed.rental
    return wire.message_of(
        resale_pb.ReplicaRental,
        rental,
        rental_id=rental.id,
        end_user=listed.end_user,
        start_time=rental.starts_at,
        end_time=rental.ends_at,
    )


def statement_summary(statement: resale.Statement) -> resale_pb.ResaleStatement:
    """Convert a statement to a message without its lines."""
    user = statement.end_user
    names = {"end_user": user.name, "end_user_id": user.id, "lines": ()}
    return wire.message_of(resale_pb.ResaleStatement, statement, **names)


def statement_message(statement: resale.Statement) -> resale_pb.ResaleStatement:
    message = statement_summary(statement)
    for line in statement.lines:
        message.lines.append(
            wire.message_of(resale_pb.ResaleStatementLine, line, statement.currency_code)
        )
    return message


class BillingReads(AuthenticatedServicer):
    """RPCs of `BillingService` that read one snapshot: their queries, and messages of records."""

    ListAlerts = listing(alert_pb.ListAlertsResponse, visible_alerts, alert_message)
    ListEndUsers = listing(end_user_pb.ListEndUsersResponse, visible_end_users, end_user_message)
    GetEndUser = reading(visible_end_user)
    ListMonths = reading(visible_months)
    ListAdjustments = listing(
        months_pb2.ListAdjustmentsResponse, visible_adjustments, adjustment_message, page_size=WHOLE
    )
    GetForecast = reading(forecast_of)
    GetInvoice = reading(invoice_of)
    GetMonthDocument = reading(document_of)
    GetMonthReport = reading(report_of)
    GetReconciliation = reading(reconciliation_of)
    ListResalePrices = listing(
        resale_pb.ListResalePricesResponse, visible_resale_prices, resale_price_message
    )
    ListReplicaRentals = listing(
        resale_pb.ListReplicaRentalsResponse, visible_rentals, rental_message
    )
    ListResaleStatements = listing(
        resale_pb.ListResaleStatementsResponse, visible_statements, statement_summary
    )
    VerifyMonth = reading(verification_of)


class BillingServicer(BillingReads, billing_grpc.BillingServiceServicer):
    """Implements `proto/weir/v1/billing_service.proto`. `api/access/permissions.py` has roles."""

    def __init__(
        self, authenticator: Authenticator, sessions: Sessions, reports: Reports, issuer: Issuer
    ) -> None:
        """`sessions` is for changes by administrators, `reports` for RPCs that only read."""
        super().__init__(authenticator, sessions)
        self._reports = reports
        self._issuer = issuer
        self._draw = Drawer().draw
        self._exports = asyncio.Semaphore(1)  # of organizations

    def _reading(self, reader: Principal) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a session on one snapshot, with the timeout of reports. Raises: TooManyReports."""
        return self._reports.reading(reader)

    async def GetUsage(
        self, request: usage_pb.GetUsageRequest, context: Context
    ) -> usage_pb.GetUsageResponse:
        principal = await self._caller(context)
        groups = Groups(
            groupings(request.group_by),
            request.label_key,
            request.largest_first,
            request.latest_first,
        )
        async with self._reading(principal) as session:
            of, currency = await usage_filter(session, principal, request)
            page = await usage_page(
                session,
                of,
                groups,
                page_size=request.page_size,
                token=request.page_token,
                with_total=of.organization_id is not None and not request.page_token,
            )
            response = usage_pb.GetUsageResponse(
                rows=[usage_row(row, currency) for row in page.rows],
                next_page_token=page.next_token,
                time_zone=TIME_ZONE,
            )
            if page.total is not None:
                response.total.CopyFrom(usage_row(page.total, currency))
        return response

    # The stubs allow only generators; gRPC also accepts a coroutine that writes.
    async def ExportMonth(  # type: ignore[override]
        self, request: usage_pb.ExportMonthRequest, context: Context
    ) -> None:
        """Export a month or a credit note as a file, in chunks.

        The transaction ends before the file is sent.
        """
        principal = await self._caller(context)
        if request.credit_note_number:
            async with self._reports.session_of(principal) as sessions, sessions.begin() as session:
                note = await adjustments.find_credit_note(session, request.credit_note_number)
                document = await document_of_credit_note(session, note, self._issuer, self._draw)
            name, media_type = f"{note.credit_note_number}.pdf", "application/pdf"
            await send_file(context, name, media_type, io.BytesIO(document.pdf))
            return
        if request.format not in FILE_NAMES:
            raise InvalidValue("format", "is required: the format of the file")
        is_pdf = request.format == usage_pb.MONTH_EXPORT_FORMAT_INVOICE_PDF
        tags = Tags(tuple(request.tag_label_keys), request.tag_end_user)
        if is_pdf and tags:
            raise InvalidValue("format", "must be FOCUS_CSV for tags: an invoice has none")
        with tempfile.SpooledTemporaryFile(max_size=FILE_BYTES_IN_MEMORY) as file:
            async with self._reading(principal) as session:
                owner = await named_or_own(session, principal, request.organization)
                report = await month_report(
                    session, organization=str(owner.id), month=request.month
                )
                if not is_pdf and report.closed is None:
                    await write_focus(file, session, report, self._issuer, tags)
            if is_pdf or report.closed is not None:
                async with self._reports.session_of(principal) as sessions:
                    document = await document_of_month(sessions, report, self._issuer, self._draw)
            if is_pdf:
                file.write(document.pdf)
            elif report.closed is not None:
                async with self._reading(principal) as session:
                    await write_focus(file, session, report, document.issuer, tags)
            name, media_type = FILE_NAMES[request.format]
            number = report.closed.invoice_number or "statement" if report.closed else "draft"
            name = name.format(f"{report.organization_name}-{report.month}", number=number)
            file.seek(0)
            await send_file(context, name, media_type, file)

    async def ExportOrganization(  # type: ignore[override]
        self, request: pb.ExportOrganizationRequest, context: Context
    ) -> None:
        """Export an organization as an archive, in chunks, and record that.

        The transaction is within the border of the organization, the operator's too, and ends
        before the file is sent. A process writes one archive at a time.
        """
        principal = await self._caller(context)
        async with self._changing(principal) as session:
            owner = await named_or_own(session, principal, request.organization)
            await record_change(
                session, principal.key_prefix, "organization.export", str(owner.id), after={}
            )
        within = Actor(role_of(principal).word, owner.id, is_bound=True)
        with tempfile.TemporaryFile() as file:
            async with self._exports, self._reports.session_of(principal) as sessions:
                with patience(STATEMENT_MAX_S + 2):
                    async with acting(sessions, within)() as session:
                        await write_export(session, owner, file)
            file.seek(0)
            name = f"{owner.name}-export.zip"
            await send_file(context, name, "application/zip", file, pb.ExportOrganizationResponse)

    async def CloseMonth(
        self, request: months_pb2.CloseMonthRequest, context: Context
    ) -> months_pb2.CloseMonthResponse:
        """Close a month; with `validate_only`, return the reasons why it cannot be closed yet."""
        admin = await self._caller(context)
        response = months_pb2.CloseMonthResponse()
        terms = CloseTerms(
            leave_running=request.leave_running,
            before_first=request.before_first,
            correcting=request.correcting_adjustment_id,
            issuer=self._issuer,
            draw=self._draw,
        )
        if request.validate_only:
            for each in await check_month(
                self._sessions, organization=request.organization, month=request.month, **terms
            ):
                response.obstacles.add(kind=each.kind, description=each.description)
        else:
            result = await close_month(
                sessions_of(admin, self._sessions),
                organization=request.organization,
                month=request.month,
                actor=admin.key_prefix,
                **terms,
            )
            response.already_closed = result.already_closed
        async with self._sessions() as session:
            organization = await find_organization(session, request.organization)
            response.month.CopyFrom(await one_month(session, organization, request.month))
        return response

    @once
    async def SetResalePrice(
        self, request: resale_pb.SetResalePriceRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, resale_pb.SetResalePriceResponse]:
        """Add a version to an organization's resale prices; a `billing` key only to its own."""
        owner = await named_or_own(acting.session, acting.principal, request.organization)
        if earlier:
            price = await resale_prices.get_resale_price(acting.session, int(earlier))
        else:
            begins = wire.given_time(request, "effective_time")
            terms = ResaleTerms(**wire.stated_terms(request, ResaleTerms), effective_at=begins)
            price = await resale_prices.set_resale_price(
                acting.session, owner, terms, actor=acting.actor
            )
        return price.id, resale_pb.SetResalePriceResponse(price=resale_price_message(price))

    @once
    async def RentReplicas(
        self, request: resale_pb.RentReplicasRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, resale_pb.RentReplicasResponse]:
        """Record a rental of replicas; a `billing` key only one of its own organization."""
        owner = await named_or_own(acting.session, acting.principal, request.organization)
        if earlier:
            rental = await rentals.find_rental(acting.session, owner.id, int(earlier))
        else:
            terms = rentals.RentalTerms(
                request.end_user,
                request.model,
                request.replica_count,
                wire.given_time(request, "start_time"),
                wire.given_time(request, "end_time"),
            )
            rental = await rentals.rent_replicas(acting.session, owner, terms, actor=acting.actor)
        shown = rental_message(await rentals.show_rental(acting.session, rental))
        return rental.id, resale_pb.RentReplicasResponse(rental=shown)

    async def EndReplicaRental(
        self, request: resale_pb.EndReplicaRentalRequest, context: Context
    ) -> resale_pb.EndReplicaRentalResponse:
        """Set the end of a rental; a `billing` key only of its own organization."""
        async with self._acting(context) as acting:
            owner = await named_or_own(acting.session, acting.principal, request.organization)
            rental = await rentals.end_rental(
                acting.session,
                owner,
                request.rental_id,
                wire.given_time(request, "end_time"),
                actor=acting.actor,
            )
            shown = rental_message(await rentals.show_rental(acting.session, rental))
            return resale_pb.EndReplicaRentalResponse(rental=shown)

    async def GetResaleStatement(
        self, request: resale_pb.GetResaleStatementRequest, context: Context
    ) -> resale_pb.GetResaleStatementResponse:
        """Return a statement. Its PDF is drawn after the transaction has ended."""
        reader = await self._caller(context)
        if request.format not in resale_pb.ResaleStatementFormat.values():
            raise InvalidValue("format", "must be JSON, CSV or PDF, or be left out")
        async with self._reading(reader) as session:
            owner = await named_or_own(session, reader, request.organization)
            found = await resale.find_statement(session, owner, request.month, request.end_user)
        content = b""
        if (write := STATEMENT_DOCUMENTS.get(request.format)) is not None:
            content = write(found).encode()
        elif request.format == resale_pb.RESALE_STATEMENT_FORMAT_PDF:
            content = await self._draw(resale.statement_document(found, self._issuer))
        return resale_pb.GetResaleStatementResponse(
            statement=statement_message(found), content=content
        )

    @once
    async def CreateAdjustment(
        self,
        request: months_pb2.CreateAdjustmentRequest,
        acting: CallerTransaction,
        earlier: str,
    ) -> tuple[object, months_pb2.CreateAdjustmentResponse]:
        propose = partial(adjustments.create_adjustment, organization=request.organization)
        record = await proposed(request, acting, earlier, propose)
        return record.id, months_pb2.CreateAdjustmentResponse(adjustment=adjustment_message(record))

    @once
    async def CreateCreditNote(
        self,
        request: months_pb2.CreateCreditNoteRequest,
        acting: CallerTransaction,
        earlier: str,
    ) -> tuple[object, months_pb2.CreateCreditNoteResponse]:
        propose = partial(adjustments.create_credit_note, invoice_number=request.invoice_number)
        record = await proposed(request, acting, earlier, propose)
        note = adjustment_message(record)
        return record.id, months_pb2.CreateCreditNoteResponse(credit_note=note)

    async def ApproveAdjustment(
        self, request: months_pb2.ApproveAdjustmentRequest, context: Context
    ) -> months_pb2.ApproveAdjustmentResponse:
        async with self._acting(context) as acting:
            record = await adjustments.approve(
                acting.session,
                adjustment_id=request.adjustment_id,
                actor=acting.actor,
                secret_hash=acting.principal.secret_hash,
            )
            if record.credit_note_number:
                await document_of_credit_note(acting.session, record, self._issuer, self._draw)
            return months_pb2.ApproveAdjustmentResponse(adjustment=adjustment_message(record))

    async def RejectAdjustment(
        self, request: months_pb2.RejectAdjustmentRequest, context: Context
    ) -> months_pb2.RejectAdjustmentResponse:
        async with self._transaction(context) as (session, actor):
            record = await adjustments.reject(
                session, adjustment_id=request.adjustment_id, actor=actor
            )
            return months_pb2.RejectAdjustmentResponse(adjustment=adjustment_message(record))


async def proposed(
    request: months_pb2.CreateAdjustmentRequest | months_pb2.CreateCreditNoteRequest,
    acting: CallerTransaction,
    earlier: str,
    propose: Callable[..., Awaitable[AdjustmentRecord]],
) -> AdjustmentRecord:
    """Propose an adjustment, or find the one that an earlier call proposed."""
    if earlier:
        return await adjustments.find_adjustment(acting.session, uuid.UUID(earlier))
    return await propose(
        acting.session,
        amount_picos=wire.picos_of(request.amount),
        currency_code=request.amount.currency_code,
        reason=request.reason,
        actor=acting.actor,
    )


async def send_file(
    context: Context,
    name: str,
    media_type: str,
    file: IO[bytes],
    piece: Callable[..., Message] = usage_pb.ExportMonthResponse,
) -> None:
    """Send a file in chunks. The first message also has its name and media type."""
    first = piece(file_name=name, media_type=media_type, chunk=file.read(CHUNK_BYTES))
    await context.write(first)
    while chunk := file.read(CHUNK_BYTES):
        await context.write(piece(chunk=chunk))


async def write_focus(
    file: IO[bytes], session: AsyncSession, report: MonthReport, issuer: Issuer, tags: Tags
) -> None:
    async for piece in focus_csv(session, report, issuer.name, tags):
        file.write(piece.encode())


async def usage_filter(
    session: AsyncSession, principal: Principal, request: usage_pb.GetUsageRequest
) -> tuple[UsageFilter, str]:
    """Convert a usage request to a filter by ids, and find the organization's currency.

    The currency is empty if the request covers all organizations. Raises: NotFound, InvalidValue.
    """
    if not (request.month or request.first_day):
        raise InvalidValue("month", "is required, unless first_day is given")
    today = (await database_now(session)).astimezone(UTC).date()
    period = period_of(request.month, request.first_day, request.last_day, today)
    day = parse_day(request.day)
    of = UsageFilter(period, day=day, model=request.model, labels=dict(request.labels))
    if not request.organization and is_operator(principal):
        if request.project or request.api_key or request.end_user:
            raise InvalidValue(
                "organization", "is required with a project, an API key or an end user"
            )
        return of, ""
    owner = await named_or_own(session, principal, request.organization)
    project_id = api_key_id = None
    if request.project:
        project = await find_project(session, request.project, organization=owner.name)
        if project.organization_id != owner.id:
            raise NotFound("project", request.project)
        project_id = project.id
    if request.api_key:
        key = await find_api_key(session, request.api_key)
        if key.organization_id != owner.id:
            raise NotFound("API key", request.api_key)
        api_key_id = key.id
    of = replace(
        of,
        organization_id=owner.id,
        project_id=project_id,
        api_key_id=api_key_id,
        end_user_id=await find_end_user_id(session, owner.id, request.end_user),
    )
    return of, owner.currency_code


def forecast_message(
    seen: Forecast, owner: Organization, month: str, now: datetime
) -> usage_pb.GetForecastResponse:
    """Convert a forecast to a message.

    Amounts are rounded to the currency's minor unit, because an estimate is not more precise.
    """
    currency_code = owner.currency_code
    estimates = {"expected": seen.expected_picos, "low": seen.low_picos, "high": seen.high_picos}
    coins = {
        name: None if picos is None else round_to_minor_unit(picos, currency_code)
        for name, picos in estimates.items()
    }
    return wire.message_of(
        usage_pb.GetForecastResponse,
        seen,
        currency_code,
        organization_name=owner.name,
        month=month,
        time_zone=TIME_ZONE,
        as_of_time=now,
        confidence_percent=round(CONFIDENCE * 100),
        **coins,
    )


def sum_message(each: StageSum) -> reconcile_pb.StageSum:
    counts = {name: getattr(each, name.removesuffix("_token_count")) for name in COUNTS}
    return wire.message_of(reconcile_pb.StageSum, each, **counts)


def difference_message(each: Difference) -> reconcile_pb.StageDifference:
    amount = each.amount_picos if each.currency_code else None
    return wire.message_of(reconcile_pb.StageDifference, each, amount=amount, since_time=each.since)


def receipt_key_message(key: Any) -> receipts_pb2.ReceiptKey:
    return wire.message_of(receipts_pb2.ReceiptKey, key, key_id=key.id)


async def receipt_month_of(
    session: AsyncSession, *, organization: str, month: str
) -> receipt_pb.GetReceiptMonthResponse:
    begins = month_bounds(month)[0].date()
    owner = await find_organization(session, organization)
    found = await receipt_month(session, owner.id, begins)
    names = {"organization_id": owner.id, "month": month}
    return wire.message_of(receipt_pb.GetReceiptMonthResponse, found, **names)


class ReceiptReads(AuthenticatedServicer):
    """RPCs of `ReceiptService`. Any valid API key may read the public keys."""

    ListReceiptKeys = listing(
        receipt_pb.ListReceiptKeysResponse, list_receipt_keys, receipt_key_message
    )
    ListReceipts = listing(
        receipt_pb.ListReceiptsResponse,
        visible_receipts,
        proven_receipt_message,
        page_size=RECEIPTS_PER_PAGE,
    )
    GetReceiptMonth = reading(receipt_month_of)


class ReceiptServicer(ReceiptReads, pb_grpc.ReceiptServiceServicer):
    """Implements `proto/weir/v1/receipt_service.proto`."""

    def __init__(self, authenticator: Authenticator, reports: Reports) -> None:
        self._authenticator = authenticator
        self._reports = reports

    @contextlib.asynccontextmanager
    async def _reading(self, reader: Principal) -> AsyncIterator[AsyncSession]:
        """Open a session of the reports, without their timeout. Raises: TooManyReports."""
        async with self._reports.session_of(reader) as sessions, sessions() as session:
            yield session


class HashedReceiptReads(ReceiptReads):
    """RPCs of `ReceiptService` that show the hashes of end users and labels only."""

    ListReceipts = listing(
        receipt_pb.ListReceiptsResponse,
        visible_receipts,
        receipt_message,
        page_size=RECEIPTS_PER_PAGE,
    )


class HashedReceiptServicer(HashedReceiptReads, ReceiptServicer):
    """Implements `proto/weir/v1/receipt_service.proto` where names are hidden."""
