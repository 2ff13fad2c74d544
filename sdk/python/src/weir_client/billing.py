"""Clients of the billing API: reports, months, usage, invoices, corrections, alerts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

from weir.v1 import (
    alerts_pb2,
    billing_service_pb2,
    billing_service_pb2_grpc,
    months_pb2,
    usage_reports_pb2,
)

from weir_client import wire
from weir_client.accounts import MonthReport
from weir_client.alerts import Alert
from weir_client.bills import (
    Adjustment,
    ClosedMonth,
    DocumentFormat,
    Invoice,
    Month,
    MonthVerification,
)
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items
from weir_client.money import Money
from weir_client.unary import UnaryClient, items_of
from weir_client.usage import MonthExportFormat, MonthFile, UsageForecast, UsageGrouping, UsagePage

_DOCUMENT_FORMATS = wire.numbers(DocumentFormat, months_pb2.MonthDocumentFormat.DESCRIPTOR)
_EXPORT_FORMATS = wire.numbers(MonthExportFormat, usage_reports_pb2.MonthExportFormat.DESCRIPTOR)
_GROUPINGS = wire.numbers(UsageGrouping, usage_reports_pb2.UsageGrouping.DESCRIPTOR)


class AsyncBillingClient(UnaryClient):
    """Client of the billing API, which reads bills, and closes and corrects months.

    Reading needs a key with the scope `billing` (its own organization only) or `admin`, everything
    else `admin`. Organizations are given by name or id, months as `YYYY-MM` in UTC. Every call
    raises WeirError: NotFound for an unknown object, InvalidRequest for a bad value,
    FailedPrecondition if the current state does not allow the call.
    """

    @property
    def _stub(self) -> billing_service_pb2_grpc.BillingServiceAsyncStub:
        return billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)

    async def get_month_report(self, organization: str, month: str) -> MonthReport:
        """Return the report of a month. For an open month, it shows the invoice as of now."""
        request = billing_service_pb2.GetMonthReportRequest(organization=organization, month=month)
        return wire.read(MonthReport, await self._call(self._stub.GetMonthReport, request))

    async def get_month_document(
        self, organization: str, month: str, document_format: DocumentFormat
    ) -> bytes:
        """Return the report of a month as a file. The file of a closed month never changes."""
        request = months_pb2.GetMonthDocumentRequest(
            organization=organization, month=month, format=_DOCUMENT_FORMATS[document_format]
        )
        return (await self._call(self._stub.GetMonthDocument, request)).content

    async def list_months(self, organization: str) -> list[Month]:
        """Return the months of an organization, latest first."""
        return await self._list(
            Month,
            "months",
            self._stub.ListMonths,
            months_pb2.ListMonthsRequest(organization=organization),
        )

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
        """Close a month permanently and issue its invoice. Idempotent.

        `leave_running` closes the month even while some of its requests still run. `before_first`
        allows a month before the customer's first one; the empty months between must then be closed
        as well. `corrected_by` is the id of an approved adjustment that corrects misstated usage.
        `validate_only` returns the obstacles and closes nothing. Raises: FailedPrecondition with
        each obstacle in `details.preconditions`.
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
        """Recompute a closed month's report and compare its digests with the stored ones.

        Raises: FailedPrecondition for a month that is not closed.
        """
        request = months_pb2.VerifyMonthRequest(organization=organization, month=month)
        return wire.read(MonthVerification, await self._call(self._stub.VerifyMonth, request))

    async def get_invoice(
        self, number: str = "", *, organization: str = "", month: str = ""
    ) -> Invoice:
        """Return one invoice, given by its number or by organization and month."""
        request = months_pb2.GetInvoiceRequest(
            number=number, organization=organization, month=month
        )
        response = await self._call(self._stub.GetInvoice, request)
        credit_notes = tuple(wire.read(Adjustment, each) for each in response.credit_notes)
        return wire.read(Invoice, response.invoice, credit_notes=credit_notes)

    async def create_adjustment(
        self, organization: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Propose a line for the next invoice.

        A positive amount charges the customer, a negative one credits them. Another person must
        approve it. `request_id` is a UUID of your choice: a repeated call with it creates nothing
        new.
        """
        request = months_pb2.CreateAdjustmentRequest(
            organization=organization,
            amount=wire.money_message(amount),
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        return wire.read(
            Adjustment, (await self._call(self._stub.CreateAdjustment, request)).adjustment
        )

    async def create_credit_note(
        self, invoice_number: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Propose a partial refund of an invoice. For `request_id`, see `create_adjustment`.

        `amount` is above zero, in whole minor units (such as cents).
        """
        request = months_pb2.CreateCreditNoteRequest(
            invoice_number=invoice_number,
            amount=wire.money_message(amount),
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        return wire.read(
            Adjustment, (await self._call(self._stub.CreateCreditNote, request)).credit_note
        )

    async def approve_adjustment(self, adjustment_id: str) -> Adjustment:
        """Approve an adjustment or credit note that another person has proposed, and post it."""
        request = months_pb2.ApproveAdjustmentRequest(adjustment_id=adjustment_id)
        return wire.read(
            Adjustment, (await self._call(self._stub.ApproveAdjustment, request)).adjustment
        )

    async def reject_adjustment(self, adjustment_id: str) -> Adjustment:
        """Reject an adjustment or a credit note permanently."""
        request = months_pb2.RejectAdjustmentRequest(adjustment_id=adjustment_id)
        return wire.read(
            Adjustment, (await self._call(self._stub.RejectAdjustment, request)).adjustment
        )

    async def list_adjustments(
        self, organization: str, *, undecided_only: bool = False
    ) -> list[Adjustment]:
        """Return the adjustments and credit notes of an organization, latest first."""
        request = months_pb2.ListAdjustmentsRequest(
            organization=organization, undecided_only=undecided_only
        )
        return await self._list(Adjustment, "adjustments", self._stub.ListAdjustments, request)

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
        """Yield pages of a month's charges (UTC, `YYYY-MM`), grouped by `group_by` in that order.

        An empty `organization` means the key's own, or all with an `admin` key. `day`
        (`YYYY-MM-DD`), `project`, `api_key` and `model` are filters. Raises: NotFound,
        InvalidRequest; any WeirError.
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
        """Return the expected cost of a month, by default of this one, with its range."""
        request = usage_reports_pb2.GetForecastRequest(organization=organization, month=month)
        response = await self._call(self._stub.GetForecast, request)
        return wire.read(UsageForecast, response)

    async def export_month(
        self, month: str, file_format: MonthExportFormat, *, organization: str = ""
    ) -> MonthFile:
        """Export a month (UTC, `YYYY-MM`) as a file. Raises: NotFound, InvalidRequest."""
        request = usage_reports_pb2.ExportMonthRequest(
            organization=organization, month=month, format=_EXPORT_FORMATS[file_format]
        )
        return await self._export(request)

    async def export_credit_note(self, number: str) -> MonthFile:
        """Export an approved credit note, given by its number, as PDF. Raises: NotFound."""
        return await self._export(usage_reports_pb2.ExportMonthRequest(credit_note_number=number))

    async def _export(self, request: usage_reports_pb2.ExportMonthRequest) -> MonthFile:
        pieces = await self._opened().collect(
            self._stub.ExportMonth, request, timeout=self._timeout_s
        )
        content = b"".join(piece.chunk for piece in pieces)
        return MonthFile(pieces[0].file_name, pieces[0].media_type, content)

    async def _alert_pages(
        self, organization: str = "", *, page_size: int = 0
    ) -> AsyncIterator[list[Alert]]:
        """Yield pages of alerts, latest first. Raises: NotFound, InvalidRequest.

        An empty `organization` means the key's own, or all with an `admin` key.
        """
        request = alerts_pb2.ListAlertsRequest(organization=organization, page_size=page_size)
        async for page in self._pages(self._stub.ListAlerts, request):
            yield [wire.read(Alert, each) for each in page.alerts]

    list_alerts = items_of(_alert_pages)


class BillingClient(BlockingUnaryClient):
    """Blocking client of the billing API. `AsyncBillingClient` documents every call.

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
    export_credit_note = blocking(AsyncBillingClient.export_credit_note)
