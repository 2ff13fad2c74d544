"""What a check is: one query whose rows are violations.

Checks use nothing of the code that they judge: windows, weights, prices and sums are written down here once more, in SQL, so
that one mistake cannot hide another. A query is set-based, reads one snapshot, and has one parameter,
`since` ('-infinity' for all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# What each kind of token is called, how many of them a usage event has, and which column prices them.
TOKEN_KINDS = {
    "input": ("input_token_count - cached_input_token_count", "input_picos_per_token"),
    "cached_input": ("cached_input_token_count", "cached_input_picos_per_token"),
    "output": ("billed_token_count", "output_picos_per_token"),
    "embedding": ("embedding_token_count", "embedding_picos_per_token"),
}
# Of usage events: one sum for each kind.
KIND_SUMS = ", ".join(f"sum({count}) AS {kind}" for kind, (count, _) in TOKEN_KINDS.items())
# Of a row with such sums: one row for each kind.
KIND_ROWS = f"LATERAL (VALUES {', '.join(f'({kind!r}, {kind})' for kind in TOKEN_KINDS)}) AS k (token_kind, token_count)"
# What the tokens of a usage event e cost by its price version p.
EVENT_COST = " + ".join(f"(e.{count.replace('- ', '- e.')}) * p.{price}" for count, price in TOKEN_KINDS.values())
SINCE = "%(since)s::timestamptz"
# Of usage events: that this one is not billed by an adjustment in place of its own cost.
NOT_CORRECTED = (
    "NOT EXISTS (SELECT FROM usage_corrections c WHERE (c.hold_id, c.part, c.settled_at) = (e.hold_id, e.part, e.settled_at))"
)


class Moment(StrEnum):
    """When a check must hold.

    always: at every commit, whatever goes on. soon: some minutes after, if the background work is done at all. at_rest: once no
    process runs, and all that they left is swept and rated.
    """

    ALWAYS = "always"
    SOON = "soon"
    AT_REST = "at_rest"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be true. sql: rows (subject, problem), one for each violation. proves: in a sentence."""

    name: str
    proves: str
    sql: str
    moment: Moment = Moment.ALWAYS


def rows_with(subject: str, source: str, problems: Mapping[str, str]) -> str:
    """SQL of a check by rows: those of `source` for which a condition (a key of `problems`) holds, with what is wrong (its value).

    The words are put together for such rows alone, so that a check costs what its conditions cost.
    """
    words = ", ".join(f"CASE WHEN {condition} THEN {problem} END" for condition, problem in problems.items())
    anything = " OR ".join(f"({condition})" for condition in problems)
    return f"SELECT {subject} AS subject, concat_ws('; ', {words}) AS problem FROM ({source}) AS judged WHERE {anything}"
