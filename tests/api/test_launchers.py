"""Launchers against real processes and servers: started once, adopted, stopped, asleep."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.adapters.remote_settings import Service
from inference.launchers.command import CommandLauncher, CommandTerms
from inference.launchers.launcher import LaunchedId, LaunchFailed
from inference.launchers.process import ProcessLauncher, ProcessTerms
from inference.launchers.vllm_sleep import SleepTerms

REPLICA = LaunchedId("chat@v1", 0, "lifetime-1")
# Serves on a port with vLLM's calls for sleep, and notes its start and the calls.
SERVER = textwrap.dedent(
    """
    import http.server, json, sys, threading, urllib.parse
    port, notes = int(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
    notes.write("start\\n")
    asleep, models = False, sys.argv[3:]

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, body=b"{}"):
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if self.path == "/is_sleeping":
                return self.answer(200, json.dumps({"is_sleeping": asleep}).encode())
            if self.path == "/v1/models" and models:
                notes.write("models\\n")
                return self.answer(200, models.pop(0).encode())
            self.answer(200 if self.path == "/health" else 404)

        def do_POST(self):
            global asleep
            found = urllib.parse.urlsplit(self.path)
            if found.path not in ("/sleep", "/wake_up"):
                return self.answer(404)
            notes.write(self.path[1:] + "\\n")
            asleep = found.path == "/sleep"
            self.answer(200)

        def log_message(self, *_):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class World:
    """Launchers of processes on one folder, as in successive scalers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes_file = path / "notes"
        self.server = [sys.executable, "-c", SERVER, "{port}", str(self.notes_file)]
        self.launched: list[tuple[ProcessLauncher, LaunchedId]] = []

    def launcher(self, *command: str, sleeps: bool = False) -> ProcessLauncher:
        terms = ProcessTerms(
            tuple(command or self.server),
            "openai+http://127.0.0.1:{port}",
            start_timeout_s=20.0,
            stop_timeout_s=1.0,
            sleep=SleepTerms("http://127.0.0.1:{port}") if sleeps else None,
        )
        return ProcessLauncher(terms, self.path / "launched")

    @property
    def notes(self) -> list[str]:
        return self.notes_file.read_text().splitlines() if self.notes_file.exists() else []

    def pid(self) -> int:
        return int((self.path / "launched" / "chat@v1-0" / "pid").read_text())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Yield a world, and kill what it has left."""
    found = World(tmp_path)
    yield found
    for file in tmp_path.glob("launched/*/pid"):
        try:
            os.killpg(int(file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


async def test_a_second_scaler_adopts_what_the_first_started(world: World) -> None:
    first, second = world.launcher(), world.launcher()

    address = await first.start(REPLICA)

    assert await second.start(REPLICA) == address
    assert await second.runs(REPLICA, address)
    await second.stop(REPLICA)
    assert not await first.runs(REPLICA, address)
    assert world.notes == ["start"]


async def test_two_scalers_at_once_start_one_server(world: World) -> None:
    addresses = await asyncio.gather(*(world.launcher().start(REPLICA) for _ in range(20)))

    assert len(set(addresses)) == 1
    assert world.notes == ["start"]


async def test_a_start_ends_the_server_of_an_earlier_lifetime(world: World) -> None:
    """The server of a late scaler does not stay beside the new one."""
    launcher, next_lifetime = world.launcher(), LaunchedId("chat@v1", 0, "lifetime-2")
    await launcher.start(REPLICA)
    pid = world.pid()

    address = await launcher.start(next_lifetime)
    await launcher.stop(REPLICA)

    assert world.pid() != pid
    assert await launcher.runs(next_lifetime, address), (
        "a late stop of the first lifetime ends nothing"
    )
    assert not await launcher.runs(REPLICA, address)
    assert world.notes == ["start", "start"]


async def test_a_frontend_without_workers_is_not_ready(world: World) -> None:
    """It is healthy, and lists no model until its first worker has joined."""
    empty, full = '{"object": "list", "data": []}', '{"object": "list", "data": [{"id": "m"}]}'

    await world.launcher(*world.server, empty, empty, full).start(REPLICA)

    assert world.notes == ["start", "models", "models", "models"]


@pytest.mark.parametrize("answer", ["", "[]", "{}", '{"data": 7}', '{"data": [{"id": "other"}]}'])
async def test_the_engine_examines_any_other_list_of_models(world: World, answer: str) -> None:
    """It says at once what is wrong, while a launcher would wait until its time is over."""
    await world.launcher(*world.server, answer).start(REPLICA)

    assert world.notes == ["start", "models"]


async def test_a_server_that_ignores_sigterm_is_killed(world: World) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    launcher = world.launcher(sys.executable, "-c", stubborn, "{port}", str(world.notes_file))
    address = await launcher.start(REPLICA)

    await launcher.stop(REPLICA)

    assert not await launcher.runs(REPLICA, address)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("sh", "-c", "echo out of memory; exit 3"), "with status 3 .*: out of memory"),
        (("/nowhere/vllm",), "with status 127 .*/nowhere/vllm"),
    ],
)
async def test_a_failed_start_says_why(world: World, command: tuple[str, ...], reason: str) -> None:
    with pytest.raises(LaunchFailed, match=reason):
        await world.launcher(*command).start(REPLICA)


async def test_sleep_and_wake_of_vllm(world: World) -> None:
    launcher = world.launcher(sleeps=True)
    address = await launcher.start(REPLICA)

    for _ in range(2):  # a second scaler repeats the call
        await launcher.sleep(REPLICA)
    assert await launcher.runs(REPLICA, address)
    for _ in range(2):
        assert await launcher.wake(REPLICA, address) == address

    assert world.notes == ["start", "sleep?level=1", "wake_up"]
    await launcher.stop(REPLICA)


def scripts(world: World, start_timeout_s: float = 20.0, **given: str) -> CommandLauncher:
    """Return a launcher whose scripts are shell texts; `start` leaves a server behind."""
    pid = f'"{world.path}/$WEIR_REPLICA_NUMBER.pid"'
    port = 20_000 + os.getpid() % 20_000
    serve = f"'{sys.executable}' -c '{SERVER}' {port} {world.notes_file}"
    texts = {
        "status": "",
        "start": f"test -e {pid} || {{ {serve} > /dev/null 2>&1 & echo $! > {pid}; }};"
        f" echo openai+http://127.0.0.1:{port}",
        "stop": f"test ! -e {pid} || kill $(cat {pid}); rm -f {pid}",
    } | given
    words = {name: ("sh", "-c", text) if text else () for name, text in texts.items()}
    terms = CommandTerms(
        words["start"],
        words["stop"],
        status=words["status"],
        service=Service.OPENAI_HTTP,
        start_timeout_s=start_timeout_s,
        stop_timeout_s=5.0,
    )
    return CommandLauncher(terms, world.path / "scripts")


async def test_scripts_start_and_stop_a_server_elsewhere(world: World) -> None:
    launcher = scripts(world)

    address = await launcher.start(REPLICA)
    assert await scripts(world).start(REPLICA) == address
    assert await launcher.runs(REPLICA, address)
    await launcher.stop(REPLICA)
    await launcher.stop(REPLICA)

    assert not await launcher.runs(REPLICA, address)
    assert world.notes == ["start"]


async def test_scripts_of_one_replica_take_turns(world: World) -> None:
    """Even those of scalers that do not know of each other."""
    note = f'echo in >> "{world.notes_file}"; sleep 0.1; echo out >> "{world.notes_file}"'

    await asyncio.gather(*(scripts(world, stop=note).stop(REPLICA) for _ in range(3)))

    assert world.notes == ["in", "out"] * 3


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({"start": "echo no quota >&2; exit 4"}, "start ended with 4: no quota"),
        ({"start": "echo done"}, "start must print the server's address last"),
        ({"start": "echo vllm://127.0.0.1:1"}, "must be openai"),
        ({"start": "sleep 60"}, "did not end within"),
    ],
)
async def test_a_failed_script_says_why(world: World, texts: dict[str, str], reason: str) -> None:
    with pytest.raises(LaunchFailed, match=reason):
        await scripts(world, start_timeout_s=1.0, **texts).start(REPLICA)
