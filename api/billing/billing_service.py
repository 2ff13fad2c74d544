"""`BillingService`: reports, months, invoices, corrections; what a month is made of is told by the class beside it.

Reading is for `billing` and `admin` keys, changing for `admin` alone.
"""

from __future__ import annotations

import hashlib
import uuid

from weir.v1 import alerts_pb2 as alert_pb
from weir.v1 import billing_service_pb2 as pb
from weir.v1 import months_pb2, receipts_pb2
from weir.v1 import receipt_service_pb2 as receipt_pb
from weir.v1 import receipt_service_pb2_grpc as pb_grpc
from weir.v1 import reconciliation_pb2 as reconcile_pb

from api.access.auth import Authenticator, Scope
from api.billing.billing_wire import (
    BillingCalls,
    Reports,
    adjustment_message,
    invoice_message,
    may_see,
    month_message,
    picos_of,
    report_message,
    visible,
    visible_or_own,
)
from api.billing.usage_calls import UsageCalls
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import alert_message, receipt_messages
from metering.alerts.alerts import list_alerts
from metering.core.errors import InvalidValue, NotFound
from metering.export.reconciliation import Difference, StageSum, reconciled_here
from metering.export.stripe_inbox import payments_by_month
from metering.invoicing import adjustments
from metering.invoicing.closing import CloseTerms, check_month, close_month
from metering.invoicing.invoices import find_invoice_row, invoice_of_month, read_invoice
from metering.invoicing.month_report import to_csv, to_json
from metering.invoicing.months import list_months, month_entry, month_report, verify_month
from metering.ledger.ledger import month_bounds
from metering.receipts.months import BEGINNING, PageMark, list_receipt_keys, receipt_month, receipts_page
from metering.tenants.tenants import find_organization

DOCUMENTS = {months_pb2.MONTH_DOCUMENT_FORMAT_JSON: to_json, months_pb2.MONTH_DOCUMENT_FORMAT_CSV: to_csv}
PAGE_SIZE = 500
COUNTS = [field.name for field in reconcile_pb.StageSum.DESCRIPTOR.fields if field.name.endswith("_token_count")]


class AlertCalls(BillingCalls):
    """See `proto/weir/v1/alerts.proto`."""

    async def ListAlerts(self, request: alert_pb.ListAlertsRequest, context: Context) -> alert_pb.ListAlertsResponse:
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            of_all = not request.organization and Scope.ADMIN in reader.scopes
            organization_id = None if of_all else (await visible_or_own(session, reader, request.organization)).id
            found, next_token = await list_alerts(
                session, organization_id=organization_id, page_size=request.page_size or 100, page_token=request.page_token
            )
            return alert_pb.ListAlertsResponse(alerts=map(alert_message, found), next_page_token=next_token)


class ReconciliationCalls(BillingCalls):
    """See `proto/weir/v1/reconciliation.proto`."""

    async def GetReconciliation(
        self, request: reconcile_pb.GetReconciliationRequest, context: Context
    ) -> reconcile_pb.GetReconciliationResponse:
        """Compares the stages of a month, all at one moment."""
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            organization = await visible_or_own(session, reader, request.organization)
            found, is_exported = await reconciled_here(session, request.month, organization.id)
        return reconcile_pb.GetReconciliationResponse(
            organization_name=organization.name,
            month=request.month,
            sums=map(sum_message, found.ours.sums),
            differences=map(difference_message, found.differences),
            exported=is_exported,
            due_time=wire.timestamp(found.ours.until),
        )


class BillingServicer(UsageCalls, AlertCalls, ReconciliationCalls):
    """See `proto/weir/v1/billing_service.proto`."""

    async def GetMonthReport(self, request: pb.GetMonthReportRequest, context: Context) -> pb.GetMonthReportResponse:
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            organization = await visible(session, reader, request.organization)
            return report_message(await month_report(session, organization=str(organization.id), month=request.month))

    async def GetMonthDocument(
        self, request: months_pb2.GetMonthDocumentRequest, context: Context
    ) -> months_pb2.GetMonthDocumentResponse:
        """The report as bytes."""
        reader = await self._caller(context)
        if (write := DOCUMENTS.get(request.format)) is None:
            raise InvalidValue("format", "give JSON or CSV")
        async with self._reading(reader) as session:
            organization = await visible(session, reader, request.organization)
            content = write(await month_report(session, organization=str(organization.id), month=request.month)).encode()
            entry = await month_entry(session, organization, request.month)
        closed = entry.json_sha256 if write is to_json else entry.csv_sha256
        return months_pb2.GetMonthDocumentResponse(
            content=content, sha256=hashlib.sha256(content).hexdigest(), closed_sha256=closed
        )

    async def ListMonths(self, request: months_pb2.ListMonthsRequest, context: Context) -> months_pb2.ListMonthsResponse:
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            organization = await visible(session, reader, request.organization)
            payments = await payments_by_month(session, organization.id)
            months = await list_months(session, organization)
            return months_pb2.ListMonthsResponse(months=[month_message(each, payments.get(each.month, ())) for each in months])

    async def CloseMonth(self, request: months_pb2.CloseMonthRequest, context: Context) -> months_pb2.CloseMonthResponse:
        """Closes a month, or tells what stands in the way."""
        admin = await self._caller(context)
        response = months_pb2.CloseMonthResponse()
        terms = CloseTerms(
            leave_running=request.leave_running,
            before_first=request.before_first,
            correcting=request.correcting_adjustment_id,
        )
        if request.validate_only:
            for each in await check_month(self._sessions, organization=request.organization, month=request.month, **terms):
                response.obstacles.add(kind=each.kind, description=each.description)
        else:
            result = await close_month(
                self._sessions, organization=request.organization, month=request.month, actor=admin.key_prefix, **terms
            )
            response.already_closed = result.already_closed
        async with self._sessions() as session:
            organization = await find_organization(session, request.organization)
            payments = await payments_by_month(session, organization.id)
            entry = await month_entry(session, organization, request.month)
            response.month.CopyFrom(month_message(entry, payments.get(entry.month, ())))
        return response

    async def VerifyMonth(self, request: months_pb2.VerifyMonthRequest, context: Context) -> months_pb2.VerifyMonthResponse:
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            organization = await visible(session, reader, request.organization)
            found = await verify_month(session, organization, request.month)
            entry = await month_entry(session, organization, request.month)
            payments = await payments_by_month(session, organization.id)
        return months_pb2.VerifyMonthResponse(
            month=month_message(entry, payments.get(entry.month, ())),
            json_sha256=found.digests.json_sha256.hex(),
            csv_sha256=found.digests.csv_sha256.hex(),
            reproduced=not found.differences,
            differences=found.differences,
        )

    async def GetInvoice(self, request: months_pb2.GetInvoiceRequest, context: Context) -> months_pb2.GetInvoiceResponse:
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            if request.number:
                row = await find_invoice_row(session, request.number)
                if not may_see(reader, row.organization_id):
                    raise NotFound("invoice", request.number)
            else:
                organization = await visible(session, reader, request.organization)
                first_day = month_bounds(request.month)[0].date()
                found = await invoice_of_month(session, organization.id, first_day)
                if found is None:
                    raise NotFound("invoice", f"{organization.name} {request.month}")
                row = found
            notes = await adjustments.list_adjustments(session, row.organization_id, invoice_id=row.id)
            invoice = await read_invoice(session, row)
            payments = await payments_by_month(session, row.organization_id)
            return months_pb2.GetInvoiceResponse(
                invoice=invoice_message(invoice, payments.get(invoice.month, ())),
                credit_notes=[adjustment_message(each) for each in notes if each.credit_note_number],
            )

    async def CreateAdjustment(
        self, request: months_pb2.CreateAdjustmentRequest, context: Context
    ) -> months_pb2.CreateAdjustmentResponse:
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                record = await adjustments.find_adjustment(acting.session, uuid.UUID(earlier))
            else:
                record = await adjustments.create_adjustment(
                    acting.session,
                    organization=request.organization,
                    amount_picos=picos_of(request.amount),
                    currency_code=request.amount.currency_code,
                    reason=request.reason,
                    actor=acting.actor,
                )
                await acting.made(request, record.id)
            return months_pb2.CreateAdjustmentResponse(adjustment=adjustment_message(record))

    async def CreateCreditNote(
        self, request: months_pb2.CreateCreditNoteRequest, context: Context
    ) -> months_pb2.CreateCreditNoteResponse:
        async with self._acting(context) as acting:
            if (earlier := await acting.earlier(request)) is not None:
                record = await adjustments.find_adjustment(acting.session, uuid.UUID(earlier))
            else:
                record = await adjustments.create_credit_note(
                    acting.session,
                    invoice=await find_invoice_row(acting.session, request.invoice_number),
                    amount_picos=picos_of(request.amount),
                    currency_code=request.amount.currency_code,
                    reason=request.reason,
                    actor=acting.actor,
                )
                await acting.made(request, record.id)
            return months_pb2.CreateCreditNoteResponse(credit_note=adjustment_message(record))

    async def ApproveAdjustment(
        self, request: months_pb2.ApproveAdjustmentRequest, context: Context
    ) -> months_pb2.ApproveAdjustmentResponse:
        async with self._transaction(context) as (session, actor):
            record = await adjustments.approve(session, adjustment_id=request.adjustment_id, actor=actor)
            return months_pb2.ApproveAdjustmentResponse(adjustment=adjustment_message(record))

    async def RejectAdjustment(
        self, request: months_pb2.RejectAdjustmentRequest, context: Context
    ) -> months_pb2.RejectAdjustmentResponse:
        async with self._transaction(context) as (session, actor):
            record = await adjustments.reject(session, adjustment_id=request.adjustment_id, actor=actor)
            return months_pb2.RejectAdjustmentResponse(adjustment=adjustment_message(record))

    async def ListAdjustments(
        self, request: months_pb2.ListAdjustmentsRequest, context: Context
    ) -> months_pb2.ListAdjustmentsResponse:
        reader = await self._caller(context)
        async with self._reading(reader) as session:
            organization = await visible(session, reader, request.organization)
            found = await adjustments.list_adjustments(session, organization.id, undecided_only=request.undecided_only)
            return months_pb2.ListAdjustmentsResponse(adjustments=map(adjustment_message, found))


def sum_message(each: StageSum) -> reconcile_pb.StageSum:
    counts = {name: getattr(each, name.removesuffix("_token_count")) for name in COUNTS}
    return wire.message_of(reconcile_pb.StageSum, each, **counts)


def difference_message(each: Difference) -> reconcile_pb.StageDifference:
    amount = each.amount_picos if each.currency_code else None
    return wire.message_of(reconcile_pb.StageDifference, each, amount=amount, since_time=each.since)


class ReceiptServicer(pb_grpc.ReceiptServiceServicer):
    """See `proto/weir/v1/receipt_service.proto`."""

    def __init__(self, authenticator: Authenticator, reports: Reports) -> None:
        self._authenticator = authenticator
        self._reports = reports

    async def ListReceiptKeys(
        self, request: receipt_pb.ListReceiptKeysRequest, context: Context
    ) -> receipt_pb.ListReceiptKeysResponse:
        """All public keys: they are no secret."""
        principal = await self._authenticator.principal(context)
        async with self._reports.turn(principal) as sessions, sessions() as session:
            keys = await list_receipt_keys(session)
        return receipt_pb.ListReceiptKeysResponse(
            keys=[wire.message_of(receipts_pb2.ReceiptKey, key, key_id=key.id) for key in keys]
        )

    async def ListReceipts(self, request: receipt_pb.ListReceiptsRequest, context: Context) -> receipt_pb.ListReceiptsResponse:
        principal = await self._authenticator.principal(context)
        month = month_bounds(request.month)[0].date()
        after = PageMark.parse(request.page_token) if request.page_token else BEGINNING
        async with self._reports.turn(principal) as sessions, sessions() as session:
            owner = await visible(session, principal, request.organization)
            page_size = request.page_size or PAGE_SIZE
            receipts, last = await receipts_page(session, owner.id, month, after=after, page_size=page_size)
        return receipt_pb.ListReceiptsResponse(
            receipts=receipt_messages(receipts), next_page_token="" if last is None else str(last)
        )

    async def GetReceiptMonth(
        self, request: receipt_pb.GetReceiptMonthRequest, context: Context
    ) -> receipt_pb.GetReceiptMonthResponse:
        principal = await self._authenticator.principal(context)
        month = month_bounds(request.month)[0].date()
        async with self._reports.turn(principal) as sessions, sessions() as session:
            owner = await visible(session, principal, request.organization)
            found = await receipt_month(session, owner.id, month)
        return wire.message_of(receipt_pb.GetReceiptMonthResponse, found, organization_id=owner.id, month=request.month)
