"""Kinds of fields of a configuration file: their parsing, and their text in files and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from weir.v1 import types_pb2
from weir_client import Money, QuotaDimension
from weir_client.wire import DIMENSION_NUMBERS

from weir_cli.terms import Term
from weir_cli.texts import (
    INT64_MAX,
    decimal_text,
    dimension_amount,
    parse_amount,
    parse_limit,
    parse_picos,
    parse_price,
    parse_selector,
    parse_thousandths,
    per_million,
    selector_text,
)

Json = Any  # a value in the JSON mapping of a message
Texts = Mapping[str, str]  # the scalars of one mapping of the file, by key


@dataclass(frozen=True, slots=True)
class Scalar:
    """Key of a file that has a single value, and the API field `name` that it becomes.

    `read` parses the text, given the texts of the sibling keys, and raises ValueError with the
    remedy. `show` formats the value for tables and files. A `name` such as `a.b` is the field `b`
    of the message in the field `a`. `tag` is the YAML type with which the value needs no quotes.
    """

    name: str
    read: Callable[[str, Texts], Json]
    show: Callable[[Json, Mapping[str, Json]], str]
    tag: str = "str"


@dataclass(frozen=True, slots=True)
class Words:
    """Key of a file that has a list of words, or of percentages, which are a message in the API."""

    name: str
    are_percentages: bool = False


@dataclass(frozen=True, slots=True)
class Sections:
    """Key of a file that has a list of mappings, or one mapping.

    `prune` is the API field that removes entries absent from the list; empty if there is none.
    """

    name: str
    section: Section
    prune: str = ""
    is_list: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """Kind of mapping in a file: its keys in the order of writing, and the required ones."""

    keys: Mapping[str, Scalar | Words | Sections]
    required: tuple[str, ...]


def text(name: str) -> Scalar:
    return Scalar(name, lambda given, _: given, lambda value, _: str(value))


def truth(name: str) -> Scalar:
    def read(given: str, _: Texts) -> bool:
        if given.lower() not in ("true", "false"):
            raise ValueError("write true or false")
        return given.lower() == "true"

    return Scalar(name, read, lambda value, _: "true" if value else "false", "bool")


def moment(name: str) -> Scalar:
    """Build a `Scalar` for a time. Its default time of day is midnight, its default offset UTC."""

    def read(given: str, _: Texts) -> str:
        try:
            time = datetime.fromisoformat(given)
        except ValueError:
            raise ValueError(
                "write a date as 2026-12-31, or a time as 2026-12-31T18:00:00Z"
            ) from None
        return (
            time.replace(tzinfo=time.tzinfo or UTC)
            .astimezone(UTC)
            .isoformat()
            .replace("+00:00", "Z")
        )

    return Scalar(name, read, lambda value, _: str(value), "timestamp")


def thousandths(name: str) -> Scalar:
    return Scalar(
        name,
        lambda given, _: parse_thousandths(given),
        lambda value, _: decimal_text(Decimal(int(value)) / 1000, 0).replace(",", "_"),
        "float",
    )


def tier(name: str) -> Scalar:
    def read(given: str, _: Texts) -> str:
        if given not in ("interactive", "batch"):
            raise ValueError("give interactive or batch")
        return f"SERVICE_TIER_{given.upper()}"

    return Scalar(name, read, lambda value, _: str(value).removeprefix("SERVICE_TIER_").lower())


def selector(name: str) -> Scalar:
    """Build a `Scalar` for what a limit is given to each of: such as `end-user`."""
    return Scalar(
        name, lambda given, _: parse_selector(given), lambda value, _: selector_text(str(value))
    )


def limit(name: str) -> Scalar:
    """Build a `Scalar` for a limit, in requests, tokens or currency units by its dimension."""

    def read(given: str, siblings: Texts) -> int:
        kind = siblings.get("dimension", "")
        if kind not in set(QuotaDimension):
            return 0  # the wrong dimension is reported at its own key
        return parse_limit(QuotaDimension(kind), given.replace("_", ""))

    def show(value: Json, siblings: Mapping[str, Json]) -> str:
        return dimension_amount(dimension_of(siblings.get("dimension")), int(value)).replace(
            ",", "_"
        )

    return Scalar(name, read, show, "float")


def price(name: str) -> Scalar:
    """Build a `Scalar` for a price per million tokens, in units of the currency."""
    return Scalar(
        name,
        lambda given, _: parse_price(given.replace("_", "")),
        lambda value, _: decimal_text(per_million(int(value))).replace(",", "_"),
        "float",
    )


def amount(name: str) -> Scalar:
    def read(given: str, _: Texts) -> int:
        picos = parse_picos(given)
        if picos < 0:
            raise ValueError("give 0 or more")
        return picos

    return Scalar(
        name,
        read,
        lambda value, _: decimal_text(Money("", int(value)).amount).replace(",", "_"),
        "float",
    )


def count(name: str, maximum: int = INT64_MAX, minimum: int = 1) -> Scalar:
    def read(given: str, _: Texts) -> int:
        number = parse_amount(given)
        if not minimum <= number <= maximum or number != number.to_integral_value():
            raise ValueError(f"write a whole number from {minimum} to {maximum:,}")
        return int(number)

    return Scalar(name, read, lambda value, _: f"{int(value):_}", "int")


def dimension(name: str) -> Scalar:
    from weir_cli.tenants import DIMENSION_NAMES, DIMENSIONS

    def read(given: str, _: Texts) -> int:
        if given not in DIMENSIONS:
            raise ValueError(f"give one of {DIMENSION_NAMES}")
        return int(DIMENSION_NUMBERS[QuotaDimension(given)])

    return Scalar(name, read, lambda value, _: str(dimension_of(value)))


def dimension_of(value: Json) -> QuotaDimension:
    """Convert a dimension's name or number in the API."""
    number = (
        types_pb2.QuotaDimension.Value(value)
        if isinstance(value, str)
        else types_pb2.QuotaDimension.ValueType(value or 0)
    )
    return next(
        (each for each, known in DIMENSION_NUMBERS.items() if known == number),
        QuotaDimension.UNSPECIFIED,
    )


# Entries of terms by their kind.
KINDS: Mapping[str, Callable[[str], Scalar | Words]] = {
    "amount": amount,
    "count": count,
    "multiplier": thousandths,
    "percentages": partial(Words, are_percentages=True),
    "price": price,
    "switch": truth,
    "text": text,
    "weight": thousandths,
    "words": Words,
}


def entries(terms: Iterable[Term]) -> dict[str, Scalar | Words]:
    """Build the entries of a file for terms."""
    return {each.key: KINDS[each.kind](each.field) for each in terms}
