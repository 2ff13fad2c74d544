"""Clients of the receipt API: public keys, and the receipts of a month."""

from __future__ import annotations

from collections.abc import AsyncIterator

from weir.v1 import receipt_service_pb2 as pb
from weir.v1 import receipt_service_pb2_grpc as pb_grpc

from weir_client import wire
from weir_client.blocking import BlockingUnaryClient, blocking, blocking_items
from weir_client.receipts import Receipt, ReceiptKey, ReceiptMonth
from weir_client.unary import UnaryClient, items_of

PAGE_SIZE = 1000


class AsyncReceiptClient(UnaryClient):
    """Client of the receipt API, which returns signed receipts of usage and cost.

    Needs a key with the scope `billing` (its own organization only) or `admin`; public keys need
    any key.
    """

    @property
    def _stub(self) -> pb_grpc.ReceiptServiceAsyncStub:
        return pb_grpc.ReceiptServiceStub(self._opened().channel)

    async def list_receipt_keys(self) -> list[ReceiptKey]:
        """Return all public keys that ever signed receipts, oldest first.

        Store them apart from the receipts that they verify.
        """
        response = await self._call(self._stub.ListReceiptKeys, pb.ListReceiptKeysRequest())
        return [
            ReceiptKey(each.key_id, each.public_key, wire.micros_of(each.create_time))
            for each in response.keys
        ]

    async def _receipt_pages(self, organization: str, month: str) -> AsyncIterator[list[Receipt]]:
        """Yield the receipts of a calendar month (UTC, `YYYY-MM`) in pages, sorted by time.

        Raises: NotFound, InvalidRequest, WeirError.
        """
        request = pb.ListReceiptsRequest(
            organization=organization, month=month, page_size=PAGE_SIZE
        )
        async for page in self._pages(self._stub.ListReceipts, request):
            yield [wire.receipt(each) for each in page.receipts]

    list_receipts = items_of(_receipt_pages)

    async def get_receipt_month(self, organization: str, month: str) -> ReceiptMonth:
        """Return the Merkle root over a month's receipts, and the range of each project's chain."""
        request = pb.GetReceiptMonthRequest(organization=organization, month=month)
        return wire.read(ReceiptMonth, await self._call(self._stub.GetReceiptMonth, request))


class ReceiptClient(BlockingUnaryClient):
    """Blocking client of the receipt API. `AsyncReceiptClient` documents every call."""

    _async_class = AsyncReceiptClient

    list_receipt_keys = blocking(AsyncReceiptClient.list_receipt_keys)
    list_receipts = blocking_items(AsyncReceiptClient._receipt_pages)
    get_receipt_month = blocking(AsyncReceiptClient.get_receipt_month)
