"""The clients of the billing API: reports, months, usage, invoices, corrections, alerts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

from weir.v1 import alerts_pb2, billing_service_pb2, billing_service_pb2_grpc, months_pb2, usage_reports_pb2

from weir_client import wire
from weir_client.accounts import MonthReport
from weir_client.alerts import Alert
from weir_client.bills import Adjustment, ClosedMonth, DocumentFormat, Invoice, Month, MonthVerification
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items
from weir_client.money import Money
from weir_client.unary import UnaryClient, items_of
from weir_client.usage import MonthExportFormat, MonthFile, UsageForecast, UsageGrouping, UsagePage

_DOCUMENT_FORMATS = wire.numbers(DocumentFormat, months_pb2.MonthDocumentFormat.DESCRIPTOR)
_EXPORT_FORMATS = wire.numbers(MonthExportFormat, usage_reports_pb2.MonthExportFormat.DESCRIPTOR)
_GROUPINGS = wire.numbers(UsageGrouping, usage_reports_pb2.UsageGrouping.DESCRIPTOR)


class AsyncBillingClient(UnaryClient):
    """Reads the bill, closes months and corrects. Reading needs a key with the scope `billing` (its own organization only) or
    `admin`, everything else `admin`.

    Organizations are given by name or id, months as `YYYY-MM` in UTC. Every call raises WeirError: NotFound for what is not there,
    InvalidRequest for a bad value, FailedPrecondition for what is not possible as things stand.
    """

    @property
    def _stub(self) -> billing_service_pb2_grpc.BillingServiceAsyncStub:
        return billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)

    async def get_month_report(self, organization: str, month: str) -> MonthReport:
        """One month of an organization; of one that is not closed, what the invoice would be now."""
        request = billing_service_pb2.GetMonthReportRequest(organization=organization, month=month)
        return wire.read(MonthReport, await self._call(self._stub.GetMonthReport, request))

    async def get_month_document(self, organization: str, month: str, document_format: DocumentFormat) -> bytes:
        """The report as a document: of a closed month, the same bytes for ever, whose SHA-256 `list_months` tells."""
        request = months_pb2.GetMonthDocumentRequest(
            organization=organization, month=month, format=_DOCUMENT_FORMATS[document_format]
        )
        return (await self._call(self._stub.GetMonthDocument, request)).content

    async def list_months(self, organization: str) -> list[Month]:
        """The months of an organization, the latest first."""
        response = await self._call(self._stub.ListMonths, months_pb2.ListMonthsRequest(organization=organization))
        return [wire.read(Month, each) for each in response.months]

    async def close_month(
        self,
        organization: str,
        month: str,
        *,
        leave_running: bool = False,
        before_first: bool = False,
        corrected_by: str = "",
        validate_only: bool = False,
    ) -> ClosedMonth:
        """Closes a month for good and issues its invoice; again, it answers the same.

        leave_running: although requests of the month still run. before_first: although it is before the customer's first month, so
        that the empty months between have to be closed as well. corrected_by: id of an approved adjustment of what misstated usage
        costs. validate_only: only tell the obstacles. Raises: FailedPrecondition where something stands in the way;
        `details.preconditions` has each.
        """
        request = months_pb2.CloseMonthRequest(
            organization=organization,
            month=month,
            leave_running=leave_running,
            before_first=before_first,
            correcting_adjustment_id=corrected_by,
            validate_only=validate_only,
        )
        return wire.read(ClosedMonth, await self._call(self._stub.CloseMonth, request))

    async def verify_month(self, organization: str, month: str) -> MonthVerification:
        """Makes a closed month's report again and compares it with the digests of its close. Raises: FailedPrecondition if open."""
        request = months_pb2.VerifyMonthRequest(organization=organization, month=month)
        return wire.read(MonthVerification, await self._call(self._stub.VerifyMonth, request))

    async def get_invoice(self, number: str = "", *, organization: str = "", month: str = "") -> Invoice:
        """One invoice, by its number or by organization and month."""
        request = months_pb2.GetInvoiceRequest(number=number, organization=organization, month=month)
        response = await self._call(self._stub.GetInvoice, request)
        credit_notes = tuple(wire.read(Adjustment, each) for each in response.credit_notes)
        return wire.read(Invoice, response.invoice, credit_notes=credit_notes)

    async def create_adjustment(
        self, organization: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Proposes a line for the next invoice: what the customer owes more, negative for less. Somebody else approves it.

        request_id: a UUID of your own; the same call with it again makes nothing new.
        """
        request = months_pb2.CreateAdjustmentRequest(
            organization=organization,
            amount=wire.money_message(amount),
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        return wire.read(Adjustment, (await self._call(self._stub.CreateAdjustment, request)).adjustment)

    async def create_credit_note(
        self, invoice_number: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Proposes to give back a part of an invoice: above zero, in whole minor units. request_id: as in `create_adjustment`."""
        request = months_pb2.CreateCreditNoteRequest(
            invoice_number=invoice_number,
            amount=wire.money_message(amount),
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        return wire.read(Adjustment, (await self._call(self._stub.CreateCreditNote, request)).credit_note)

    async def approve_adjustment(self, adjustment_id: str) -> Adjustment:
        """Approves what somebody else proposed, an adjustment or a credit note, and posts it."""
        request = months_pb2.ApproveAdjustmentRequest(adjustment_id=adjustment_id)
        return wire.read(Adjustment, (await self._call(self._stub.ApproveAdjustment, request)).adjustment)

    async def reject_adjustment(self, adjustment_id: str) -> Adjustment:
        """Rejects an adjustment or a credit note, for good."""
        request = months_pb2.RejectAdjustmentRequest(adjustment_id=adjustment_id)
        return wire.read(Adjustment, (await self._call(self._stub.RejectAdjustment, request)).adjustment)

    async def list_adjustments(self, organization: str, *, undecided_only: bool = False) -> list[Adjustment]:
        """Adjustments and credit notes of an organization, the latest first."""
        request = months_pb2.ListAdjustmentsRequest(organization=organization, undecided_only=undecided_only)
        response = await self._call(self._stub.ListAdjustments, request)
        return [wire.read(Adjustment, each) for each in response.adjustments]

    async def _usage_pages(
        self,
        month: str,
        group_by: Sequence[UsageGrouping],
        *,
        organization: str = "",
        day: str = "",
        project: str = "",
        api_key: str = "",
        model: str = "",
        page_size: int = 0,
    ) -> AsyncIterator[list[UsagePage]]:
        """Pages of what a month (UTC, `YYYY-MM`) charges, by all of `group_by` in that order.

        organization: empty for one's own, or for all with an `admin` key. day (`YYYY-MM-DD`), project, api_key, model: only that.
        Raises: NotFound, InvalidRequest; any WeirError.
        """
        request = usage_reports_pb2.GetUsageRequest(
            organization=organization,
            month=month,
            group_by=[_GROUPINGS[each] for each in group_by],
            day=day,
            project=project,
            api_key=api_key,
            model=model,
            page_size=page_size,
        )
        async for page in self._pages(self._stub.GetUsage, request):
            yield [wire.read(UsagePage, page, has_more=bool(page.next_page_token))]

    get_usage = items_of(_usage_pages)

    async def get_forecast(self, organization: str = "", month: str = "") -> UsageForecast:
        """What the present month, or the one given, will have cost by its end, and how sure that is. Raises: any WeirError."""
        request = usage_reports_pb2.GetForecastRequest(organization=organization, month=month)
        response = await self._call(self._stub.GetForecast, request)
        return wire.read(UsageForecast, response)

    async def export_month(self, month: str, file_format: MonthExportFormat, *, organization: str = "") -> MonthFile:
        """A file of a month (UTC, `YYYY-MM`). Raises: NotFound, InvalidRequest; any WeirError."""
        request = usage_reports_pb2.ExportMonthRequest(organization=organization, month=month, format=_EXPORT_FORMATS[file_format])
        pieces = await self._opened().collect(self._stub.ExportMonth, request, timeout=self._timeout_s)
        content = b"".join(piece.chunk for piece in pieces)
        return MonthFile(pieces[0].file_name, pieces[0].media_type, content)

    async def _alert_pages(self, organization: str = "", *, page_size: int = 0) -> AsyncIterator[list[Alert]]:
        """Alerts, the latest first. organization: empty for one's own, or for all with an `admin` key.

        Raises: NotFound, InvalidRequest.
        """
        request = alerts_pb2.ListAlertsRequest(organization=organization, page_size=page_size)
        async for page in self._pages(self._stub.ListAlerts, request):
            yield [wire.read(Alert, each) for each in page.alerts]

    list_alerts = items_of(_alert_pages)


class BillingClient(BlockingUnaryClient):
    """Reads the bill, closes months and corrects. See `AsyncBillingClient` for every call and its errors.

    >>> with AdminClient() as admin, BillingClient() as billing:
    ...     customer = admin.create_organization("example", allow_existing=True)
    ...     report = billing.get_month_report("example", f"{customer.create_time:%Y-%m}")
    >>> print(report.total)
    0.00 USD
    """

    _async_class = AsyncBillingClient

    get_month_report = blocking(AsyncBillingClient.get_month_report)
    get_month_document = blocking(AsyncBillingClient.get_month_document)
    list_months = blocking(AsyncBillingClient.list_months)
    close_month = blocking(AsyncBillingClient.close_month)
    verify_month = blocking(AsyncBillingClient.verify_month)
    get_invoice = blocking(AsyncBillingClient.get_invoice)
    create_adjustment = blocking(AsyncBillingClient.create_adjustment)
    create_credit_note = blocking(AsyncBillingClient.create_credit_note)
    approve_adjustment = blocking(AsyncBillingClient.approve_adjustment)
    reject_adjustment = blocking(AsyncBillingClient.reject_adjustment)
    list_adjustments = blocking(AsyncBillingClient.list_adjustments)

    list_alerts = blocking_items(AsyncBillingClient._alert_pages)

    get_usage = blocking_items(AsyncBillingClient._usage_pages)
    get_forecast = blocking(AsyncBillingClient.get_forecast)
    export_month = blocking(AsyncBillingClient.export_month)
