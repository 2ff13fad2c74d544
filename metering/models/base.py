"""What all tables share: the base that they are declared on, and the condition that a column holds one of some values."""

from __future__ import annotations

import uuid
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import BigInteger, DateTime, LargeBinary, MetaData, Numeric, Text, Uuid
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase


def one_of(column: str, values: type[StrEnum]) -> str:
    """SQL condition that a text column holds one of the values."""
    return f"{column} IN ({', '.join(repr(str(v)) for v in values)})"


class Base(DeclarativeBase):
    """Fixed constraint names, and one mapping from Python types to column types."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        int: BigInteger(),
        bytes: LargeBinary(),
        datetime: DateTime(timezone=True),
        uuid.UUID: Uuid(),
        Decimal: Numeric(38, 0),
        dict[str, Any]: JSONB(),
        list[str]: ARRAY(Text()),
        list[uuid.UUID]: ARRAY(Uuid()),
        list[int]: ARRAY(BigInteger()),
    }
