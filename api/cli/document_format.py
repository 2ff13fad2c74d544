"""What a configuration file may say: its keys, how each value is written, and which field of the contract it is.

One more attribute of a limit is one more line in `QUOTA`. `document.py` reads and writes by these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from weir_client import Money, QuotaDimension
from weir_client.wire import DIMENSIONS
from weir_client.wire_accounts import DIMENSION_NUMBERS

from api.cli.amounts import (
    decimal_text,
    dimension_amount,
    parse_amount,
    parse_limit,
    parse_price,
    per_million,
    percents_text,
    units_to_picos,
)

Json = Any  # a value of the JSON mapping of a message
Texts = Mapping[str, str]  # the scalars of one mapping of the file, by key


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value. read: from its text, with its siblings' texts; raises ValueError saying what would do. show: for people and files.

    tag: YAML's type of it, so that it is written without quotes where it needs none.
    """

    name: str
    read: Callable[[str, Texts], Json]
    show: Callable[[Json, Mapping[str, Json]], str]
    tag: str = "str"


@dataclass(frozen=True, slots=True)
class Words:
    """A list of words."""

    name: str


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A list of percentages."""

    name: str


@dataclass(frozen=True, slots=True)
class Sections:
    """A list of mappings. prune: the flag of the contract that removes what the list does not name; empty if nothing can be."""

    name: str
    section: Section
    prune: str = ""


@dataclass(frozen=True, slots=True)
class Nested:
    """One mapping inside another."""

    name: str
    section: Section


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of mapping: its keys in the order in which they are written, and those that it must have."""

    keys: Mapping[str, Scalar | Words | Thresholds | Nested | Sections]
    required: tuple[str, ...]


def text(name: str) -> Scalar:
    """A text as it stands."""
    return Scalar(name, lambda given, _: given, lambda value, _: str(value))


def truth(name: str) -> Scalar:
    """True or false."""

    def read(given: str, _: Texts) -> bool:
        if given.lower() not in ("true", "false"):
            raise ValueError("write true or false")
        return given.lower() == "true"

    return Scalar(name, read, lambda value, _: "true" if value else "false", "bool")


def moment(name: str) -> Scalar:
    """A time; without an offset it is UTC, without a time of day it is midnight."""

    def read(given: str, _: Texts) -> str:
        try:
            time = datetime.fromisoformat(given)
        except ValueError:
            raise ValueError("write a date as 2026-12-31, or a time as 2026-12-31T18:00:00Z") from None
        return time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC).isoformat().replace("+00:00", "Z")

    return Scalar(name, read, lambda value, _: str(value), "timestamp")


def thousandths(name: str) -> Scalar:
    """A factor with at most three decimals."""

    def read(given: str, _: Texts) -> int:
        milli = parse_amount(given.replace("_", "")) * 1000
        if milli != milli.to_integral_value() or not 0 <= milli <= 10**9:
            raise ValueError("write a number of 0 or more with at most three decimals, such as 0.25")
        return int(milli)

    return Scalar(name, read, lambda value, _: decimal_text(Decimal(int(value)) / 1000, 0).replace(",", "_"), "float")


def limit(name: str) -> Scalar:
    """A limit in the unit of its dimension: requests, tokens, or units of the currency."""

    def read(given: str, siblings: Texts) -> int:
        kind = siblings.get("dimension", "")
        if kind not in set(QuotaDimension):
            return 0  # the dimension is what is wrong, and it says so
        return parse_limit(QuotaDimension(kind), given.replace("_", ""))

    def show(value: Json, siblings: Mapping[str, Json]) -> str:
        return dimension_amount(dimension_of(siblings.get("dimension")), int(value)).replace(",", "_")

    return Scalar(name, read, show, "float")


def price(name: str) -> Scalar:
    """A price per million tokens in units of the currency."""
    return Scalar(
        name,
        lambda given, _: parse_price(given.replace("_", "")),
        lambda value, _: decimal_text(per_million(int(value))).replace(",", "_"),
        "float",
    )


def amount(name: str) -> Scalar:
    """An amount in units of the currency."""

    def read(given: str, _: Texts) -> int:
        picos = units_to_picos(parse_amount(given))
        if picos < 0:
            raise ValueError("give 0 or more")
        return picos

    return Scalar(name, read, lambda value, _: decimal_text(Money("", int(value)).amount).replace(",", "_"), "float")


def count(name: str) -> Scalar:
    """A whole number of 1 or more."""

    def read(given: str, _: Texts) -> int:
        number = parse_amount(given)
        if number < 1 or number != number.to_integral_value():
            raise ValueError("write a whole number of 1 or more")
        return int(number)

    return Scalar(name, read, lambda value, _: f"{int(value):_}", "int")


def dimension(name: str) -> Scalar:
    """What a limit counts."""
    names = [str(each) for each in QuotaDimension if each is not QuotaDimension.UNSPECIFIED]

    def read(given: str, _: Texts) -> int:
        if given not in names:
            raise ValueError(f"give one of {', '.join(names)}")
        return int(DIMENSION_NUMBERS[QuotaDimension(given)])

    return Scalar(name, read, lambda value, _: str(dimension_of(value)))


def dimension_of(value: Json) -> QuotaDimension:
    """A dimension from its name or number in the contract."""
    from weir.v1 import types_pb2

    number = types_pb2.QuotaDimension.Value(value) if isinstance(value, str) else types_pb2.QuotaDimension.ValueType(value or 0)
    return DIMENSIONS.get(number, QuotaDimension.UNSPECIFIED)


QUOTA = Section(
    {
        "dimension": dimension("dimension"),
        "model": text("model"),
        "for_new_keys": truth("for_new_keys"),
        "limit": limit("limit_value"),
        "enforced": truth("enforced"),
        "input_weight": thousandths("input_weight_milli"),
        "cached_input_weight": thousandths("cached_input_weight_milli"),
        "output_weight": thousandths("output_weight_milli"),
        "alert_at": Thresholds("alert_at"),
        "raised_limit": limit("raised_limit_value"),
        "raised_until": moment("raised_until_time"),
        "raise_reason": text("raise_reason"),
    },
    required=("dimension", "limit"),
)
QUOTAS = Sections("quotas", QUOTA, prune="prune_quotas")
KEY = Section(
    {
        "name": text("name"),
        "prefix": text("prefix"),
        "scopes": Words("scopes"),
        "models": Words("models"),
        "allowed_networks": Words("allowed_networks"),
        "max_input_tokens": count("max_input_tokens"),
        "max_output_tokens": count("max_output_tokens"),
        "expires": moment("expire_time"),
        "quotas": QUOTAS,
    },
    required=("name",),
)
PROJECT = Section(
    {"name": text("name"), "quotas": QUOTAS, "keys": Sections("keys", KEY, prune="prune_keys")},
    required=("name",),
)
BILLING_PROFILE = Section(
    {
        "emails": Words("emails"),
        "legal_name": text("legal_name"),
        "address_line1": text("address_line1"),
        "address_line2": text("address_line2"),
        "city": text("city"),
        "postal_code": text("postal_code"),
        "state": text("state"),
        "country": text("country"),
        "tax_id": text("tax_id"),
        "language": text("language"),
    },
    required=(),
)
ORGANIZATION = Section(
    {
        "name": text("name"),
        "currency": text("currency_code"),
        "billing_profile": Nested("billing_profile", BILLING_PROFILE),
        "quotas": QUOTAS,
        "projects": Sections("projects", PROJECT),
    },
    required=("name",),
)
PRICE = Section(
    {
        "model": text("model"),
        "currency": text("currency_code"),
        "input": price("input_picos_per_token"),
        "cached_input": price("cached_input_picos_per_token"),
        "output": price("output_picos_per_token"),
        "organization": text("organization"),
        "embedding": price("embedding_picos_per_token"),
        "batch_multiplier": thousandths("batch_multiplier_milli"),
        "effective": moment("effective_time"),
    },
    required=("model", "input", "cached_input", "output"),
)
DOCUMENT = Section(
    {"organizations": Sections("organizations", ORGANIZATION), "prices": Sections("prices", PRICE)},
    required=(),
)
SELECTOR = {
    "model": text("selector.model"),
    "token_kind": text("selector.token_kind"),
    "tier": text("selector.tier"),
}
ALLOWANCE = Section({**SELECTOR, "tokens": count("token_count")}, required=("tokens",))
STEP = Section(
    {"up_to": count("up_to_token_count"), "price": price("price_picos"), "share": thousandths("price_milli")}, required=()
)
TIERED_PRICE = Section({**SELECTOR, "kind": text("kind"), "steps": Sections("steps", STEP)}, required=("kind", "steps"))
PLAN = Section(
    {
        "name": text("name"),
        "currency": text("currency_code"),
        "allowances": Sections("allowances", ALLOWANCE),
        "tiered_prices": Sections("tiered_prices", TIERED_PRICE),
        "commitment": amount("commitment_picos"),
        "organizations": Words("organizations"),
    },
    required=("name",),
)
PROPOSAL = Section({"prices": Sections("prices", PRICE), "plans": Sections("plans", PLAN)}, required=())
# By what the answer calls the kinds of things.
SECTIONS = {
    "organization": ORGANIZATION,
    "billing_profile": BILLING_PROFILE,
    "project": PROJECT,
    "key": KEY,
    "quota": QUOTA,
    "price": PRICE,
}


def shown_field(kind: str, name: str, value: Json, quota: Mapping[str, Json]) -> tuple[str, str]:
    """A field of the contract as the file calls it, and its value as people read it."""
    for key, entry in SECTIONS[kind].keys.items():
        if entry.name == name:
            if isinstance(entry, Thresholds):
                return key, "as usual" if value is None else percents_text(value)
            if value is None:
                return key, "—"
            if not isinstance(entry, Scalar):
                return key, ", ".join(map(str, value))
            told = entry.show(value, quota)
            return key, told.replace("_", ",") if entry.tag in ("float", "int") else told
    return name, str(value)
