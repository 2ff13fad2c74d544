"""Effects that a field of another server can have in a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

Values = tuple[object, ...]


class Effect(StrEnum):
    """Effect of a field on a request, unless its value is neutral."""

    ALIAS = "alias"  # of a parameter of ours
    FORMAT = "format"  # of the answer
    THINKING = "thinking"  # switch, effort or budget of the thinking
    GREEDY = "greedy"  # `do_sample`
    KEPT = "kept"  # accepted where it keeps the whole conversation
    HINT = "hint"  # ignored, and named in the header
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """Request field of another server.

    `neutral` values change nothing, like `null` and empty ones. `note` is the remedy if the field
    is refused, otherwise the meaning of the field. `means` are the parameters that it is an alias
    of; an API has at most one of them.
    """

    effect: Effect
    note: str = ""
    neutral: Values = ()
    means: tuple[str, ...] = ()


def refused(note: str, fields: Iterable[str] | Mapping[str, Values]) -> Iterator[tuple[str, Field]]:
    """Yield fields that are refused for the same reason, each with its neutral values."""
    neutral = fields if isinstance(fields, Mapping) else dict.fromkeys(fields, ())
    for name, values in neutral.items():
        yield name, Field(Effect.REFUSED, note, values)


def alias(
    means: str | tuple[str, ...], fields: Iterable[str] | Mapping[str, Values]
) -> Iterator[tuple[str, Field]]:
    """Yield aliases of a parameter, each with values that the parameter does not have."""
    names = (means,) if isinstance(means, str) else means
    for name, field in refused("", fields):
        yield name, Field(Effect.ALIAS, "", field.neutral, names)


def acting(effect: Effect, fields: Mapping[str, tuple[str, Values]]) -> Iterator[tuple[str, Field]]:
    """Yield fields that have this effect, each with its meaning and its neutral values."""
    for name, (note, neutral) in fields.items():
        yield name, Field(effect, note, neutral)


def hints(*names: str) -> Iterator[tuple[str, Field]]:
    """Yield fields that cannot change the answer and are ignored."""
    for name in names:
        yield name, Field(Effect.HINT)
