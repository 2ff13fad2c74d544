"""Drawing invoices in a process of its own: it takes seconds of computing for a long one, which streams here must not feel.

The child is of this same program (`metering.invoicing.invoice_pdf`): the document goes in, the file comes out. It runs at low
priority, one at a time, is ended with the call that wanted it, and takes its memory with it.
"""

from __future__ import annotations

import asyncio
import pickle
import sys

from common.child_environment import inherited
from metering.invoicing.invoice_document import InvoiceDocument

DRAWING_S = 25.0  # an invoice of a thousand lines takes three on a busy machine; clients give a call half a minute


class DrawingFailed(RuntimeError):
    """The child has ended without a file; the message is what it said."""


class InvoiceDrawer:
    """Draws one document at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def draw(self, document: InvoiceDocument) -> bytes:
        """The document as PDF. Raises: DrawingFailed, TimeoutError."""
        async with self._turn, asyncio.timeout(DRAWING_S):
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
                pdf, said = await child.communicate(pickle.dumps(document))
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        if child.returncode != 0:
            raise DrawingFailed(said.decode(errors="replace").strip())
        return pdf
