"""Progress and charge of requests that end: the vocabulary of the tables in `endings.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from api.core.errors import Cause
from metering.core.models import Outcome


class EndPhase(StrEnum):
    """Progress of a request when it ended."""

    BEFORE_HOLD = "before the hold"
    HELD = "held"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    DELIVERING = "delivering"
    SETTLED = "settled"


class Action(StrEnum):
    """Action on the hold at an end."""

    NONE = "no hold"
    SETTLE = "settle"
    VOID = "void"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class EndCharge:
    """EndCharge of an end.

    Tokens are billed and counted in quotas alike; money and prepaid credit follow.
    """

    action: Action
    bills_input: bool = False
    bills_output: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table. test: the test that covers it, besides the test of all cells."""

    charge: EndCharge
    test: str


@dataclass(frozen=True, slots=True)
class Way:
    """One way to end.

    response: what the client receives. outcomes, errors: those by which the code recognizes it; an
    error takes precedence over an outcome.
    """

    name: str
    cause: Cause
    response: str
    outcomes: tuple[Outcome, ...] = ()
    errors: tuple[type[Exception], ...] = ()
