"""Values for people and programs: amounts that add, short `repr`, JSON, names of limits."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import types
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import weir_client
from weir_client import (
    ExceededQuota,
    Money,
    QuotaDimension,
    QuotaExceeded,
    QuotaStatus,
    QuotaSubject,
)
from weir_client.plain import REPR_CHARACTERS_MAX, Value
from weir_client.status import error_from_status

from tests.sdk import scripted

SECRET = "wk_do_not_show_this"
VALUES = [
    each
    for name in weir_client.__all__
    if inspect.isclass(each := getattr(weir_client, name)) and issubclass(each, Value)
]


def filled(hint: Any, name: str = "") -> Any:
    """Make a long value of a type."""
    kind = get_origin(hint) or hint
    if kind in (types.UnionType, Union):
        return filled(next(each for each in get_args(hint) if each is not type(None)), name)
    if kind is tuple:
        return (filled(get_args(hint)[0]),) * 3
    if kind in (Mapping, dict):
        return {"key" * 30: "value" * 30}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    if isinstance(kind, type) and issubclass(kind, Value):
        return make(kind)
    if name == "currency_code":
        return "USD"
    known: dict[Any, Any] = {
        str: SECRET if "secret" in name else "a long\ntext \u2028 " * 50,
        bytes: b"x" * 500,
        int: 10**18,
        float: 0.1234567,
        bool: True,
        datetime: datetime(2026, 11, 27, 10, 30, 0, 5, tzinfo=UTC),
    }
    return known.get(kind, "any" * 100)


def make(kind: type[Any]) -> Any:
    """Make a value whose every field is long."""
    hints = get_type_hints(kind)
    fields = {each.name: filled(hints[each.name], each.name) for each in dataclasses.fields(kind)}
    return kind(**fields)


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_every_value_is_one_short_line_without_secrets_and_complete_json(kind: type[Any]) -> None:
    value = make(kind)

    for text in (repr(value), repr(kind(**{each: getattr(value, each) for each in init(kind)}))):
        assert text.startswith(kind.__name__)
        assert len(text) <= REPR_CHARACTERS_MAX
        assert len(text.splitlines()) == 1
        assert SECRET not in text
    assert json.loads(json.dumps(value.to_dict())) == value.to_dict()
    assert json.loads(value.to_json(indent=2)) == json.loads(value.to_json())


def init(kind: type[Any]) -> list[str]:
    """Return the fields that a value needs."""
    missing = dataclasses.MISSING
    return [
        each.name
        for each in dataclasses.fields(kind)
        if each.default is missing and each.default_factory is missing
    ]


def test_there_are_values_to_try() -> None:
    assert len(VALUES) > 90
    assert any("secret" in get_type_hints(kind) for kind in VALUES)


def test_numbers_that_json_lacks_become_null() -> None:
    value = weir_client.TokenLogprob(token_id=1, logprob=-math.inf)

    assert json.loads(value.to_json())["logprob"] is None


def test_amounts_of_one_currency_add_subtract_compare_and_format() -> None:
    costs = [Money.of("0.00184", "USD"), Money.of("0.05", "USD")]

    assert sum(costs) == sum(costs, start=Money("USD", 0)) == costs[0] + costs[1]
    assert costs[1] - costs[0] == -(costs[0] - costs[1]) == Money.of("0.04816", "USD")
    assert costs[0] * 3 == 3 * costs[0] == sum([costs[0]] * 3)
    assert costs[0] < costs[1] <= costs[1]
    assert max(costs) == costs[1] >= costs[0]
    assert (f"{costs[0]:.4f}", f"{costs[0]}", f"{costs[0]:>12}") == (
        "0.0018",
        "0.00184 USD",
        " 0.00184 USD",
    )
    assert str(costs[1].amount) == "0.05" == str(Decimal("0.05"))
    assert eval(repr(costs[0]), {"Money": Money}) == costs[0]


@pytest.mark.parametrize("sign", ["+", "-", "<", "<=", ">", ">="])
def test_two_currencies_do_not_mix(sign: str) -> None:
    names = {"a": Money.of("1", "USD"), "b": Money.of("1", "EUR")}

    with pytest.raises(ValueError, match=r"1\.00 USD and 1\.00 EUR cannot be .* not converted"):
        eval(f"a {sign} b", names)
    for other in ("1", "0.5", "'1'"):
        with pytest.raises(TypeError):
            eval(f"a {sign} {other}", names)
    assert names["a"] != names["b"]


def test_a_limit_has_one_spelling_and_names_itself() -> None:
    metadata = {
        "subject": "api-key",
        "dimension": "requests-per-minute",
        "limit": "3",
    }
    refusal = scripted.status("RESOURCE_EXHAUSTED", "no", "QUOTA_EXCEEDED", metadata=metadata)

    error = error_from_status(refusal)

    assert isinstance(error, QuotaExceeded)
    assert isinstance(error.quota, ExceededQuota)
    assert error.quota.dimension == "requests-per-minute"
    assert error.quota.dimension is QuotaDimension.REQUESTS_PER_MINUTE
    assert error.quota.subject is QuotaSubject.API_KEY
    assert str(error.quota) == "requests per minute of the API key"
    status = QuotaStatus(
        subject=QuotaSubject.PROJECT, dimension=QuotaDimension.COST_PER_DAY, model="large"
    )
    assert f"{status}" == "cost per day of the project for large"
    rolling = metadata | {
        "dimension": "tokens-per-window",
        "window_minutes": "300",
        "group": "free",
    }
    quota = error_from_status(
        scripted.status("RESOURCE_EXHAUSTED", "no", "QUOTA_EXCEEDED", metadata=rolling)
    ).details.quota
    assert quota is not None
    assert str(quota) == "tokens per window of 300 minutes of the API key"
    assert (quota.window_minutes, quota.group) == (300, "free")
    assert json.loads(json.dumps(error.to_dict()))["details"]["quota"]["limit"] == 3
