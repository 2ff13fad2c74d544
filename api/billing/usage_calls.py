"""The calls of `BillingService` that take a month apart: usage by group, the forecast, and the files of a month."""

from __future__ import annotations

import asyncio
import pickle
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, date, datetime
from typing import IO

from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import billing_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2
from weir.v1 import usage_reports_pb2 as pb

from api.access.auth import Authenticator
from api.billing.billing_wire import BillingCalls, Reports, visible_or_own
from api.core import wire
from api.core.interceptor import Context
from common.child_environment import inherited
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import TokenKind
from metering.core.money import round_to_minor_unit
from metering.invoicing.invoice_document import InvoiceDocument, Issuer, invoice_document, letterhead_of
from metering.invoicing.month_report import MonthReport
from metering.invoicing.months import month_report
from metering.ledger.ledger import month_bounds, month_text
from metering.reports.focus import FOCUS_VERSION, focus_csv
from metering.reports.usage_reports import (
    CONFIDENCE,
    Forecast,
    Grouping,
    Share,
    UsageFilter,
    UsageRow,
    daily_costs,
    forecast,
    usage_page,
    usage_total,
)
from metering.store.db import Sessions, database_now
from metering.tenants.tenants import Principal, find_api_key, find_project

DRAWING_S = 25.0  # an invoice of a thousand lines takes three on a busy machine; clients give a call half a minute
TIME_ZONE = "UTC"
CHUNK_BYTES = 64 * 1024  # of a file in one message: far below the limit of any client
FILE_BYTES_IN_MEMORY = 8 * 2**20  # beyond it a file waits on disk while a slow client fetches it
GROUPINGS: Mapping[int, Grouping] = {
    pb.USAGE_GROUPING_ORGANIZATION: Grouping.ORGANIZATION,
    pb.USAGE_GROUPING_DAY: Grouping.DAY,
    pb.USAGE_GROUPING_PROJECT: Grouping.PROJECT,
    pb.USAGE_GROUPING_API_KEY: Grouping.API_KEY,
    pb.USAGE_GROUPING_MODEL: Grouping.MODEL,
    pb.USAGE_GROUPING_REQUEST: Grouping.REQUEST,
}

# Every kind of token has its field: one without would be billed and not told.
COUNT_FIELDS: Mapping[TokenKind, str] = {kind: f"{kind}_token_count" for kind in TokenKind}


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


class UsageCalls(BillingCalls, pb_grpc.BillingServiceServicer):
    """See `proto/weir/v1/usage_reports.proto`."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions, reports: Reports, issuer: Issuer) -> None:
        super().__init__(authenticator, sessions, reports)
        self._issuer = issuer
        self._drawer = InvoiceDrawer()

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        principal = await self._caller(context)
        if any(each not in GROUPINGS for each in request.group_by):
            raise InvalidValue("group_by", "give what the rows are for")
        by = [GROUPINGS[each] for each in request.group_by]
        async with self._reading(principal) as session:
            of, currency = await usage_filter(session, principal, request)
            page = await usage_page(session, of, by, page_size=request.page_size, token=request.page_token)
            response = pb.GetUsageResponse(next_page_token=page.next_token, time_zone=TIME_ZONE)
            response.rows.extend(usage_row(row, row.currency_code or currency) for row in page.rows)
            if of.organization_id is not None and not request.page_token:
                response.total.CopyFrom(usage_row(await usage_total(session, of), currency))
        return response

    async def GetForecast(self, request: pb.GetForecastRequest, context: Context) -> pb.GetForecastResponse:
        """Tells what a month has cost so far and will have cost by its end."""
        principal = await self._caller(context)
        async with self._reading(principal) as session:
            owner = await visible_or_own(session, principal, request.organization)
            now = await database_now(session)
            month = request.month or month_text(now.astimezone(UTC))
            begins, _ = month_bounds(month)
            if begins > now:
                raise InvalidValue("month", f"{month} has not begun: give the present month or one before")
            days = await daily_costs(session, owner.id, begins, now)
        seen = forecast(days, begins.date(), now)
        return forecast_message(seen, owner.name, month, now, owner.currency_code)

    async def ExportMonth(  # type: ignore[override]  # the stubs know generators only; gRPC takes a coroutine that writes as well
        self, request: pb.ExportMonthRequest, context: Context
    ) -> None:
        """Makes a file of a month and sends it in pieces. No transaction stays open while they travel."""
        principal = await self._caller(context)
        async with self._reports.turn(principal) as sessions, sessions.begin() as session:
            owner = await visible_or_own(session, principal, request.organization)
            issuer = await letterhead_of(session, owner.id, request.month, self._issuer)
        with tempfile.SpooledTemporaryFile(max_size=FILE_BYTES_IN_MEMORY) as file:
            async with self._reading(principal) as session:
                report = await month_report(session, organization=str(owner.id), month=request.month)
                match request.format:
                    case pb.MONTH_EXPORT_FORMAT_INVOICE_PDF:
                        name, media_type = f"{document_name(report)}.pdf", "application/pdf"
                    case pb.MONTH_EXPORT_FORMAT_FOCUS_CSV:
                        name = f"focus-{FOCUS_VERSION}-{report.organization_name}-{report.month}.csv"
                        media_type = "text/csv; charset=utf-8"
                        await write_pieces(file, focus_csv(session, report, issuer.name))
                    case _:
                        raise InvalidValue("format", "give the format of the file")
            if request.format == pb.MONTH_EXPORT_FORMAT_INVOICE_PDF:
                file.write(await self._drawer.draw(invoice_document(report, issuer)))
            file.seek(0)
            await context.write(pb.ExportMonthResponse(file_name=name, media_type=media_type, chunk=file.read(CHUNK_BYTES)))
            while chunk := file.read(CHUNK_BYTES):
                await context.write(pb.ExportMonthResponse(chunk=chunk))


async def usage_filter(session: AsyncSession, principal: Principal, request: pb.GetUsageRequest) -> tuple[UsageFilter, str]:
    """What is asked for, in ids, and the currency of it. Raises: NotFound, InvalidValue."""
    everyone = not request.organization and "admin" in principal.scopes
    if everyone:
        if request.project or request.api_key:
            raise InvalidValue("organization", "say whose project or API key it is")
        return UsageFilter(request.month, day=parse_day(request.day), model=request.model), ""
    owner = await visible_or_own(session, principal, request.organization)
    project_id = api_key_id = None
    if request.project:
        project = await find_project(session, request.project, organization=owner.name)
        if project.organization_id != owner.id:
            raise NotFound("project", request.project)
        project_id = project.id
    if request.api_key:
        key = await find_api_key(session, request.api_key)
        if key.organization_id != owner.id:
            raise NotFound("API key", request.api_key)
        api_key_id = key.id
    of = UsageFilter(request.month, owner.id, parse_day(request.day), project_id, api_key_id, request.model)
    return of, owner.currency_code


def parse_day(day: str) -> date | None:
    """`YYYY-MM-DD`; None if empty. Raises: InvalidValue."""
    if not day:
        return None
    try:
        return datetime.strptime(day, "%Y-%m-%d").date()
    except ValueError:
        raise InvalidValue("day", f"{day[:64]!r} is not a day: give it as YYYY-MM-DD") from None


def usage_row(row: UsageRow, currency_code: str) -> pb.UsageRow:
    """One row; what it is not grouped by stays empty."""
    return pb.UsageRow(
        organization_id=str(row.organization_id or ""),
        organization_name=row.organization_name or "",
        day=str(row.day or ""),
        project_id=str(row.project_id or ""),
        project_name=row.project_name or "",
        api_key_id=str(row.api_key_id or ""),
        api_key_name=row.api_key_name or "",
        api_key_prefix=row.api_key_prefix or "",
        model=row.model or "",
        request_id=str(row.request_id or ""),
        outcome=(row.outcome or "").upper(),
        settle_time=wire.timestamp(row.settled_at),
        late=row.late,
        request_count=row.request_count,
        migration_count=row.migration_count,
        **{COUNT_FIELDS[kind]: count for kind, count in row.token_counts.items()},
        cancelled=usage_share(row.cancelled, currency_code),
        limited=usage_share(row.limited, currency_code),
        failed=usage_share(row.failed, currency_code),
        amount=wire.money(currency_code, row.amount_picos),
        pending_amount=wire.money(currency_code, row.pending_picos),
    )


def usage_share(share: Share, currency_code: str) -> pb.UsageShare:
    return pb.UsageShare(
        request_count=share.request_count, token_count=share.token_count, amount=wire.money(currency_code, share.amount_picos)
    )


def forecast_message(seen: Forecast, organization: str, month: str, now: datetime, currency_code: str) -> pb.GetForecastResponse:
    """An estimate has the digits of a coin: more would say more than it knows."""

    def rounded(picos: int | None) -> types_pb2.Money | None:
        return None if picos is None else wire.money(currency_code, round_to_minor_unit(picos, currency_code))

    return pb.GetForecastResponse(
        organization_name=organization,
        month=month,
        time_zone=TIME_ZONE,
        as_of_time=wire.timestamp(now),
        so_far=wire.money(currency_code, seen.so_far_picos),
        expected=rounded(seen.expected_picos),
        low=rounded(seen.low_picos),
        high=rounded(seen.high_picos),
        confidence_percent=round(CONFIDENCE * 100),
        complete_day_count=seen.complete_day_count,
        method=seen.method,
        cautions=seen.cautions,
    )


def document_name(report: MonthReport) -> str:
    """Of the invoice's file: its number, or what it is while it has none."""
    number = report.closed.invoice_number if report.closed else "draft"
    return f"{number or 'statement'}-{report.organization_name}-{report.month}"


async def write_pieces(file: IO[bytes], pieces: AsyncIterator[str]) -> None:
    """Put the pieces of a text into a file, as UTF-8."""
    async for piece in pieces:
        file.write(piece.encode())
