"""`BillingService`: month reports."""

from __future__ import annotations

from collections.abc import Mapping

from weir.v1 import billing_service_pb2 as pb
from weir.v1 import billing_service_pb2_grpc as pb_grpc

from api import wire
from api.auth import Authenticator
from api.interceptor import Context
from metering.billing.month_reading import month_report
from metering.billing.reports import MonthReport, ReportLine
from metering.errors import NotFound
from metering.models import TokenKind
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization

SCOPES = ("billing", "admin")

TOKEN_KINDS: Mapping[TokenKind, pb.TokenKind.ValueType] = {
    TokenKind.INPUT: pb.TOKEN_KIND_INPUT,
    TokenKind.CACHED_INPUT: pb.TOKEN_KIND_CACHED_INPUT,
    TokenKind.OUTPUT: pb.TOKEN_KIND_OUTPUT,
}


class BillingServicer(pb_grpc.BillingServiceServicer):
    """See `proto/weir/v1/billing_service.proto`."""

    def __init__(self, authenticator: Authenticator, sessions: Sessions) -> None:
        self._authenticator = authenticator
        self._sessions = sessions

    async def GetMonthReport(self, request: pb.GetMonthReportRequest, context: Context) -> pb.GetMonthReportResponse:
        """Reports one month of one customer. A `billing` key sees its own; any other one does not exist for it."""
        principal = await self._authenticator.principal(context, *SCOPES)
        async with self._sessions() as session:
            organization = await find_organization(session, request.organization)
            if "admin" not in principal.scopes and organization.id != principal.organization_id:
                raise NotFound("organization", request.organization)
            report = await month_report(session, organization=str(organization.id), month=request.month)
        return report_message(report)


def report_message(report: MonthReport) -> pb.GetMonthReportResponse:
    """One month of one organization."""
    counts, reconciliation = report.request_counts, report.reconciliation
    return pb.GetMonthReportResponse(
        organization_name=report.organization_name,
        organization_id=str(report.organization_id),
        month=report.month,
        lines=[line_message(line, report.currency_code) for line in report.lines],
        request_counts=pb.RequestCounts(
            total_count=counts.total_count,
            completed_count=counts.completed_count,
            cancelled_count=counts.cancelled_count,
            limited_count=counts.limited_count,
            failed_count=counts.failed_count,
        ),
        total=wire.money(report.currency_code, report.total_picos),
        total_rounded=wire.money(report.currency_code, report.total_rounded_picos),
        unrated_event_count=report.unrated_event_count,
        reconciliation=pb.Reconciliation(
            usage_token_count=reconciliation.usage_token_count,
            ledger_token_count=reconciliation.ledger_token_count,
            unrated_token_count=reconciliation.unrated_token_count,
            balanced=reconciliation.balanced,
        ),
    )


def line_message(line: ReportLine, currency_code: str) -> pb.MonthReportLine:
    """One line of the month."""
    return pb.MonthReportLine(
        model=line.model,
        token_kind=TOKEN_KINDS[line.token_kind],
        price_version=line.price_version,
        request_count=line.request_count,
        token_count=line.token_count,
        cancelled_token_count=line.cancelled_token_count,
        unit_price_picos=line.unit_price_picos,
        amount=wire.money(currency_code, line.amount_picos),
    )
