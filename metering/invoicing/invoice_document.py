"""Invoice document: plain values in reading order, made from a month report and an issuer.

Pure: the same report and issuer give the same document, which `invoice_pdf.py` draws and
`documents.py` keeps. Amounts are picos throughout; nothing is priced or rounded here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.settings import SettingInvalid, setting
from metering.core.money import PICO_DIGITS, exact_text
from metering.invoicing.month_report import (
    FORMAT_OF_PARTS,
    TAX_NOTE,
    MonthReport,
    ReportLine,
)
from metering.ledger.ledger import month_bounds
from metering.plans.plans import LineKind
from metering.tenants.billing_profiles import BillingProfile

if TYPE_CHECKING:  # the process that draws does without them
    from metering.core.models import Organization
    from metering.invoicing.adjustments import AdjustmentRecord


LETTERHEAD_LINES_MAX = 10  # of an address; more would not fit the invoice page
TEXT_CHARS_MAX = 1000  # of a letterhead; more would not fit the invoice page
ISSUER_TEXTS = ("name", "address", "tax_id", "contact", "payment")
DRAFT = "DRAFT, month not closed"
UNBALANCED = "NOT RECONCILED, do not send"
HEADINGS = {LineKind.ADJUSTMENT: "Adjustments", LineKind.CREDIT: "Prepaid credit"}
PLAN_HEADING = "Plan"


@dataclass(frozen=True, slots=True)
class Issuer:
    """Sender of invoices, in letterhead and foot. Without a name, documents are statements.

    `payment` has payment instructions, one per line. `font` and `bold_font` are TrueType files for
    characters beyond Western European ones; None means Helvetica. They are not stored with a
    document, because the PDF embeds their glyphs.
    """

    name: str = ""
    address: tuple[str, ...] = ()
    tax_id: str = ""
    contact: str = ""
    payment: tuple[str, ...] = ()
    font: Path | None = None
    bold_font: Path | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the settings that are needed to issue invoices and are not set."""
        needed = {
            "WEIR_ISSUER_NAME": self.name,
            "WEIR_ISSUER_ADDRESS": self.address,
            "WEIR_ISSUER_PAYMENT": self.payment,
        }
        return tuple(variable for variable, value in needed.items() if not value)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ISSUER_TEXTS}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Issuer:
        lines = {name: tuple(document[name]) for name in ("address", "payment")}
        return cls(**{**document, **lines})


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Lines of one model, each with its amount rounded to minor units, in picos.

    `late_month` is the month of use if it was closed before the usage was posted, else empty.
    """

    model: str
    lines: tuple[tuple[ReportLine, int], ...]
    late_month: str = ""


@dataclass(frozen=True, slots=True)
class AmountLine:
    """A discount, adjustment or credit with its amount. `detail` is small print below it.

    `billed_picos` is the rounded amount; None if it is not part of the total.
    """

    description: str
    amount_picos: int
    billed_picos: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A row of the sums at the end; the `strong` row is the amount owed.

    `exact_picos` and `billed_picos` are the amounts before and after rounding, None if the row is
    not in that column. Each column adds up to the amount owed.
    """

    label: str
    exact_picos: int | None = None
    billed_picos: int | None = None
    text: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class InvoiceDocument:
    """Content of an invoice, draft, statement or credit note.

    `mark` is a warning on every page, empty on a final invoice. `facts` are labels and texts beside
    the customer. `usage` is None on a credit note. `sections` are headings with amounts. `summary`
    ends with the amount owed. `customer_lines` are the customer's address, tax id and e-mail.
    """

    title: str
    mark: str
    reference: str
    issuer: Issuer
    customer_name: str
    customer_id: str
    currency_code: str
    facts: tuple[tuple[str, str], ...]
    usage: tuple[TokenGroup, ...] | None
    sections: tuple[tuple[str, tuple[AmountLine, ...]], ...]
    summary: tuple[SummaryRow, ...]
    notes: tuple[str, ...]
    customer_lines: tuple[str, ...] = ()


def grouped(text: str) -> str:
    """Insert thousands separators before the decimal point: `-1,234.5`."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, point, fraction = digits.partition(".")
    assert len(fraction) <= PICO_DIGITS
    return f"{sign}{int(whole):,}{point}{fraction}"


def shown_by_helvetica(character: str) -> bool:
    """Return True if PDF's built-in fonts have the character; they cover Western Europe."""
    return character >= " " and character.encode("cp1252", errors="ignore") != b""


def printable(text: str) -> str:
    """Validate printable text. `|` separates its lines. Raises: ValueError."""
    if not text.isprintable() or len(text) > TEXT_CHARS_MAX:
        raise ValueError(
            f"must be at most {TEXT_CHARS_MAX} printable characters, lines separated by |"
        )
    return text


def is_truetype(path: Path) -> bool:
    """Return whether a file starts like a TrueType font, the only format that invoices can use."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (b"\x00\x01\x00\x00", b"true")
    except OSError:
        return False


def lines_of(text: str) -> tuple[str, ...]:
    """Split a text at `|` into lines."""
    return tuple(filter(None, (line.strip() for line in text.split("|"))))


@dataclass(frozen=True, slots=True)
class IssuerSettings:
    """Letterhead and fonts of invoices."""

    # Name of the issuer on invoices, which need name, address and payment.
    name: str = setting("WEIR_ISSUER_NAME", "", printable)
    # Address of the issuer; lines separated by `|`.
    address: str = setting("WEIR_ISSUER_ADDRESS", "", printable)
    # Tax id of the issuer.
    tax_id: str = setting("WEIR_ISSUER_TAX_ID", "", printable)
    # Contact of the issuer.
    contact: str = setting("WEIR_ISSUER_CONTACT", "", printable)
    # Payment instructions; lines separated by `|`.
    payment: str = setting("WEIR_ISSUER_PAYMENT", "", printable)
    # TrueType font for invoices, required for letters beyond Western European ones.
    font: str = setting("WEIR_INVOICE_FONT", "", str)
    # Bold form of WEIR_INVOICE_FONT; by default the same file.
    bold_font: str = setting("WEIR_INVOICE_FONT_BOLD", "", str)

    def build(self) -> Issuer:
        """Build the issuer that invoices show: letterhead and fonts.

        Raises SettingInvalid for too many lines, text that needs a font, or an unreadable font.
        """
        for spec in fields(self):
            variable, text = spec.metadata["variable"], getattr(self, spec.name)
            if spec.name in ("font", "bold_font"):
                if text and not is_truetype(Path(text)):
                    raise SettingInvalid(
                        f"{variable}={text!r}: must be a TrueType font, a file that ends in .ttf"
                    )
                continue
            if len(lines_of(text)) > LETTERHEAD_LINES_MAX:
                raise SettingInvalid(
                    f"{variable} must have at most {LETTERHEAD_LINES_MAX} lines, separated by |"
                )
            if not self.font and not all(shown_by_helvetica(each) for each in text):
                raise SettingInvalid(
                    f"{variable}={text!r}: set WEIR_INVOICE_FONT to a TrueType font that has these"
                    " letters"
                )
        return Issuer(
            name=self.name,
            address=lines_of(self.address),
            tax_id=self.tax_id,
            contact=self.contact,
            payment=lines_of(self.payment),
            font=Path(self.font) if self.font else None,
            bold_font=Path(self.bold_font) if self.bold_font else None,
        )


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


def credit_note_document(
    note: AdjustmentRecord, owner: Organization, profile: BillingProfile, issuer: Issuer
) -> InvoiceDocument:
    """Build the document of an approved credit note."""
    assert note.decided_at is not None
    line = AmountLine(
        f"Credit to invoice {note.invoice_number}",
        note.amount_picos,
        note.amount_picos,
        note.reason,
    )
    return InvoiceDocument(
        title="Credit note",
        mark="",
        reference=note.credit_note_number,
        issuer=replace(issuer, payment=()),
        customer_name=profile.legal_name or owner.name,
        customer_lines=profile.lines,
        customer_id=f"{owner.name} · {owner.id}" if profile.legal_name else str(owner.id),
        currency_code=note.currency_code,
        facts=(
            ("Corrected invoice", note.invoice_number),
            ("Credit note number", note.credit_note_number),
            ("Currency", note.currency_code),
            ("Date", f"{note.decided_at.astimezone(UTC):%Y-%m-%d}"),
        ),
        usage=None,
        sections=(("Credit", (line,)),),
        summary=(
            SummaryRow("Tax", text=TAX_NOTE.removeprefix("tax ")),
            SummaryRow("Total in your favour", note.amount_picos, note.amount_picos, strong=True),
        ),
        notes=("This amount is paid back. It is not deducted from a later invoice.",),
    )


def title(report: MonthReport, issuer: Issuer) -> str:
    """Choose the title: "Statement" unless there are an issuer and an invoice number."""
    if report.closed is None:
        return "Draft invoice" if issuer.name else "Draft statement"
    return "Invoice" if issuer.name and report.closed.invoice_number else "Statement"


def facts(report: MonthReport, number: str) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts shown beside the customer, the period first."""
    begins, ends = month_bounds(report.month)
    yield "Billing period", f"{begins:%Y-%m-%d} to {ends - timedelta(days=1):%Y-%m-%d}"
    yield "Time zone", "UTC"
    yield "Currency", report.currency_code
    yield (
        "Invoice number",
        number or (DRAFT if report.closed is None else "none: nothing to invoice"),
    )
    if report.closed is not None:
        yield "Date", f"{report.closed.closed_at.astimezone(UTC):%Y-%m-%d}"


def usage(report: MonthReport) -> Iterator[TokenGroup]:
    """Group the lines by model, in the report's order: the month's own usage, then late usage."""
    groups: dict[tuple[str, str], list[tuple[ReportLine, int]]] = defaultdict(list)
    for line, billed_picos in zip(report.lines, report.rounded_parts_picos, strict=False):
        groups[line.late_month, line.model].append((line, billed_picos))
    for (late_month, model), lines in sorted(groups.items(), key=lambda item: bool(item[0][0])):
        yield TokenGroup(model, tuple(lines), late_month)


def sections(report: MonthReport) -> Iterator[tuple[str, tuple[AmountLine, ...]]]:
    """Yield headed amounts: plan, adjustments, credit, then credit notes (refunded separately)."""
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
        yield "Credit notes of this month: refunded separately, not in the total", tuple(returned)


def summary(report: MonthReport) -> Iterator[SummaryRow]:
    """Yield the rows from the usage to the amount owed, leaving out empty ones."""
    sums: dict[str, tuple[int, int]] = {"Usage": (0, 0)}
    labels = (
        *("Late usage of earlier months" if line.late_month else "Usage" for line in report.lines),
        *(HEADINGS.get(charge.kind, PLAN_HEADING) for charge in report.charges),
    )
    amounts = zip(report.amounts_picos, report.rounded_parts_picos, strict=True)
    for label, (exact, billed) in zip(labels, amounts, strict=True):
        before = sums.get(label, (0, 0))
        sums[label] = (before[0] + exact, before[1] + billed)
    for label in ("Usage", "Late usage of earlier months", PLAN_HEADING, *HEADINGS.values()):
        if label in sums:
            yield SummaryRow(label, *sums[label])
    if report.carried_in_picos:
        yield SummaryRow("Rounding carried from earlier invoices", report.carried_in_picos)
    if report.carried_out_picos:
        yield SummaryRow("Rounding carried forward to the next invoice", -report.carried_out_picos)
    if report.rounding_picos:
        yield SummaryRow("Rounding", billed_picos=report.rounding_picos)
    yield SummaryRow("Tax", text=TAX_NOTE.removeprefix("tax "))
    owed = report.total_rounded_picos
    label = "Total" if owed >= 0 else "Total in your favour"
    yield SummaryRow(label, owed, owed, strong=True)


def notes(report: MonthReport, issuer: Issuer) -> Iterator[str]:
    counts, currency = report.request_counts, report.currency_code
    if not issuer.name:
        yield (
            "This is a statement, not an invoice: no issuer is set. The operator sets one with"
            " WEIR_ISSUER_NAME."
        )
    if report.closed is None:
        yield (
            "This month is not closed, so the amounts may still change. The total is that of an"
            " invoice made now."
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
        f" {counts.failed_count:,} failed. You pay for the tokens that were delivered."
    )
    yield (
        "An exact amount is quantity times price. "
        + (
            "Only the total is rounded. The column Amount splits it, so a line may differ from its"
            " own rounding by the smallest unit of the currency."
            if report.format_version == FORMAT_OF_PARTS
            else 'Each line is rounded by itself; the line "Rounding" makes the lines add up.'
        )
        + " Tokens are counted at the time they were settled, in UTC."
    )
    if any(
        (report.credit.granted_picos, report.credit.expired_picos, report.credit.remaining_picos)
    ):
        yield (
            f"Prepaid credit: {currency} {exact_text(report.credit.granted_picos, currency)}"
            f" granted and {exact_text(report.credit.expired_picos, currency)} expired in this"
            f" month, {exact_text(report.credit.remaining_picos, currency)} left at its end."
        )
    if report.credit.refunded_picos:
        yield (
            f"The account is closed. Of its prepaid credit, {currency}"
            f" {exact_text(report.credit.refunded_picos, currency)} were left, and are paid back."
        )
    if report.closed is not None and report.closed.receipts_root:
        yield f"Root of the receipts of this month: {report.closed.receipts_root}"
