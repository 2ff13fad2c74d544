"""Invoice document: plain values in reading order, made from a month report and an issuer.

Pure: the same report and issuer give the same document, which `invoice_pdf.py` draws. Amounts are
picos throughout; nothing is priced or rounded here. A closed month keeps the issuer with which its
document was first written (`letterheads`, append-only by a trigger), whatever the settings say
later.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import record_of
from metering.core.money import PICO_DIGITS, exact_text
from metering.invoicing.month_report import TAX_NOTE, MonthReport, ReportLine
from metering.ledger.ledger import month_bounds
from metering.plans.plans import LineKind
from metering.tenants.billing_profiles import BillingProfile


@dataclass(frozen=True, slots=True)
class Issuer:
    """Sender of the invoice, in letterhead and foot. Without a name the document is a statement.

    payment: payment instructions, one per line. font, bold_font: TrueType files for names beyond
    Western European letters; None for Helvetica.
    """

    name: str = ""
    address: tuple[str, ...] = ()
    tax_id: str = ""
    contact: str = ""
    payment: tuple[str, ...] = ()
    font: Path | None = None
    bold_font: Path | None = None


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Lines of one model, each with its picos in the rounded total.

    late_month: the month of use, if it was closed before the usage was posted.
    """

    model: str
    lines: tuple[tuple[ReportLine, int], ...]
    late_month: str = ""


@dataclass(frozen=True, slots=True)
class AmountLine:
    """An amount and its reason: a discount, an adjustment, a credit. detail: small print below.

    billed_picos: its part of the rounded total; None if it is not part of it.
    """

    description: str
    amount_picos: int
    billed_picos: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A row of the sums at the end. amount_picos: exact; None for text. strong: amount owed."""

    label: str
    amount_picos: int | None = None
    text: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class InvoiceDocument:
    """One invoice, draft or statement.

    mark: warning on every page; empty on a final invoice. facts: label and text, beside the
    customer. sections: amounts of one kind with their heading. summary: sums, the amount owed last.
    customer_lines: address, tax id and e-mail of the customer.
    """

    title: str
    mark: str
    reference: str
    issuer: Issuer
    customer_name: str
    customer_id: str
    currency_code: str
    facts: tuple[tuple[str, str], ...]
    usage: tuple[TokenGroup, ...]
    sections: tuple[tuple[str, tuple[AmountLine, ...]], ...]
    summary: tuple[SummaryRow, ...]
    notes: tuple[str, ...]
    customer_lines: tuple[str, ...] = ()


def grouped(text: str) -> str:
    """Return a decimal number with thousands separators before the point: `-1,234.5`."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, point, fraction = digits.partition(".")
    assert len(fraction) <= PICO_DIGITS
    return f"{sign}{int(whole):,}{point}{fraction}"


def shown_by_helvetica(character: str) -> bool:
    """Return whether PDF's built-in fonts have the character: the letters of Western Europe."""
    return character >= " " and character.encode("cp1252", errors="ignore") != b""


DRAFT = "DRAFT, month not closed"
UNBALANCED = "NOT RECONCILED, do not send"
HEADINGS = {LineKind.ADJUSTMENT: "Adjustments", LineKind.CREDIT: "Prepaid credit"}
PLAN_HEADING = "Plan"


def invoice_document(report: MonthReport, issuer: Issuer) -> InvoiceDocument:
    number = report.closed.invoice_number if report.closed else ""
    profile = report.billing_profile or BillingProfile()
    return InvoiceDocument(
        title=title(report, issuer),
        mark=UNBALANCED if not report.reconciliation.balanced else "" if report.closed else DRAFT,
        reference=number,
        issuer=issuer,
        customer_name=profile.legal_name or report.organization_name,
        customer_lines=profile.lines,
        customer_id=(
            f"{report.organization_name} · {report.organization_id}"
            if profile.legal_name
            else str(report.organization_id)
        ),
        currency_code=report.currency_code,
        facts=tuple(facts(report, number)),
        usage=tuple(usage(report)),
        sections=tuple(sections(report)),
        summary=tuple(summary(report)),
        notes=tuple(notes(report, issuer)),
    )


def title(report: MonthReport, issuer: Issuer) -> str:
    """Return the title: without an issuer and a number, the document is a statement."""
    if report.closed is None:
        return "Draft invoice" if issuer.name else "Draft statement"
    return "Invoice" if issuer.name and report.closed.invoice_number else "Statement"


def facts(report: MonthReport, number: str) -> Iterator[tuple[str, str]]:
    """Yield the facts shown beside the customer, the period first."""
    begins, ends = month_bounds(report.month)
    yield "Billing period", f"{begins:%Y-%m-%d} to {ends - timedelta(days=1):%Y-%m-%d}"
    yield "Time zone", "UTC"
    yield "Currency", report.currency_code
    yield (
        "Invoice number",
        number or (DRAFT if report.closed is None else "none: nothing to invoice"),
    )
    if report.closed is not None:
        yield "Date", f"{report.closed.closed_at:%Y-%m-%d}"


def usage(report: MonthReport) -> Iterator[TokenGroup]:
    """Yield the lines by model, in the report's order: the month's own usage, then late usage."""
    groups: dict[tuple[str, str], list[tuple[ReportLine, int]]] = defaultdict(list)
    for line, billed_picos in zip(report.lines, report.rounded_parts_picos, strict=False):
        groups[line.late_month, line.model].append((line, billed_picos))
    for (late_month, model), lines in sorted(groups.items(), key=lambda item: bool(item[0][0])):
        yield TokenGroup(model, tuple(lines), late_month)


def sections(report: MonthReport) -> Iterator[tuple[str, tuple[AmountLine, ...]]]:
    """Yield plan, adjustments and credit, then the credit notes, which are refunded separately."""
    headed: dict[str, list[AmountLine]] = {
        heading: [] for heading in (PLAN_HEADING, *HEADINGS.values())
    }
    parts = report.rounded_parts_picos[len(report.lines) :]
    for charge, billed_picos in zip(report.charges, parts, strict=True):
        kind = f"{charge.token_kind.value.replace('_', ' ')} tokens" if charge.token_kind else ""
        count = f"{charge.token_count:,}" if charge.token_count is not None else ""
        detail = " · ".join(filter(None, (charge.model, " ".join(filter(None, (count, kind))))))
        line = AmountLine(charge.description, charge.amount_picos, billed_picos, detail)
        headed[HEADINGS.get(charge.kind, PLAN_HEADING)].append(line)
    for heading, lines in headed.items():
        if lines:
            yield heading, tuple(lines)
    if report.credit_notes:
        returned = (
            AmountLine(
                f"Credit note {note.number} to invoice {note.invoice_number}",
                -note.amount_picos,
                detail=note.reason,
            )
            for note in report.credit_notes
        )
        yield "Credit notes of this month: paid back apart, not part of the total", tuple(returned)


def summary(report: MonthReport) -> Iterator[SummaryRow]:
    """Yield the rows from the exact sums to the amount owed. Empty rows are left out."""
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
    counts, currency = report.request_counts, report.currency_code
    if not issuer.name:
        yield (
            "This is a statement, not an invoice: no issuer is set. The operator sets one with"
            " WEIR_ISSUER_NAME."
        )
    if report.closed is None:
        yield (
            "The month is not closed: amounts may change, and the total is what the invoice would"
            " be now."
        )
    if report.unrated_event_count:
        of = (
            "1 usage event is"
            if report.unrated_event_count == 1
            else f"{report.unrated_event_count:,} usage events are"
        )
        yield f"{of} recorded but not posted yet, and not in these lines."
    if not report.reconciliation.balanced:
        check = report.reconciliation
        yield (
            f"Usage and ledger do not agree: {check.usage_token_count:,} tokens used,"
            f" {check.ledger_token_count:,} posted, {check.unrated_token_count:,} still to be"
            " posted."
        )
    yield (
        f"{counts.total_count:,} requests: {counts.completed_count:,} completed,"
        f" {counts.cancelled_count:,} cancelled, {counts.limited_count:,} ended by a limit,"
        f" {counts.failed_count:,} failed. Tokens that were delivered are billed."
    )
    yield (
        "Exact amounts are quantity times price. They are rounded once, in the total; the right"
        " column shows the part of each line. Tokens are counted at the time they were settled, in"
        " UTC."
    )
    if any(
        (report.credit.granted_picos, report.credit.expired_picos, report.credit.remaining_picos)
    ):
        yield (
            f"Prepaid credit: {currency} {exact_text(report.credit.granted_picos, currency)}"
            f" granted and {exact_text(report.credit.expired_picos, currency)} expired in this"
            f" month, {exact_text(report.credit.remaining_picos, currency)} left at its end."
        )
    if report.closed is not None and report.closed.receipts_root:
        yield f"Root of the receipts of this month: {report.closed.receipts_root}"


# Stored fields; address and payment as lines.
LETTERHEAD = ("name", "address", "tax_id", "contact", "payment")
KEPT = text("""
SELECT l.*
FROM invoice_letterheads l
JOIN invoices i ON i.id = l.invoice_id
WHERE i.organization_id = :organization_id AND i.month = :month
""")
KEEP = text("""
INSERT INTO invoice_letterheads (invoice_id, name, address, tax_id, contact, payment)
SELECT id, :name, :address, :tax_id, :contact, :payment
FROM invoices
WHERE organization_id = :organization_id AND month = :month
ON CONFLICT DO NOTHING
""")


async def letterhead_of(
    session: AsyncSession, organization_id: uuid.UUID, month: str, issuer: Issuer
) -> Issuer:
    """Return the issuer on the documents of a month `YYYY-MM`, with the fonts of the one passed.

    For an invoice this is the stored issuer; if there is none, the one passed is stored if it has a
    name. For a month without an invoice it is the one passed. Concurrent first calls get the same
    result. Never commits. Raises: InvalidValue for an invalid month.
    """
    of_month = {"organization_id": organization_id, "month": month_bounds(month)[0].date()}
    if issuer.name:
        lines = {"address": [*issuer.address], "payment": [*issuer.payment]}
        await session.execute(
            KEEP, {name: getattr(issuer, name) for name in LETTERHEAD} | lines | of_month
        )
    kept = (await session.execute(KEPT, of_month)).one_or_none()
    return (
        issuer
        if kept is None
        else record_of(Issuer, kept, font=issuer.font, bold_font=issuer.bold_font)
    )
