"""Phases and charges of requests that end: the vocabulary of the tables in `endings.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from api.core.errors import Cause
from metering.core.models import Outcome


class EndPhase(StrEnum):
    """Phase in which a request ended."""

    BEFORE_HOLD = "before the hold"
    HELD = "held"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    DELIVERING = "delivering"
    SETTLED = "settled"


class Action(StrEnum):
    """Action on the hold of a request that ends."""

    NONE = "no hold"
    SETTLE = "settle"
    VOID = "void"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class EndCharge:
    """Charge of a request that ends: the action on its hold, and the tokens that are billed.

    Tokens that are billed also count in quotas; money and prepaid credit follow from them.
    """

    action: Action
    bills_input: bool = False
    bills_output: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of the table of charges. `test` names its own test; another one covers all cells."""

    charge: EndCharge
    test: str


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a request can end.

    `response` is what the client receives. An end is recognized by its outcome or its error, one of
    `outcomes` or `errors`; an error takes precedence.
    """

    name: str
    cause: Cause
    response: str
    outcomes: tuple[Outcome, ...] = ()
    errors: tuple[type[Exception], ...] = ()
