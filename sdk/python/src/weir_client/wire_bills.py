"""From the messages about months, invoices and corrections to the client's values."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import billing_service_pb2 as billing_pb
from weir.v1 import months_pb2 as pb
from weir.v1 import types_pb2

from weir_client import bills
from weir_client.money import PICOS_PER_UNIT, Money
from weir_client.wire import money, time_of

_MONTH_STATES = {
    pb.MONTH_STATE_OPEN: bills.MonthState.OPEN,
    pb.MONTH_STATE_CLOSING: bills.MonthState.CLOSING,
    pb.MONTH_STATE_CLOSED: bills.MonthState.CLOSED,
}
_ADJUSTMENT_STATES = {
    pb.ADJUSTMENT_STATE_PROPOSED: bills.AdjustmentState.PROPOSED,
    pb.ADJUSTMENT_STATE_APPROVED: bills.AdjustmentState.APPROVED,
    pb.ADJUSTMENT_STATE_REJECTED: bills.AdjustmentState.REJECTED,
}
_PAYMENT_STATES = {
    number: bills.PaymentState(name.removeprefix("PAYMENT_STATE_").lower()) for name, number in pb.PaymentState.items()
}
FORMAT_NUMBERS = {
    bills.DocumentFormat.JSON: pb.MONTH_DOCUMENT_FORMAT_JSON,
    bills.DocumentFormat.CSV: pb.MONTH_DOCUMENT_FORMAT_CSV,
}


def month_state(number: pb.MonthState.ValueType) -> bills.MonthState:
    """Where a month stands."""
    return _MONTH_STATES.get(number, bills.MonthState.UNSPECIFIED)


def month(message: pb.Month) -> bills.Month:
    """One month."""
    return bills.Month(
        organization_name=message.organization_name,
        organization_id=message.organization_id,
        month=message.month,
        state=month_state(message.state),
        closing_time=_time(message.closing_time, message.HasField("closing_time")),
        closing_by=message.closing_by,
        close_time=_time(message.close_time, message.HasField("close_time")),
        closed_by=message.closed_by,
        invoice_number=message.invoice_number,
        total=money(message.total) if message.HasField("total") else None,
        json_sha256=message.json_sha256,
        csv_sha256=message.csv_sha256,
        report_format=message.report_format,
        receipts_root=message.receipts_root,
        payments=tuple(payment(each) for each in message.payments),
    )


def payment(message: pb.InvoicePayment) -> bills.InvoicePayment:
    """One invoice at Stripe."""
    return bills.InvoicePayment(
        stripe_invoice_id=message.stripe_invoice_id,
        stripe_number=message.stripe_number,
        state=_PAYMENT_STATES.get(message.state, bills.PaymentState.UNSPECIFIED),
        amount_due=money(message.amount_due),
        amount_paid=money(message.amount_paid),
        hosted_url=message.hosted_url,
        finalize_time=_time(message.finalize_time, message.HasField("finalize_time")),
        pay_time=_time(message.pay_time, message.HasField("pay_time")),
        failure_time=_time(message.failure_time, message.HasField("failure_time")),
    )


def closed_month(message: pb.CloseMonthResponse) -> bills.ClosedMonth:
    """What became of a close."""
    return bills.ClosedMonth(
        month=month(message.month),
        obstacles=tuple(bills.Obstacle(each.kind, each.description) for each in message.obstacles),
        already_closed=message.already_closed,
    )


def verification(message: pb.VerifyMonthResponse) -> bills.MonthVerification:
    """What the ledger makes of a closed month."""
    return bills.MonthVerification(
        month=month(message.month),
        json_sha256=message.json_sha256,
        csv_sha256=message.csv_sha256,
        reproduced=message.reproduced,
        differences=tuple(message.differences),
    )


def charges(message: billing_pb.GetMonthReportResponse) -> tuple[bills.MonthCharge, ...]:
    """The lines beside the usage."""
    return tuple(
        bills.MonthCharge(
            kind=pb.ChargeKind.Name(each.kind).removeprefix("CHARGE_KIND_").lower(),
            description=each.description,
            amount=money(each.amount),
            rounded_amount=money(each.rounded_amount),
            model=each.model,
            token_count=each.token_count,
            source_id=each.source_id,
        )
        for each in message.charges
    )


def credit_notes(message: billing_pb.GetMonthReportResponse) -> tuple[bills.CreditNoteSummary, ...]:
    """The credit notes of a month."""
    return tuple(
        bills.CreditNoteSummary(each.number, each.invoice_number, money(each.amount), each.reason) for each in message.credit_notes
    )


def prepaid_credit(message: pb.PrepaidCreditSummary) -> bills.PrepaidCredit:
    """Prepaid credit of a month."""
    return bills.PrepaidCredit(money(message.granted), money(message.expired), money(message.left))


def invoice(message: pb.GetInvoiceResponse) -> bills.Invoice:
    """An invoice with its credit notes."""
    told = message.invoice
    return bills.Invoice(
        number=told.number,
        organization_id=told.organization_id,
        organization_name=told.organization_name,
        month=told.month,
        issue_time=_time(told.issue_time, told.HasField("issue_time")),
        issued_by=told.issued_by,
        lines=tuple(_invoice_line(each) for each in told.lines),
        exact_total=money(told.exact_total),
        carried_in=money(told.carried_in),
        carried_out=money(told.carried_out),
        total=money(told.total),
        credited=money(told.credited),
        tax_note=told.tax_note,
        credit_notes=tuple(adjustment(each) for each in message.credit_notes),
        payments=tuple(payment(each) for each in told.payments),
    )


def _invoice_line(message: pb.InvoiceLine) -> bills.InvoiceLine:
    return bills.InvoiceLine(
        kind=message.kind,
        description=message.description,
        exact_amount=money(message.exact_amount),
        amount=money(message.amount),
        model=message.model,
        price_version=message.price_version,
        token_kind=message.token_kind,
        token_count=message.token_count,
        unit_price_picos=message.unit_price_picos,
        usage_month=message.usage_month,
        source_id=message.source_id,
    )


def adjustment(message: pb.Adjustment) -> bills.Adjustment:
    """An adjustment or a credit note."""
    return bills.Adjustment(
        adjustment_id=message.adjustment_id,
        organization_id=message.organization_id,
        amount=money(message.amount),
        reason=message.reason,
        invoice_number=message.invoice_number,
        state=_ADJUSTMENT_STATES.get(message.state, bills.AdjustmentState.UNSPECIFIED),
        author=message.author,
        create_time=_time(message.create_time, message.HasField("create_time")),
        decided_by=message.decided_by,
        decide_time=_time(message.decide_time, message.HasField("decide_time")),
        billing_month=message.billing_month,
        credit_note_number=message.credit_note_number,
    )


def money_message(amount: Money) -> types_pb2.Money:
    """An amount, for a request."""
    units, picos = divmod(abs(amount.picos), PICOS_PER_UNIT)
    sign = -1 if amount.picos < 0 else 1
    return types_pb2.Money(currency_code=amount.currency_code, units=sign * units, picos=sign * picos)


def _time(stamp: Timestamp, given: bool) -> datetime | None:
    return time_of(stamp) if given else None
