"""The calls of the billing API that take a month apart; their messages as values."""

from __future__ import annotations

from collections.abc import Sequence

from weir.v1 import billing_service_pb2_grpc
from weir.v1 import usage_reports_pb2 as pb

from weir_client.unary import UnaryClient
from weir_client.usage import MonthExportFormat, MonthFile, UsageForecast, UsageGrouping, UsagePage, UsageRow, UsageShare
from weir_client.wire import money, time_of

_GROUPINGS = {
    UsageGrouping.ORGANIZATION: pb.USAGE_GROUPING_ORGANIZATION,
    UsageGrouping.DAY: pb.USAGE_GROUPING_DAY,
    UsageGrouping.PROJECT: pb.USAGE_GROUPING_PROJECT,
    UsageGrouping.API_KEY: pb.USAGE_GROUPING_API_KEY,
    UsageGrouping.MODEL: pb.USAGE_GROUPING_MODEL,
    UsageGrouping.REQUEST: pb.USAGE_GROUPING_REQUEST,
}
_FORMATS = {
    MonthExportFormat.INVOICE_PDF: pb.MONTH_EXPORT_FORMAT_INVOICE_PDF,
    MonthExportFormat.FOCUS_CSV: pb.MONTH_EXPORT_FORMAT_FOCUS_CSV,
}


class AsyncUsageCalls(UnaryClient):
    """Part of `AsyncBillingClient`."""

    @property
    def _stub(self) -> billing_service_pb2_grpc.BillingServiceAsyncStub:
        return billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)

    async def get_usage(
        self,
        month: str,
        group_by: Sequence[UsageGrouping],
        *,
        organization: str = "",
        day: str = "",
        project: str = "",
        api_key: str = "",
        model: str = "",
        page_size: int = 0,
        page_token: str = "",
    ) -> UsagePage:
        """A page of what a month (UTC, `YYYY-MM`) charges, by all of `group_by` in that order.

        organization: empty for one's own, or for all with an `admin` key. day (`YYYY-MM-DD`), project, api_key, model: only that.
        Raises: NotFound, InvalidRequest; any WeirError.
        """
        request = pb.GetUsageRequest(
            organization=organization,
            month=month,
            group_by=[_GROUPINGS[each] for each in group_by],
            day=day,
            project=project,
            api_key=api_key,
            model=model,
            page_size=page_size,
            page_token=page_token,
        )
        response = await self._call(self._stub.GetUsage, request)
        rows = tuple(usage_row(each) for each in response.rows)
        return UsagePage(rows, usage_row(response.total) if response.HasField("total") else None, response.next_page_token)

    async def get_forecast(self, organization: str = "", month: str = "") -> UsageForecast:
        """What the present month, or the one given, will have cost by its end, and how sure that is. Raises: any WeirError."""
        request = pb.GetForecastRequest(organization=organization, month=month)
        response = await self._call(self._stub.GetForecast, request)
        return UsageForecast(
            organization_name=response.organization_name,
            month=response.month,
            as_of_time=time_of(response.as_of_time),
            so_far=money(response.so_far),
            expected=money(response.expected) if response.HasField("expected") else None,
            low=money(response.low) if response.HasField("low") else None,
            high=money(response.high) if response.HasField("high") else None,
            confidence_percent=response.confidence_percent,
            complete_day_count=response.complete_day_count,
            method=response.method,
            cautions=tuple(response.cautions),
        )

    async def export_month(self, month: str, file_format: MonthExportFormat, *, organization: str = "") -> MonthFile:
        """A file of a month (UTC, `YYYY-MM`). Raises: NotFound, InvalidRequest; any WeirError."""
        request = pb.ExportMonthRequest(organization=organization, month=month, format=_FORMATS[file_format])
        pieces = await self._opened().collect(self._stub.ExportMonth, request, timeout=self._timeout_s)
        content = b"".join(piece.chunk for piece in pieces)
        return MonthFile(pieces[0].file_name, pieces[0].media_type, content)


def usage_row(message: pb.UsageRow) -> UsageRow:
    """One row."""
    return UsageRow(
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        day=message.day,
        project_id=message.project_id,
        project_name=message.project_name,
        api_key_id=message.api_key_id,
        api_key_name=message.api_key_name,
        api_key_prefix=message.api_key_prefix,
        model=message.model,
        request_id=message.request_id,
        outcome=message.outcome,
        settle_time=time_of(message.settle_time) if message.HasField("settle_time") else None,
        late=message.late,
        request_count=message.request_count,
        input_token_count=message.input_token_count,
        cached_input_token_count=message.cached_input_token_count,
        output_token_count=message.output_token_count,
        cancelled=usage_share(message.cancelled),
        limited=usage_share(message.limited),
        failed=usage_share(message.failed),
        amount=money(message.amount),
        pending_amount=money(message.pending_amount),
        embedding_token_count=message.embedding_token_count,
        migration_count=message.migration_count,
    )


def usage_share(message: pb.UsageShare) -> UsageShare:
    """The part that ended in one way."""
    return UsageShare(message.request_count, message.token_count, money(message.amount))
