"""The asyncio client of the billing API: reports, months, invoices, corrections."""

from __future__ import annotations

import uuid

from weir.v1 import billing_service_pb2 as report_pb
from weir.v1 import months_pb2 as pb

from weir_client import wire
from weir_client.accounts import MonthReport
from weir_client.alerts import AsyncAlertCalls
from weir_client.billing_usage import AsyncUsageCalls
from weir_client.bills import Adjustment, ClosedMonth, DocumentFormat, Invoice, Month, MonthVerification
from weir_client.money import Money

_FORMATS = wire.numbers(DocumentFormat, pb.MonthDocumentFormat.DESCRIPTOR)


class AsyncBillingClient(AsyncUsageCalls, AsyncAlertCalls):
    """Reads the bill, closes months and corrects. Reading needs a key with the scope `billing` (its own organization only) or
    `admin`, everything else `admin`.

    Organizations are given by name or id, months as `YYYY-MM` in UTC. Every call raises WeirError: NotFound for what is not there,
    InvalidRequest for a bad value, FailedPrecondition for what is not possible as things stand.
    """

    async def get_month_report(self, organization: str, month: str) -> MonthReport:
        """One month of an organization; of one that is not closed, what the invoice would be now."""
        request = report_pb.GetMonthReportRequest(organization=organization, month=month)
        return wire.read(MonthReport, await self._call(self._stub.GetMonthReport, request))

    async def get_month_document(self, organization: str, month: str, document_format: DocumentFormat) -> bytes:
        """The report as a document: of a closed month, the same bytes for ever, whose SHA-256 `list_months` tells."""
        request = pb.GetMonthDocumentRequest(organization=organization, month=month, format=_FORMATS[document_format])
        return (await self._call(self._stub.GetMonthDocument, request)).content

    async def list_months(self, organization: str) -> list[Month]:
        """The months of an organization, the latest first."""
        response = await self._call(self._stub.ListMonths, pb.ListMonthsRequest(organization=organization))
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
        request = pb.CloseMonthRequest(
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
        request = pb.VerifyMonthRequest(organization=organization, month=month)
        return wire.read(MonthVerification, await self._call(self._stub.VerifyMonth, request))

    async def get_invoice(self, number: str = "", *, organization: str = "", month: str = "") -> Invoice:
        """One invoice, by its number or by organization and month."""
        request = pb.GetInvoiceRequest(number=number, organization=organization, month=month)
        response = await self._call(self._stub.GetInvoice, request)
        credit_notes = tuple(wire.read(Adjustment, each) for each in response.credit_notes)
        return wire.read(Invoice, response.invoice, credit_notes=credit_notes)

    async def create_adjustment(
        self, organization: str, amount: Money, reason: str, *, request_id: str | None = None
    ) -> Adjustment:
        """Proposes a line for the next invoice: what the customer owes more, negative for less. Somebody else approves it.

        request_id: a UUID of your own; the same call with it again makes nothing new.
        """
        request = pb.CreateAdjustmentRequest(
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
        request = pb.CreateCreditNoteRequest(
            invoice_number=invoice_number,
            amount=wire.money_message(amount),
            reason=reason,
            request_id=request_id or str(uuid.uuid4()),
        )
        return wire.read(Adjustment, (await self._call(self._stub.CreateCreditNote, request)).credit_note)

    async def approve_adjustment(self, adjustment_id: str) -> Adjustment:
        """Approves what somebody else proposed, an adjustment or a credit note, and posts it."""
        request = pb.ApproveAdjustmentRequest(adjustment_id=adjustment_id)
        return wire.read(Adjustment, (await self._call(self._stub.ApproveAdjustment, request)).adjustment)

    async def reject_adjustment(self, adjustment_id: str) -> Adjustment:
        """Rejects an adjustment or a credit note, for good."""
        request = pb.RejectAdjustmentRequest(adjustment_id=adjustment_id)
        return wire.read(Adjustment, (await self._call(self._stub.RejectAdjustment, request)).adjustment)

    async def list_adjustments(self, organization: str, *, undecided_only: bool = False) -> list[Adjustment]:
        """Adjustments and credit notes of an organization, the latest first."""
        request = pb.ListAdjustmentsRequest(organization=organization, undecided_only=undecided_only)
        response = await self._call(self._stub.ListAdjustments, request)
        return [wire.read(Adjustment, each) for each in response.adjustments]
