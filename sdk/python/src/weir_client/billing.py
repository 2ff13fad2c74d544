"""Clients of the billing API: reports, months, usage, invoices, corrections, alerts, resale."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import IO, Unpack

from weir.v1 import (
    alerts_pb2,
    billing_service_pb2,
    end_users_pb2,
    months_pb2,
    resale_pb2,
    usage_reports_pb2,
)

from weir_client import wire
from weir_client.blocking import blocking, blocking_items
from weir_client.checks import check_known, invalid, usage_groups, written
from weir_client.generated_calls import AsyncBillingCalls, BlockingBillingCalls
from weir_client.generated_values import (
    Adjustment,
    Alert,
    EndUser,
    EndUserState,
    Invoice,
    MonthExportFormat,
    ReplicaRental,
    ResalePrice,
    ResaleStatement,
    ResaleStatementFormat,
    UsageGrouping,
    UsagePage,
)
from weir_client.options import UsageOptions
from weir_client.unary import items_of
from weir_client.values import LABEL_PREFIX, MonthFile

EXPORT_S = 1800.0  # of an organization: some ten million rows


class AsyncBillingClient(AsyncBillingCalls):
    """Client of the billing API, which reads bills, and closes and corrects months.

    Reading and resale prices need a key with the scope `billing` (its own organization only) or
    `admin`, everything else `admin`. Organizations are given by name or id, months as `YYYY-MM` in
    UTC. Every call raises WeirError: NotFound for an unknown object, InvalidRequest for a bad
    value, FailedPrecondition if the current state does not allow the call.
    """

    async def get_invoice(
        self, number: str = "", *, organization: str = "", month: str = ""
    ) -> Invoice:
        """Return one invoice, given by its number or by organization and month."""
        request = months_pb2.GetInvoiceRequest(
            number=number, organization=organization, month=month
        )
        response = await self._call(self._stub.GetInvoice, request)
        credit_notes = tuple(wire.read(Adjustment, each) for each in response.credit_notes)
        return wire.read(Invoice, response.invoice, credit_notes=credit_notes)

    async def _usage_pages(
        self,
        month: str,
        group_by: Sequence[UsageGrouping | str],
        **options: Unpack[UsageOptions],
    ) -> AsyncIterator[list[UsagePage]]:
        """Yield pages of a month's charges (UTC, `YYYY-MM`), grouped by `group_by` in that order.

        An empty month and `first_day` give the usage of these days instead, at most 92, whichever
        month bills it; `last_day` is today by default.

        Args:
            month: `YYYY-MM`, or empty with `first_day`.
            group_by: "organization", "day", "hour", "project", "api_key", "model", "end_user",
                "label:KEY" for the values of one label, or "request" alone.
            organization: Name or id. Default: the key's own, or all with an `admin` key.
            day: Only this day, `YYYY-MM-DD`.
            project: Only this project.
            api_key: Only this key, by prefix or id.
            model: Only this model.
            end_user: Only this end user, by name or id.
            labels: Only requests with all these labels.
            largest_first: The rows with the highest cost first.
            latest_first: The latest requests first, with "request".
            page_size: Rows per page. Default: the server's, 1,000.
            first_day: Instead of a month: the first day, as a date or `YYYY-MM-DD`.
            last_day: The last of these days.

        Raises:
            NotFound: There is no such organization, project or key.
            InvalidRequest: A value is invalid, or needs another one.
        """
        check_known(options, UsageOptions.__annotations__)
        days = {name: str(options.get(name, "")) for name in ("first_day", "last_day")}
        groups, label_key = usage_groups(group_by, "group_by")
        fields = {**options, **days, "month": month, "group_by": groups, "label_key": label_key}
        request = written(usage_reports_pb2.GetUsageRequest, fields)
        async for page in self._pages(self._stub.GetUsage, request):
            yield [wire.read(UsagePage, page, has_more=bool(page.next_page_token))]

    get_usage = items_of(_usage_pages)

    async def _end_user_pages(
        self,
        organization: str = "",
        *,
        prefix: str = "",
        state: EndUserState | None = None,
        with_usage: bool = False,
        page_size: int = 0,
    ) -> AsyncIterator[list[EndUser]]:
        """Yield the end users of an organization by name, those that begin with `prefix`.

        An empty `organization` means the key's own. `with_usage` reads the cost and the requests of
        the current month, and the tightest limit of each. Raises: NotFound, InvalidRequest.
        """
        request = wire.request(
            end_users_pb2.ListEndUsersRequest,
            organization=organization,
            prefix=prefix,
            state=state,
            with_usage=with_usage,
            page_size=page_size,
        )
        async for page in self._pages(self._stub.ListEndUsers, request):
            yield [wire.read(EndUser, each) for each in page.end_users]

    list_end_users = items_of(_end_user_pages)

    async def export_month(
        self,
        month: str,
        file_format: MonthExportFormat,
        *,
        organization: str = "",
        tags: Sequence[str] = (),
    ) -> MonthFile:
        """Export a month (UTC, `YYYY-MM`) as a file. Raises: NotFound, InvalidRequest.

        `tags` split the charges of a FOCUS file by "end_user" and labels such as "label:team", and
        name them in its column Tags. By default charges are not split.
        """
        keys = [each.removeprefix(LABEL_PREFIX) for each in tags if each.startswith(LABEL_PREFIX)]
        if len(keys) + tags.count(UsageGrouping.END_USER) < len(tags):
            raise invalid("tags", f"must be end_user or {LABEL_PREFIX}KEY, got {tags!r:.200}")
        request = wire.request(
            usage_reports_pb2.ExportMonthRequest,
            organization=organization,
            month=month,
            format=file_format,
            tag_label_keys=keys,
            tag_end_user=UsageGrouping.END_USER in tags,
        )
        return await self._export(request)

    async def export_credit_note(self, number: str) -> MonthFile:
        """Export an approved credit note, given by its number, as PDF. Raises: NotFound."""
        return await self._export(usage_reports_pb2.ExportMonthRequest(credit_note_number=number))

    async def export_organization(self, organization: str, file: IO[bytes]) -> None:
        """Write everything that an organization has to a file, as a ZIP archive. Raises: NotFound.

        The file must be open for writing, and seekable: an interrupted transfer begins again. An
        empty `organization` means the key's own. May take half an hour.
        """
        request = billing_service_pb2.ExportOrganizationRequest(organization=organization)
        timeout_s = max(self._timeout_s, EXPORT_S)
        await self._opened().save(self._stub.ExportOrganization, request, file, timeout=timeout_s)

    async def _export(self, request: usage_reports_pb2.ExportMonthRequest) -> MonthFile:
        pieces = await self._opened().collect(
            self._stub.ExportMonth, request, timeout=self._timeout_s
        )
        content = b"".join(piece.chunk for piece in pieces)
        return MonthFile(pieces[0].file_name, pieces[0].media_type, content)

    async def _alert_pages(
        self, organization: str = "", *, end_user: str = "", page_size: int = 0
    ) -> AsyncIterator[list[Alert]]:
        """Yield pages of alerts, latest first. Raises: NotFound, InvalidRequest.

        An empty `organization` means the key's own, or all with an `admin` key. `end_user` selects
        the alerts on the limits of one, by name or id.
        """
        request = alerts_pb2.ListAlertsRequest(
            organization=organization, end_user=end_user, page_size=page_size
        )
        async for page in self._pages(self._stub.ListAlerts, request):
            yield [wire.read(Alert, each) for each in page.alerts]

    list_alerts = items_of(_alert_pages)

    async def _resale_price_pages(
        self, organization: str = "", *, history: bool = False, page_size: int = 0
    ) -> AsyncIterator[list[ResalePrice]]:
        """Yield pages of resale prices in force by model, or with `history` of all versions.

        An empty `organization` means the key's own. Raises: NotFound, InvalidRequest.
        """
        request = resale_pb2.ListResalePricesRequest(
            organization=organization, history=history, page_size=page_size
        )
        async for page in self._pages(self._stub.ListResalePrices, request):
            yield [wire.read(ResalePrice, each) for each in page.prices]

    list_resale_prices = items_of(_resale_price_pages)

    async def _replica_rental_pages(
        self, end_user: str = "", *, organization: str = "", page_size: int = 0
    ) -> AsyncIterator[list[ReplicaRental]]:
        """Yield pages of rentals, the latest recorded first: of an end user, or of all.

        An empty `organization` means the key's own. Raises: NotFound, InvalidRequest.
        """
        request = resale_pb2.ListReplicaRentalsRequest(
            organization=organization, end_user=end_user, page_size=page_size
        )
        async for page in self._pages(self._stub.ListReplicaRentals, request):
            yield [wire.read(ReplicaRental, each) for each in page.rentals]

    list_replica_rentals = items_of(_replica_rental_pages)

    async def _resale_statement_pages(
        self, month: str, *, organization: str = "", page_size: int = 0
    ) -> AsyncIterator[list[ResaleStatement]]:
        """Yield pages of a month's statements, without lines: of usage without an end user first.

        An empty `organization` means the key's own. Raises: NotFound, InvalidRequest.
        """
        request = resale_pb2.ListResaleStatementsRequest(
            organization=organization, month=month, page_size=page_size
        )
        async for page in self._pages(self._stub.ListResaleStatements, request):
            yield [wire.read(ResaleStatement, each) for each in page.statements]

    list_resale_statements = items_of(_resale_statement_pages)

    async def get_resale_statement(
        self, end_user: str, month: str, *, organization: str = ""
    ) -> ResaleStatement:
        """Return the statement of an end user, by name or id; empty: of usage without one.

        Raises: NotFound for an unknown name, or without usage in the month; InvalidRequest.
        """
        request = resale_pb2.GetResaleStatementRequest(
            organization=organization, month=month, end_user=end_user
        )
        response = await self._call(self._stub.GetResaleStatement, request)
        return wire.read(ResaleStatement, response.statement)

    async def export_resale_statement(
        self,
        end_user: str,
        month: str,
        file_format: ResaleStatementFormat,
        *,
        organization: str = "",
    ) -> bytes:
        """Export a statement as a file. JSON and CSV have your costs, the PDF has not.

        Raises: NotFound for an unknown name, or without usage in the month; InvalidRequest.
        """
        request = wire.request(
            resale_pb2.GetResaleStatementRequest,
            organization=organization,
            month=month,
            end_user=end_user,
            format=file_format,
        )
        response = await self._call(self._stub.GetResaleStatement, request)
        return bytes(response.content)


class BillingClient(BlockingBillingCalls):
    """Blocking client of the billing API. `AsyncBillingClient` documents every call.

    >>> with AdminClient() as admin, BillingClient() as billing:
    ...     customer = admin.create_organization("example", allow_existing=True)
    ...     report = billing.get_month_report("example", f"{customer.create_time:%Y-%m}")
    >>> print(report.total)
    0.00 USD
    """

    _async_class = AsyncBillingClient

    get_invoice = blocking(AsyncBillingClient.get_invoice)
    get_usage = blocking_items(AsyncBillingClient._usage_pages)
    list_end_users = blocking_items(AsyncBillingClient._end_user_pages)
    export_month = blocking(AsyncBillingClient.export_month)
    export_credit_note = blocking(AsyncBillingClient.export_credit_note)
    export_organization = blocking(AsyncBillingClient.export_organization)
    list_alerts = blocking_items(AsyncBillingClient._alert_pages)
    list_resale_prices = blocking_items(AsyncBillingClient._resale_price_pages)
    list_replica_rentals = blocking_items(AsyncBillingClient._replica_rental_pages)
    list_resale_statements = blocking_items(AsyncBillingClient._resale_statement_pages)
    get_resale_statement = blocking(AsyncBillingClient.get_resale_statement)
    export_resale_statement = blocking(AsyncBillingClient.export_resale_statement)
