"""Effects that a field of another server can have in a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

Values = tuple[object, ...]


class Effect(StrEnum):
    """Effect of a field in a request, unless its value changes nothing."""

    ALIAS = "alias"  # of a parameter of ours
    FORMAT = "format"  # of the answer
    THINKING = "thinking"  # switch, effort or budget of the thinking
    GREEDY = "greedy"  # `do_sample`
    KEPT = "kept"  # accepted where it keeps the whole conversation
    HINT = "hint"  # ignored, and named in the header
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """Field of a request.

    neutral: values that change nothing, beside `null` and empty ones. note: remedy of a refusal;
    of an effect, what the field means. means: names of the parameter that it is an alias of, of
    which an API has one at most.
    """

    effect: Effect
    note: str = ""
    neutral: Values = ()
    means: tuple[str, ...] = ()


def refused(note: str, fields: Iterable[str] | Mapping[str, Values]) -> Iterator[tuple[str, Field]]:
    """Yield fields that are refused for one reason, with their neutral values."""
    neutral = fields if isinstance(fields, Mapping) else dict.fromkeys(fields, ())
    for name, values in neutral.items():
        yield name, Field(Effect.REFUSED, note, values)


def alias(
    means: str | tuple[str, ...], fields: Iterable[str] | Mapping[str, Values]
) -> Iterator[tuple[str, Field]]:
    """Yield other names of a parameter, with values that it does not have."""
    names = (means,) if isinstance(means, str) else means
    for name, field in refused("", fields):
        yield name, Field(Effect.ALIAS, "", field.neutral, names)


def acting(effect: Effect, fields: Mapping[str, tuple[str, Values]]) -> Iterator[tuple[str, Field]]:
    """Yield fields with an effect of their own: meaning and neutral values."""
    for name, (note, neutral) in fields.items():
        yield name, Field(effect, note, neutral)


def hints(*names: str) -> Iterator[tuple[str, Field]]:
    """Yield fields that cannot change the answer."""
    for name in names:
        yield name, Field(Effect.HINT)
