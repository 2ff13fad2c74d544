"""The tables of receipts, beside the columns that each has in its usage event: chains, public keys, signatures.

Keys and signatures are append-only, and a chain goes forward only, each by triggers in the migrations.
"""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Identity, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base


class ReceiptChain(Base):
    """Where the receipts of a project have come to; made with the project by a trigger. No later receipt is settled before
    `last_settled_at`. A trigger lets it go forward only.
    """

    __tablename__ = "receipt_chains"
    __table_args__ = (
        CheckConstraint("last_sequence >= 0", name="sequence_not_negative"),
        CheckConstraint("octet_length(last_hash) = 32", name="hash_size"),
        {"postgresql_with": {"fillfactor": "50"}},  # updated by every settlement, like a counter
    )

    project_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    last_sequence: Mapped[int] = mapped_column(server_default="0")
    last_hash: Mapped[bytes] = mapped_column(server_default=text("decode(repeat('00', 32), 'hex')"))
    last_settled_at: Mapped[datetime] = mapped_column(server_default=text("'1970-01-01 00:00:00+00'"))


class ReceiptKey(Base):
    """The public half of a key that receipts were signed with. Kept for ever: old receipts are verified by it."""

    __tablename__ = "receipt_keys"
    __table_args__ = (CheckConstraint("octet_length(public_key) = 32", name="public_key_size"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    public_key: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ReceiptBatch(Base):
    """One signature over all receipts of one transaction. hashes: theirs, one after the other, as the leaves of the tree stand."""

    __tablename__ = "receipt_batches"
    __table_args__ = (
        CheckConstraint("octet_length(hashes) > 0 AND octet_length(hashes) % 32 = 0", name="hashes_size"),
        CheckConstraint("octet_length(signature) = 64", name="signature_size"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("receipt_keys.id"))
    hashes: Mapped[bytes]
    signature: Mapped[bytes]
