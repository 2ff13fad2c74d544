"""Invoices drawn by a child process: same bytes, reported failures, no surviving child."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metering.invoicing.documents import Drawer, DrawingFailed
from metering.invoicing.invoice_document import invoice_document
from metering.invoicing.invoice_pdf import render_pdf
from tests.metering.test_invoice_pdf import ISSUER, REPORT

DOCUMENT = invoice_document(REPORT, ISSUER)


async def test_the_child_draws_what_this_process_would() -> None:
    assert await Drawer().draw(DOCUMENT) == render_pdf(DOCUMENT)


async def test_a_failed_child_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(DrawingFailed, match=r"gone\.ttf cannot be used"):
        await Drawer().draw(replace(DOCUMENT, issuer=replace(ISSUER, font=tmp_path / "gone.ttf")))


async def test_a_child_ends_with_the_call_that_wanted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
    start = asyncio.create_subprocess_exec

    async def watched(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
        child = await start(*arguments, **options)
        started.put_nowait(child)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    drawer = Drawer()
    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(drawer.draw(DOCUMENT))
        child = await started.get()
        drawing.cancel()

    assert child.returncode is not None
    monkeypatch.undo()
    assert await drawer.draw(DOCUMENT)  # its turn was released
