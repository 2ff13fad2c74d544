"""The kinds of death, and how each is brought about."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

from api.chaos.processes import children_of
from api.chaos.system import System


class Kind(StrEnum):
    """What dies, by `kill -9` unless it says otherwise."""

    API = "API process"
    ENGINE = "engine host"
    API_AND_ENGINE = "API process and its engine"
    WORKER = "worker"
    EXPORTER = "exporter"
    POSTGRES = "PostgreSQL"
    POSTGRES_IMMEDIATE = "PostgreSQL, immediate shutdown"
    POSTGRES_BACKEND = "one PostgreSQL backend"
    BROKER = "broker, with all messages"
    EVERYTHING = "everything at once"


# How often each is drawn. The longest paths are those of API, engine and database.
WEIGHTS = {
    Kind.API: 5,
    Kind.ENGINE: 4,
    Kind.API_AND_ENGINE: 2,
    Kind.WORKER: 3,
    Kind.EXPORTER: 2,
    Kind.POSTGRES: 3,
    Kind.POSTGRES_IMMEDIATE: 2,
    Kind.POSTGRES_BACKEND: 2,
    Kind.BROKER: 2,
    Kind.EVERYTHING: 1,
}
AT_WORK_SHARE = 0.85
OF_ONE_API = (Kind.API, Kind.ENGINE, Kind.API_AND_ENGINE)


@dataclass(frozen=True, slots=True)
class Kill:
    """One death. api: whose requests it hits; None for those of all."""

    kind: Kind
    at: float
    api: int | None = None


def draw(rng: random.Random) -> Kind:
    """What dies next."""
    return rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]


async def strike(system: System, kind: Kind, rng: random.Random) -> Kill | None:
    """Kill it, and see that it comes back; None if it was down already, or not up yet."""
    api = aim(system, rng)
    kill = Kill(kind, time.monotonic(), api if kind in OF_ONE_API else None)
    match kind:
        case Kind.API:
            done = system.apis[api].kill()
        case Kind.ENGINE:
            done = kill_process(system.engine_pid(api))
        case Kind.API_AND_ENGINE:
            done = kill_process(system.engine_pid(api)) and system.apis[api].kill()
        case Kind.WORKER:
            done = system.worker.kill()
        case Kind.EXPORTER:
            done = system.exporter.kill()
        case Kind.BROKER:
            system.lose_broker()
            done = True
        case Kind.POSTGRES_BACKEND:
            done = kill_backend(system, rng)
        case Kind.POSTGRES:
            done = await strike_postgres(system, at_once=False)
        case Kind.POSTGRES_IMMEDIATE:
            done = await strike_postgres(system, at_once=True)
        case Kind.EVERYTHING:
            engines = [system.engine_pid(index) for index in range(len(system.apis))]
            for part in system.parts:
                part.kill()
            for engine in engines:
                kill_process(engine)
            system.lose_broker()
            done = await strike_postgres(system, at_once=False)
    return kill if done else None


def aim(system: System, rng: random.Random) -> int:
    """An API process: mostly one that answers, sometimes one that is just starting or recovering."""
    up = [index for index, api in enumerate(system.apis) if api.up]
    return rng.choice(up) if up and rng.random() < AT_WORK_SHARE else rng.randrange(len(system.apis))


async def strike_postgres(system: System, *, at_once: bool) -> bool:
    """End the database server, and start it again."""
    if system.postgres.pid is None:
        return False
    if at_once:
        await system.stop_postgres_at_once()
    else:
        await system.crash_postgres()
    return True


def kill_backend(system: System, rng: random.Random) -> bool:
    """Kill one of the server's children; the server then ends all others, recovers, and goes on by itself."""
    pid = system.postgres.pid
    children = children_of(pid) if pid is not None else []
    return kill_process(rng.choice(children)) if children else False


def kill_process(pid: int | None) -> bool:
    """As `kill -9` does; whether it was there."""
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
