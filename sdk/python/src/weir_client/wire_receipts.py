"""Receipts and their keys from messages."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import receipt_service_pb2 as service_pb
from weir.v1 import receipts_pb2 as pb

from weir_client.receipts import Receipt, ReceiptChain, ReceiptKey, ReceiptMonth, ReceiptStep


def receipts(messages: Iterable[pb.Receipt]) -> tuple[Receipt, ...]:
    """One receipt for each message."""
    return tuple(receipt(each) for each in messages)


def receipt(message: pb.Receipt) -> Receipt:
    """As the server sent it; nothing is checked here."""
    return Receipt(
        organization_id=message.organization_id,
        project_id=message.project_id,
        api_key_id=message.api_key_id,
        request_id=message.request_id,
        part=message.part,
        input_token_count=message.input_token_count,
        cached_input_token_count=message.cached_input_token_count,
        billed_token_count=message.billed_token_count,
        embedding_token_count=message.embedding_token_count,
        price_version=message.price_version,
        cost_picos=message.cost_picos,
        admitted_at_us=micros_of(message.admit_time),
        settled_at_us=micros_of(message.settle_time),
        sequence=message.sequence,
        previous_hash=message.previous_hash,
        currency_code=message.currency_code,
        model=message.model,
        outcome=message.outcome,
        hash=message.hash,
        key_id=message.key_id,
        signature=message.signature,
        path=tuple(ReceiptStep(step.on_left, step.hash) for step in message.path),
        version=message.version,
    )


def receipt_key(message: pb.ReceiptKey) -> ReceiptKey:
    """A public key."""
    return ReceiptKey(message.key_id, message.public_key, micros_of(message.create_time))


def receipt_month(message: service_pb.GetReceiptMonthResponse) -> ReceiptMonth:
    """The sum of a month."""
    return ReceiptMonth(
        organization_id=message.organization_id,
        month=message.month,
        root=message.root,
        receipt_count=message.receipt_count,
        chains=tuple(
            ReceiptChain(
                project_id=each.project_id,
                first_sequence=each.first_sequence,
                last_sequence=each.last_sequence,
                previous_hash=each.previous_hash,
                last_hash=each.last_hash,
                receipt_count=each.receipt_count,
            )
            for each in message.chains
        ),
        unreceipted_count=message.unreceipted_count,
    )


def micros_of(stamp: Timestamp) -> int:
    """Microseconds since 1970."""
    return stamp.seconds * 1_000_000 + stamp.nanos // 1000
