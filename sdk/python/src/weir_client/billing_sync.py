"""The blocking twin of the billing client."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from weir_client.accounts import MonthReport
from weir_client.billing import AsyncBillingClient
from weir_client.billing_usage import UsageCalls
from weir_client.bills import Adjustment, ClosedMonth, DocumentFormat, Invoice, Month, MonthVerification
from weir_client.connection import UNARY_TIMEOUT_S
from weir_client.loop_thread import LoopThread
from weir_client.tls import TlsOptions
from weir_client.values import Money


class BillingClient(UsageCalls):
    """Reads the bill, closes months and corrects. See `AsyncBillingClient` for every call and its errors."""

    _client: AsyncBillingClient

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = UNARY_TIMEOUT_S,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Settles where to connect. Raises: Unauthenticated if there is no key."""
        self._client = AsyncBillingClient(address, api_key, timeout=timeout, **tls)
        self._thread = LoopThread(self._client)

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._client.address

    def get_month_report(self, organization: str, month: str) -> MonthReport:
        """One calendar month (UTC, `YYYY-MM`) of an organization."""
        return self._thread.run(lambda: self._client.get_month_report(organization, month))

    def get_month_document(self, organization: str, month: str, document_format: DocumentFormat) -> bytes:
        """The report of a month as a document."""
        return self._thread.run(lambda: self._client.get_month_document(organization, month, document_format))

    def list_months(self, organization: str) -> list[Month]:
        """The months of an organization, the latest first."""
        return self._thread.run(lambda: self._client.list_months(organization))

    def close_month(
        self,
        organization: str,
        month: str,
        *,
        leave_running: bool = False,
        before_first: bool = False,
        corrected_by: str = "",
        validate_only: bool = False,
    ) -> ClosedMonth:
        """Closes a month for good and issues its invoice."""
        return self._thread.run(
            lambda: self._client.close_month(
                organization,
                month,
                leave_running=leave_running,
                before_first=before_first,
                corrected_by=corrected_by,
                validate_only=validate_only,
            )
        )

    def verify_month(self, organization: str, month: str) -> MonthVerification:
        """Makes a closed month's report again and compares it."""
        return self._thread.run(lambda: self._client.verify_month(organization, month))

    def get_invoice(self, number: str = "", *, organization: str = "", month: str = "") -> Invoice:
        """One invoice, by its number or by organization and month."""
        return self._thread.run(lambda: self._client.get_invoice(number, organization=organization, month=month))

    def create_adjustment(self, organization: str, amount: Money, reason: str, *, request_id: str | None = None) -> Adjustment:
        """Proposes a line for the next invoice."""
        return self._thread.run(lambda: self._client.create_adjustment(organization, amount, reason, request_id=request_id))

    def create_credit_note(self, invoice_number: str, amount: Money, reason: str, *, request_id: str | None = None) -> Adjustment:
        """Proposes to give back a part of an invoice."""
        return self._thread.run(lambda: self._client.create_credit_note(invoice_number, amount, reason, request_id=request_id))

    def approve_adjustment(self, adjustment_id: str) -> Adjustment:
        """Approves what somebody else proposed, and posts it."""
        return self._thread.run(lambda: self._client.approve_adjustment(adjustment_id))

    def reject_adjustment(self, adjustment_id: str) -> Adjustment:
        """Rejects it, for good."""
        return self._thread.run(lambda: self._client.reject_adjustment(adjustment_id))

    def list_adjustments(self, organization: str, *, undecided_only: bool = False) -> list[Adjustment]:
        """Adjustments and credit notes of an organization, the latest first."""
        return self._thread.run(lambda: self._client.list_adjustments(organization, undecided_only=undecided_only))

    def __enter__(self) -> Self:
        self._thread.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.close()
