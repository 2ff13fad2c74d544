"""Print `docs/endings.md` from the table of endings: `python -m infra.endings > docs/endings.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from api.core.errors import Cause
from api.generation.endings import CAUSES, PHASES, SIBLING, TABLE, WAYS, Action, Cell

INTRODUCTION = """\
# How requests end, and what each end costs

This page is generated from `api/generation/endings.py`, by which holds are settled or voided:
`python -m infra.endings > docs/endings.md`. [ADR 0043](../infra/adr/0043-charges-follow-the-cause.md)
has the reasons.

Output that reached the client is billed, whatever the cause of the end. Before the first delivered token,
only a fault of the service is free; then the hold is voided, nothing of the request is left in
any quota (tokens, requests, cost, prepaid credit), and the same request id may be used again.
Any other end is settled: the request counts, its id is used up, and the input is billed from
the moment the engine has begun with it, at the cached price as far as it was cached.
"""
EMBEDDINGS = """\
An `Embed` call delivers its vectors all at once. If it is cut off, its input is the texts that
the encoder had begun with, in parts of at most 16,384 tokens. It is never generating.
"""
WALK = """\
`tests/api/test_endings.py` walks every cell against real holds and quotas; most cells are
covered by another test as well, through a running service.
"""
RECOVERY = """\
If a process is killed, its journal settles what it had delivered, and voids the rest. If its
machine is lost as well, the hold expires: what the last lease extension knew to be delivered is
billed. Quotas with a window keep the whole lease as used until the journal is found or the
window ends; prepaid credit keeps what is billed.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def billed(cell: Cell) -> str:
    """Return what a cell bills and counts, in words."""
    charge = cell.charge
    if charge.action is Action.NONE:
        return "nothing"
    if charge.action is Action.STANDS:
        return "as it was settled"
    if charge.action is Action.VOID:
        return "nothing; the request does not count"
    if charge.bills_output:
        return "input, delivered output; the request counts"
    return "input; the request counts" if charge.bills_input else "no tokens; the request counts"


def ways_of(cause: Cause) -> str:
    """Return the table of the ways to end by one cause."""
    return table(("end", "what the client is told"), ((way.name, way.told) for way in WAYS if way.cause is cause))


def page() -> str:
    """Return the whole page."""
    cells = (
        (str(phase), str(cause), str(cell.charge.action), billed(cell), f"`{cell.test}`") for (phase, cause), cell in TABLE.items()
    )
    parts = [
        INTRODUCTION,
        "## Phases\n",
        table(("phase", "meaning"), PHASES.items()),
        EMBEDDINGS,
        "## Causes\n",
        table(("cause", "meaning"), CAUSES.items()),
        "## Charges\n",
        WALK,
        table(("phase", "cause", "hold", "billed and counted", "test"), cells),
        RECOVERY,
        "## Ways to end\n",
        *(f"### {cause.capitalize()}\n\n" + ways_of(cause) for cause in Cause),
        f"{SIBLING}.\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
