"""The calls of the billing API that take a month apart; their messages as values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from weir.v1 import billing_service_pb2_grpc
from weir.v1 import usage_reports_pb2 as pb

from weir_client import wire
from weir_client.unary import UnaryClient, items_of
from weir_client.usage import MonthExportFormat, MonthFile, UsageForecast, UsageGrouping, UsagePage

_GROUPINGS = wire.numbers(UsageGrouping, pb.UsageGrouping.DESCRIPTOR)
_FORMATS = wire.numbers(MonthExportFormat, pb.MonthExportFormat.DESCRIPTOR)


class AsyncUsageCalls(UnaryClient):
    """Part of `AsyncBillingClient`."""

    @property
    def _stub(self) -> billing_service_pb2_grpc.BillingServiceAsyncStub:
        return billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)

    async def _usage_pages(
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
    ) -> AsyncIterator[list[UsagePage]]:
        """Pages of what a month (UTC, `YYYY-MM`) charges, by all of `group_by` in that order.

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
        )
        async for page in self._pages(self._stub.GetUsage, request):
            yield [wire.read(UsagePage, page, has_more=bool(page.next_page_token))]

    get_usage = items_of(_usage_pages)

    async def get_forecast(self, organization: str = "", month: str = "") -> UsageForecast:
        """What the present month, or the one given, will have cost by its end, and how sure that is. Raises: any WeirError."""
        request = pb.GetForecastRequest(organization=organization, month=month)
        response = await self._call(self._stub.GetForecast, request)
        return wire.read(UsageForecast, response)

    async def export_month(self, month: str, file_format: MonthExportFormat, *, organization: str = "") -> MonthFile:
        """A file of a month (UTC, `YYYY-MM`). Raises: NotFound, InvalidRequest; any WeirError."""
        request = pb.ExportMonthRequest(organization=organization, month=month, format=_FORMATS[file_format])
        pieces = await self._opened().collect(self._stub.ExportMonth, request, timeout=self._timeout_s)
        content = b"".join(piece.chunk for piece in pieces)
        return MonthFile(pieces[0].file_name, pieces[0].media_type, content)
