"""What the steps of applying a configuration share: acts in savepoints, and what came of them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from metering.configuration.configuration import Change, Mistake
from metering.errors import InvalidValue, MeteringError
from metering.quotas.quota_recount import Uncounted, recount

Value = TypeVar("Value")

# What single calls name otherwise than a document does.
FIELDS = {
    "weights.input_milli": "input_weight_milli",
    "weights.cached_input_milli": "cached_input_weight_milli",
    "weights.output_milli": "output_weight_milli",
    "weights": "input_weight_milli",
    "lifetime": "expire_time",
}


@dataclass(slots=True)
class Attempts:
    """Changes that were made, and those that were refused. now: the time of the transaction; models: those that are served.

    created: subjects of limits that were made. uncounted: limits that do not count the past yet.
    """

    session: AsyncSession
    actor: str
    now: datetime
    models: Collection[str]
    changes: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    created: set[uuid.UUID] = field(default_factory=set)
    uncounted: list[Uncounted] = field(default_factory=list)

    async def count_past(self) -> None:
        """Make new limits count what was used before: after all else, since nobody is let in from here to the end.

        What did not exist before has used nothing.
        """
        await recount(self.session, [each for each in self.uncounted if each[0].subject_id not in self.created])

    async def attempt(self, path: str, act: Callable[[], Awaitable[Value]], names: dict[str, str] | None = None) -> Value | None:
        """What the act answers; None if it was refused, which is then noted. names: of fields that the document calls otherwise."""
        try:
            async with self.session.begin_nested():
                return await act()
        except InvalidValue as refusal:
            self.wrong(f"{path}.{(names or FIELDS).get(refusal.field, refusal.field)}", refusal.remedy)
        except MeteringError as refusal:
            self.wrong(path, str(refusal))
        return None

    def wrong(self, path: str, message: str) -> None:
        """Note a mistake."""
        self.mistakes.append(Mistake(path, message))
