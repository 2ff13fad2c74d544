"""Positions in the audit log: each entry once, whenever its change commits."""

from __future__ import annotations

import asyncio
import random

import pytest

from metering.core import audit
from metering.core.audit import entries_after, record_change
from metering.core.errors import InvalidValue
from metering.store.db import Sessions, create_engine, create_sessions
from tests.conftest import as_application


async def after(sessions: Sessions, position: int, size: int = 1000) -> tuple[list[str], int]:
    async with sessions() as session:
        found, position = await entries_after(session, after_entry_id=position, page_size=size)
        return [each.action for each in found], position


async def write(sessions: Sessions, action: str) -> None:
    async with sessions.begin() as session:
        await record_change(session, "ann", action, "x", after={})


async def test_an_entry_that_commits_late_is_not_skipped(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is lower than that of an entry that is visible before it."""
    monkeypatch.setattr(audit, "WRITERS_WAIT_S", 0.1)
    _, begun = await after(sessions, 0)
    async with sessions.begin() as late:
        await record_change(late, "ann", "late", "x", after={})
        await write(sessions, "early")

        assert await after(sessions, begun) == ([], begun)
    found, position = await after(sessions, begun)

    assert found == ["late", "early"]
    assert await after(sessions, position) == ([], position)


async def test_a_change_that_ends_meanwhile_is_waited_for(sessions: Sessions) -> None:
    _, begun = await after(sessions, 0)
    async with sessions() as late:
        await record_change(late, "ann", "late", "x", after={})
        reading = asyncio.create_task(after(sessions, begun))
        await asyncio.sleep(0.1)
        await write(sessions, "newer")  # does not delay the reader, and is not part of the answer
        assert not reading.done()
        await late.commit()

    found, position = await reading

    assert found == ["late"]
    assert (await after(sessions, position))[0] == ["newer"]


async def test_a_change_that_is_rolled_back_leaves_only_a_gap(sessions: Sessions) -> None:
    _, begun = await after(sessions, 0)
    async with sessions() as undone:
        await record_change(undone, "ann", "undone", "x", after={})
        await undone.rollback()
    await write(sessions, "kept")

    found, position = await after(sessions, begun)

    assert (found, position) == (["kept"], begun + 2)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_reader_beside_many_writers_gets_every_entry_once(
    database_url: str, seed: int
) -> None:
    """Read as the application role, in small pages, beside changes that are rolled back."""
    engine = create_engine(as_application(database_url))
    sessions = create_sessions(engine)
    _, position = await after(sessions, 0)
    written: list[str] = []

    async def writer(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        for each in range(12):
            async with sessions() as session:
                names = [f"{number}.{each}.{part}" for part in range(chance.randrange(1, 4))]
                for name in names:
                    await record_change(session, "ann", name, "x", after={})
                    await asyncio.sleep(chance.random() / 200)
                if chance.random() < 0.3:
                    await session.rollback()
                else:
                    await session.commit()
                    written.extend(names)

    read: list[str] = []
    writers = asyncio.gather(*(writer(each) for each in range(6)))
    while not writers.done():
        found, position = await after(sessions, position, 5)
        read += found
    await writers
    while found := (page := await after(sessions, position, 5))[0]:
        read += found
        position = page[1]
    await engine.dispose()

    assert sorted(read) == sorted(written)
    assert len(read) > 50


@pytest.mark.parametrize("position", [-1, 10**9])
async def test_a_position_that_cannot_be_is_refused(sessions: Sessions, position: int) -> None:
    with pytest.raises(InvalidValue, match="after_entry_id: must be between 0 and"):
        await after(sessions, position)
