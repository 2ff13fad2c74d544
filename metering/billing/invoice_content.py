"""From a month report to the document that the customer reads: an invoice, a draft of one, or a statement. Pure.

Every amount stands in the report already: nothing is priced or rounded here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

from metering.billing.invoice_document import AmountLine, AmountSection, InvoiceDocument, Issuer, SummaryRow, TokenGroup, TokenLine
from metering.billing.reports import TAX_NOTE, ChargeKind, MonthReport, month_bounds
from metering.money import exact_text
from metering.tenants.billing_profiles import BillingProfile

DRAFT = "DRAFT, month not closed"
UNBALANCED = "NOT RECONCILED, do not send"
HEADINGS = {ChargeKind.ADJUSTMENT: "Adjustments", ChargeKind.CREDIT: "Prepaid credit"}
PLAN_HEADING = "Plan"


def invoice_document(report: MonthReport, issuer: Issuer) -> InvoiceDocument:
    """The document of a month."""
    number = report.closed.invoice_number if report.closed else ""
    profile = report.billing_profile or BillingProfile()
    return InvoiceDocument(
        title=title(report, issuer),
        mark=UNBALANCED if not report.reconciliation.balanced else "" if report.closed else DRAFT,
        reference=number,
        issuer=issuer,
        customer_name=profile.legal_name or report.organization_name,
        customer_lines=profile.lines,
        customer_id=f"{report.organization_name} · {report.organization_id}" if profile.legal_name else str(report.organization_id),
        currency_code=report.currency_code,
        facts=tuple(facts(report, number)),
        usage=tuple(usage(report)),
        sections=tuple(sections(report)),
        summary=tuple(summary(report)),
        notes=tuple(notes(report, issuer)),
    )


def title(report: MonthReport, issuer: Issuer) -> str:
    """An invoice has an issuer and a number; what lacks one of them is a statement of the same amounts."""
    if report.closed is None:
        return "Draft invoice" if issuer.name else "Draft statement"
    return "Invoice" if issuer.name and report.closed.invoice_number else "Statement"


def facts(report: MonthReport, number: str) -> Iterator[tuple[str, str]]:
    """What stands beside the customer; the period comes first."""
    begins, ends = month_bounds(report.month)
    yield "Billing period", f"{begins:%Y-%m-%d} to {ends - timedelta(days=1):%Y-%m-%d}"
    yield "Time zone", "UTC"
    yield "Currency", report.currency_code
    yield "Invoice number", number or (DRAFT if report.closed is None else "none: nothing to invoice")
    if report.closed is not None:
        yield "Date", f"{report.closed.closed_at:%Y-%m-%d}"


def usage(report: MonthReport) -> Iterator[TokenGroup]:
    """The lines by model, in the order of the report: the month's own usage first, then what came late."""
    groups: dict[tuple[str, str], list[TokenLine]] = defaultdict(list)
    for line, billed_picos in zip(report.lines, report.rounded_parts_picos, strict=False):
        groups[line.late_month, line.model].append(
            TokenLine(
                token_kind=line.token_kind.value.replace("_", " "),
                tier=line.tier.value,
                price_version=line.price_version,
                unit_price_picos=line.unit_price_picos,
                token_count=line.token_count,
                amount_picos=line.amount_picos,
                billed_picos=billed_picos,
            )
        )
    for (late_month, model), lines in sorted(groups.items(), key=lambda item: bool(item[0][0])):
        yield TokenGroup(model, tuple(lines), late_month)


def sections(report: MonthReport) -> Iterator[AmountSection]:
    """Plan, adjustments and credit, and beside them the credit notes, which are paid back apart."""
    headed: dict[str, list[AmountLine]] = {PLAN_HEADING: [], **{heading: [] for heading in HEADINGS.values()}}
    parts = report.rounded_parts_picos[len(report.lines) :]
    for charge, billed_picos in zip(report.charges, parts, strict=True):
        kind = f"{charge.token_kind.value.replace('_', ' ')} tokens" if charge.token_kind else ""
        count = f"{charge.token_count:,}" if charge.token_count is not None else ""
        detail = " · ".join(filter(None, (charge.model, " ".join(filter(None, (count, kind))))))
        line = AmountLine(charge.description, charge.amount_picos, billed_picos, detail)
        headed[HEADINGS.get(charge.kind, PLAN_HEADING)].append(line)
    for heading, lines in headed.items():
        if lines:
            yield AmountSection(heading, tuple(lines))
    if report.credit_notes:
        returned = (
            AmountLine(f"Credit note {note.number} to invoice {note.invoice_number}", -note.amount_picos, detail=note.reason)
            for note in report.credit_notes
        )
        yield AmountSection("Credit notes of this month: paid back apart, not part of the total", tuple(returned))


def summary(report: MonthReport) -> Iterator[SummaryRow]:
    """From the exact sums to what is owed. Rows that say nothing are left out."""
    late = sum(line.amount_picos for line in report.lines if line.late_month)
    yield SummaryRow("Usage", sum(line.amount_picos for line in report.lines) - late)
    if any(line.late_month for line in report.lines):
        yield SummaryRow("Late usage of earlier months", late)
    by_heading: dict[str, int] = {}
    for charge in report.charges:
        heading = HEADINGS.get(charge.kind, PLAN_HEADING)
        by_heading[heading] = by_heading.get(heading, 0) + charge.amount_picos
    for heading in (PLAN_HEADING, *HEADINGS.values()):
        if heading in by_heading:
            yield SummaryRow(heading, by_heading[heading])
    if report.carried_in_picos:
        yield SummaryRow("Carried over from rounding earlier invoices", report.carried_in_picos)
    if report.carried_out_picos:
        yield SummaryRow("Carried over to the next invoice by rounding", -report.carried_out_picos)
    yield SummaryRow("Tax", text=TAX_NOTE.removeprefix("tax "))
    owed = report.total_rounded_picos
    yield SummaryRow("Total" if owed >= 0 else "Total in your favour", owed, strong=True)


def notes(report: MonthReport, issuer: Issuer) -> Iterator[str]:
    """What a reader needs to trust the numbers."""
    counts, currency = report.request_counts, report.currency_code
    if not issuer.name:
        yield "This is a statement and no invoice: no issuer is set. The operator sets one with WEIR_ISSUER_NAME."
    if report.closed is None:
        yield "The month is not closed: amounts may change, and the total is what the invoice would be now."
    if report.unrated_event_count:
        of = "1 usage event is" if report.unrated_event_count == 1 else f"{report.unrated_event_count:,} usage events are"
        yield f"{of} recorded but not posted yet, and not in these lines."
    if not report.reconciliation.balanced:
        check = report.reconciliation
        yield (
            f"Usage and ledger do not agree: {check.usage_token_count:,} tokens used, {check.ledger_token_count:,} posted, "
            f"{check.unrated_token_count:,} still to be posted."
        )
    yield (
        f"{counts.total_count:,} requests: {counts.completed_count:,} completed, {counts.cancelled_count:,} cancelled, "
        f"{counts.limited_count:,} ended by a limit, {counts.failed_count:,} failed. Tokens that were delivered are billed."
    )
    yield (
        "Exact amounts are quantity times price. They are rounded once, in the total; the column at the right tells what each line "
        "adds to it. Tokens are counted at the time they were settled, in UTC."
    )
    if any((report.credit.granted_picos, report.credit.expired_picos, report.credit.left_picos)):
        yield (
            f"Prepaid credit: {currency} {exact_text(report.credit.granted_picos, currency)} granted and "
            f"{exact_text(report.credit.expired_picos, currency)} expired in this month, "
            f"{exact_text(report.credit.left_picos, currency)} left at its end."
        )
    if report.closed is not None and report.closed.receipts_root:
        yield f"Root of the receipts of this month: {report.closed.receipts_root}"
