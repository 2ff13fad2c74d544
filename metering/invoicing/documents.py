"""Documents as issued: drawn once, kept with their issuer and digest, and never drawn again.

A month's document is drawn in the transaction of its close, and a credit note's in the transaction
of its approval. Every export returns the kept bytes, so settings, fonts, locale and releases have
no influence on them. A document issued before this was kept is drawn and kept with its first
export.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import pickle
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from psycopg.types.json import Jsonb
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from common.processes import inherited
from metering.core.errors import InvalidValue, InvariantViolated
from metering.core.models import Organization, record_of
from metering.invoicing.adjustments import AdjustmentRecord
from metering.invoicing.invoice_document import (
    InvoiceDocument,
    Issuer,
    credit_note_document,
    invoice_document,
    shown_by_helvetica,
)
from metering.invoicing.invoices import find_invoice_row
from metering.invoicing.month_report import MonthReport
from metering.ledger.ledger import month_bounds, month_text
from metering.store.db import Sessions
from metering.tenants.billing_profiles import ADDRESS_FIELDS, BillingProfile, billing_profile

# Seconds for a document, and for each of its lines, on a busy machine.
DRAWING_S, LINE_S = 60.0, 0.02
PAUSE_S = 300.0  # of the transaction that issues a document: time for some ten thousand lines
SHOWN_MAX = 5  # characters without a glyph that an error names
Draw = Callable[[InvoiceDocument], Awaitable[bytes]]

# A document is drawn within the transaction that issues it.
LONG_PAUSE = text(f"SET LOCAL idle_in_transaction_session_timeout = '{PAUSE_S:.0f}s'")


@dataclass(frozen=True, slots=True)
class IssuedDocument:
    """A stored PDF and the issuer printed on it."""

    issuer: Issuer
    pdf: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.pdf).hexdigest()


class DrawingFailed(RuntimeError):
    """The process that draws a PDF failed; the message has its error output."""


class Drawer:
    """Renderer that draws one document at a time, each in a child process."""

    def __init__(self) -> None:
        self._lock = asyncio.Semaphore(1)

    async def draw(self, document: InvoiceDocument) -> bytes:
        """Draw the document as PDF. Raises: DrawingFailed, TimeoutError."""
        line_count = sum(len(group.lines) for group in document.usage or ())
        async with self._lock, asyncio.timeout(DRAWING_S + LINE_S * line_count):
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "metering.invoicing.invoice_pdf",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=inherited(),
            )
            try:
                pdf, error = await child.communicate(pickle.dumps(document))
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        if child.returncode != 0:
            raise DrawingFailed(error.decode(errors="replace").strip())
        return pdf


KEEP = text("""
INSERT INTO issued_documents (organization_id, name, issuer, pdf, pdf_sha256)
VALUES (:organization_id, :name, :issuer, :pdf, :sha256)
ON CONFLICT DO NOTHING
""")
KEPT = text(
    "SELECT * FROM issued_documents WHERE organization_id = :organization_id AND name = :name"
)
# The issuer on the first document of an invoice, as earlier releases kept it.
LETTERHEAD = text("""
SELECT l.*
FROM invoice_letterheads l
JOIN invoices i ON i.id = l.invoice_id
WHERE i.organization_id = :organization_id AND i.month = :month
""")


async def keep_document(
    session: AsyncSession, organization_id: uuid.UUID, name: str, issuer: Issuer, pdf: bytes
) -> IssuedDocument:
    """Store a document by name unless one is stored; return the stored one.

    `name` is a month `YYYY-MM` or the number of a credit note.
    """
    values = {"issuer": Jsonb(issuer.as_json()), "pdf": pdf, "sha256": hashlib.sha256(pdf).digest()}
    key = {"organization_id": organization_id, "name": name}
    await session.execute(KEEP, values | key)
    return _checked((await session.execute(KEPT, key)).one())


async def kept_document(
    session: AsyncSession, organization_id: uuid.UUID, name: str
) -> IssuedDocument | None:
    """Read a stored document; None if there is none. Raises: InvariantViolated if altered."""
    key = {"organization_id": organization_id, "name": name}
    row = (await session.execute(KEPT, key)).one_or_none()
    return None if row is None else _checked(row)


def _checked(row: Row[Any]) -> IssuedDocument:
    found = IssuedDocument(Issuer.from_json(row.issuer), bytes(row.pdf))
    if found.sha256 != row.pdf_sha256.hex():
        raise InvariantViolated(
            f"the document {row.name} of organization {row.organization_id} was changed: its PDF"
            f" has the SHA-256 {found.sha256}, and had {row.pdf_sha256.hex()} when it was issued;"
            " restore it from a backup"
        )
    return found


async def issue_month(
    session: AsyncSession, report: MonthReport, issuer: Issuer, draw: Draw
) -> IssuedDocument:
    """Draw and store a month's document in the transaction that closes the month."""
    await session.execute(LONG_PAUSE)
    pdf = await draw(invoice_document(report, issuer))
    return await keep_document(session, report.organization_id, report.month, issuer, pdf)


async def document_of_month(
    sessions: Sessions, report: MonthReport, issuer: Issuer, draw: Draw
) -> IssuedDocument:
    """Return a month's document: the stored one if the month is closed, else drawn now.

    `issuer` is printed on documents that are not stored yet. A month closed by an earlier release
    without a document gets one here, unless its invoice lacks an issuer.
    """
    key = {
        "organization_id": report.organization_id,
        "month": month_bounds(report.month)[0].date(),
    }
    if report.closed is not None:
        async with sessions() as session:
            found = await kept_document(session, report.organization_id, report.month)
            if found is not None:
                return found
            printed = (await session.execute(LETTERHEAD, key)).one_or_none()
        if printed is not None:
            issuer = record_of(Issuer, printed, font=issuer.font, bold_font=issuer.bold_font)
    drawn = IssuedDocument(issuer, await draw(invoice_document(report, issuer)))
    if report.closed is None or (report.closed.invoice_number and not issuer.name):
        return drawn
    async with sessions.begin() as session:
        return await keep_document(session, report.organization_id, report.month, issuer, drawn.pdf)


async def document_of_credit_note(
    session: AsyncSession, note: AdjustmentRecord, issuer: Issuer, draw: Draw
) -> IssuedDocument:
    """Return the document of an approved credit note; the first call draws and stores it.

    `issuer` is printed on a new document, or the corrected invoice's issuer if it is incomplete.
    """
    found = await kept_document(session, note.organization_id, note.credit_note_number)
    if found is not None:
        return found
    owner = await session.get_one(Organization, note.organization_id)
    profile = await billing_profile(session, owner.id) or BillingProfile()
    if issuer.missing:
        invoice = await find_invoice_row(session, note.invoice_number)
        corrected = await kept_document(session, owner.id, month_text(invoice.month))
        if corrected is not None:
            printed = corrected.issuer
            issuer = replace(printed, font=issuer.font, bold_font=issuer.bold_font)
    await session.execute(LONG_PAUSE)
    pdf = await draw(credit_note_document(note, owner, profile, issuer))
    return await keep_document(session, owner.id, note.credit_note_number, issuer, pdf)


async def characters_not_shown(texts: tuple[str, ...], issuer: Issuer) -> str:
    """Find the characters that the issuer's fonts lack, each once. Raises: InvalidValue."""
    shows = await asyncio.to_thread(_shown_by, issuer) if issuer.font else shown_by_helvetica
    return "".join(dict.fromkeys(each for each in "".join(texts) if not shows(each)))


async def check_shown(profile: BillingProfile, issuer: Issuer) -> None:
    """Raise InvalidValue for the first field with characters that the issuer's fonts lack."""
    for name in ("legal_name", *ADDRESS_FIELDS, "tax_id"):
        if missing := await characters_not_shown((getattr(profile, name),), issuer):
            shown = ", ".join(f"{each} (U+{ord(each):04X})" for each in missing[:SHOWN_MAX])
            raise InvalidValue(
                name,
                f"no font shows {shown}: set WEIR_INVOICE_FONT to a TrueType file that has these"
                " characters, or write it in other letters",
            )


@functools.lru_cache(maxsize=1)
def _shown_by(issuer: Issuer) -> Callable[[str], bool]:
    # Loads reportlab, which most processes never need.
    from metering.invoicing.invoice_pdf import load_type

    return load_type(issuer).shows
