"""Receipts as messages."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import receipts_pb2 as pb

from metering.receipts.chaining import IssuedReceipt
from metering.receipts.encoding import VERSION
from metering.receipts.months import ChainPiece

MICROS_PER_SECOND = 10**6


def receipt_messages(receipts: Iterable[IssuedReceipt]) -> list[pb.Receipt]:
    """One message each."""
    return [receipt_message(each) for each in receipts]


def receipt_message(receipt: IssuedReceipt) -> pb.Receipt:
    """What it says, and what proves it."""
    content = receipt.content
    return pb.Receipt(
        version=VERSION,
        organization_id=str(content.organization_id),
        project_id=str(content.project_id),
        api_key_id=str(content.api_key_id),
        request_id=str(content.request_id),
        part=content.part,
        model=content.model,
        outcome=content.outcome,
        input_token_count=content.input_token_count,
        cached_input_token_count=content.cached_input_token_count,
        billed_token_count=content.billed_token_count,
        embedding_token_count=content.embedding_token_count,
        price_version=content.price_version,
        currency_code=content.currency_code,
        cost_picos=content.cost_picos,
        admit_time=time_of(content.admitted_at_us),
        settle_time=time_of(content.settled_at_us),
        sequence=content.sequence,
        previous_hash=content.previous_hash,
        hash=receipt.hash,
        key_id=receipt.key_id,
        signature=receipt.signature,
        path=[pb.ReceiptStep(on_left=step.on_left, hash=step.hash) for step in receipt.path],
    )


def time_of(micros: int) -> Timestamp:
    """Microseconds since 1970 as a point in time."""
    seconds, rest = divmod(micros, MICROS_PER_SECOND)
    return Timestamp(seconds=seconds, nanos=rest * 1000)


def chain_message(piece: ChainPiece) -> pb.ReceiptChain:
    """A month's piece of a chain."""
    return pb.ReceiptChain(
        project_id=str(piece.project_id),
        first_sequence=piece.first_sequence,
        last_sequence=piece.last_sequence,
        previous_hash=piece.previous_hash,
        last_hash=piece.last_hash,
        receipt_count=piece.receipt_count,
    )
