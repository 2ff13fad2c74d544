"""The clients of the receipt API: public keys, and the receipts of a month."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from weir.v1 import receipt_service_pb2 as pb
from weir.v1 import receipt_service_pb2_grpc as pb_grpc

from weir_client import wire
from weir_client.blocking import BlockingUnaryClient, blocking
from weir_client.receipts import Receipt, ReceiptKey, ReceiptMonth
from weir_client.unary import UnaryClient

PAGE_SIZE = 1000


class AsyncReceiptClient(UnaryClient):
    """Fetches receipts. Needs a key with the scope `billing` (its own organization only) or `admin`; public keys need any key."""

    @property
    def _stub(self) -> pb_grpc.ReceiptServiceAsyncStub:
        return pb_grpc.ReceiptServiceStub(self._opened().channel)

    async def list_receipt_keys(self) -> list[ReceiptKey]:
        """All public keys that receipts were ever signed with, the oldest first. Keep them apart from the receipts they verify."""
        response = await self._call(self._stub.ListReceiptKeys, pb.ListReceiptKeysRequest())
        return [ReceiptKey(each.key_id, each.public_key, wire.micros_of(each.create_time)) for each in response.keys]

    async def list_receipts(self, organization: str, month: str) -> AsyncIterator[Receipt]:
        """The receipts of a calendar month (UTC, `YYYY-MM`) in the order of time. Raises: NotFound, InvalidRequest, WeirError."""
        token = ""
        while True:
            page, token = await self.list_receipt_page(organization, month, token)
            for each in page:
                yield each
            if not token:
                return

    async def list_receipt_page(self, organization: str, month: str, page_token: str = "") -> tuple[list[Receipt], str]:
        """Some of them, and the token of the next page; empty on the last one."""
        request = pb.ListReceiptsRequest(organization=organization, month=month, page_size=PAGE_SIZE, page_token=page_token)
        response = await self._call(self._stub.ListReceipts, request)
        return [wire.receipt(each) for each in response.receipts], response.next_page_token

    async def get_receipt_month(self, organization: str, month: str) -> ReceiptMonth:
        """The root over a month's receipts, and where each chain begins and ends in it."""
        request = pb.GetReceiptMonthRequest(organization=organization, month=month)
        return wire.read(ReceiptMonth, await self._call(self._stub.GetReceiptMonth, request))


class ReceiptClient(BlockingUnaryClient):
    """The blocking twin of `AsyncReceiptClient`."""

    _async_class = AsyncReceiptClient

    list_receipt_keys = blocking(AsyncReceiptClient.list_receipt_keys)
    list_receipt_page = blocking(AsyncReceiptClient.list_receipt_page)
    get_receipt_month = blocking(AsyncReceiptClient.get_receipt_month)

    def list_receipts(self, organization: str, month: str) -> Iterator[Receipt]:
        """The receipts of a calendar month (UTC, `YYYY-MM`) in the order of time. Raises: NotFound, InvalidRequest, WeirError."""
        token = ""
        while True:
            page, token = self.list_receipt_page(organization, month, token)
            yield from page
            if not token:
                return
