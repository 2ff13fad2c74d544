"""The clients of the receipt API: public keys, and the receipts of a month."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self, Unpack

from weir.v1 import receipt_service_pb2 as pb
from weir.v1 import receipt_service_pb2_grpc as pb_grpc

from weir_client import wire_receipts
from weir_client.connection import UNARY_TIMEOUT_S
from weir_client.loop_thread import LoopThread
from weir_client.receipts import Receipt, ReceiptKey, ReceiptMonth
from weir_client.tls import TlsOptions
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
        return [wire_receipts.receipt_key(each) for each in response.keys]

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
        return list(wire_receipts.receipts(response.receipts)), response.next_page_token

    async def get_receipt_month(self, organization: str, month: str) -> ReceiptMonth:
        """The root over a month's receipts, and where each chain begins and ends in it."""
        request = pb.GetReceiptMonthRequest(organization=organization, month=month)
        return wire_receipts.receipt_month(await self._call(self._stub.GetReceiptMonth, request))


class ReceiptClient:
    """The blocking twin of `AsyncReceiptClient`."""

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = UNARY_TIMEOUT_S,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Settles where to connect. Raises: Unauthenticated if there is no key."""
        self._client = AsyncReceiptClient(address, api_key, timeout=timeout, **tls)
        self._thread = LoopThread(self._client)

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._client.address

    def list_receipt_keys(self) -> list[ReceiptKey]:
        """All public keys that receipts were ever signed with, the oldest first."""
        return self._thread.run(self._client.list_receipt_keys)

    def list_receipts(self, organization: str, month: str) -> Iterator[Receipt]:
        """The receipts of a calendar month (UTC, `YYYY-MM`) in the order of time."""
        token = ""
        while True:
            page, token = self._page(organization, month, token)
            yield from page
            if not token:
                return

    def get_receipt_month(self, organization: str, month: str) -> ReceiptMonth:
        """The root over a month's receipts, and where each chain begins and ends in it."""
        return self._thread.run(lambda: self._client.get_receipt_month(organization, month))

    def __enter__(self) -> Self:
        self._thread.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.close()

    def _page(self, organization: str, month: str, token: str) -> tuple[list[Receipt], str]:
        return self._thread.run(lambda: self._client.list_receipt_page(organization, month, token))
