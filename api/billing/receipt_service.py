"""`ReceiptService`: receipts by month, and the public keys that verify them."""

from __future__ import annotations

from sqlalchemy import select
from weir.v1 import receipt_service_pb2 as pb
from weir.v1 import receipt_service_pb2_grpc as pb_grpc
from weir.v1 import receipts_pb2

from api.access.auth import Authenticator
from api.billing.billing_calls import Reports, visible
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import chain_message, receipt_messages
from metering.ledger.ledger import month_bounds
from metering.receipts.models import ReceiptKey
from metering.receipts.months import BEGINNING, PageMark, receipt_month, receipts_page

PAGE_SIZE = 500


class ReceiptServicer(pb_grpc.ReceiptServiceServicer):
    """See `proto/weir/v1/receipt_service.proto`."""

    def __init__(self, authenticator: Authenticator, reports: Reports) -> None:
        self._authenticator = authenticator
        self._reports = reports

    async def ListReceiptKeys(self, request: pb.ListReceiptKeysRequest, context: Context) -> pb.ListReceiptKeysResponse:
        """All public keys: they are no secret."""
        principal = await self._authenticator.principal(context)
        async with self._reports.turn(principal) as sessions, sessions() as session:
            keys = (await session.scalars(select(ReceiptKey).order_by(ReceiptKey.created_at, ReceiptKey.id))).all()
        return pb.ListReceiptKeysResponse(
            keys=[
                receipts_pb2.ReceiptKey(key_id=key.id, public_key=key.public_key, create_time=wire.timestamp(key.created_at))
                for key in keys
            ]
        )

    async def ListReceipts(self, request: pb.ListReceiptsRequest, context: Context) -> pb.ListReceiptsResponse:
        """A page of a month."""
        principal = await self._authenticator.principal(context)
        month = month_bounds(request.month)[0].date()
        after = PageMark.parse(request.page_token) if request.page_token else BEGINNING
        async with self._reports.turn(principal) as sessions, sessions() as session:
            owner = await visible(session, principal, request.organization)
            page_size = request.page_size or PAGE_SIZE
            receipts, last = await receipts_page(session, owner.id, month, after=after, page_size=page_size)
        return pb.ListReceiptsResponse(receipts=receipt_messages(receipts), next_page_token="" if last is None else str(last))

    async def GetReceiptMonth(self, request: pb.GetReceiptMonthRequest, context: Context) -> pb.GetReceiptMonthResponse:
        """The sum of a month."""
        principal = await self._authenticator.principal(context)
        month = month_bounds(request.month)[0].date()
        async with self._reports.turn(principal) as sessions, sessions() as session:
            owner = await visible(session, principal, request.organization)
            found = await receipt_month(session, owner.id, month)
        return pb.GetReceiptMonthResponse(
            organization_id=str(owner.id),
            month=request.month,
            root=found.root,
            receipt_count=found.receipt_count,
            chains=[chain_message(piece) for piece in found.chains],
            unreceipted_count=found.unreceipted_count,
        )
