"""Pictures of the documentation, `python -m tests.screenshots`: console and terminal of `weir up`.

Starts a server with example customers, drives Chromium over its DevTools protocol, and writes
docs/screenshots/*.png. Needs the program `chromium` (`apt-get install chromium`).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import pty
import random
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from sqlalchemy import update

from infra.architecture import ROOT
from metering.core.models import UsageSubject
from metering.pricing.prices import get_price
from metering.store.db import create_engine, create_sessions
from metering.store.embedded_postgres import EmbeddedPostgres
from metering.tenants.api_keys import find_api_key
from metering.tenants.tenants import find_organization
from tests.conftest import new_home, remove_home
from tests.metering.usage import Consumed, Customer, add_usage
from tests.service import wait_for

PICTURES = ROOT / "docs" / "screenshots"
WIDTH, HEIGHT = 1280, 800  # pixels of a page of the console
ERASED = re.compile(r"[^\n]*\n?\r?(?:\x1b\[1A)?\x1b\[2K")  # status that a command has erased
COLUMNS = 112  # of the terminal
CUSTOMERS = ("acme", "hotel-search", "nordwind")
RUNNING = 6  # requests while the pictures are taken
READY_S = 60.0
# Text of a page once its data is shown, and its address in the console.
PAGES = {
    "overview": ("Models in the last 15 minutes", "#/overview"),
    "live": ("decode", "#/live"),
    "usage": ("By day", "#/usage?org=hotel-search"),
    "limits": ("0.01", "#/limits?org=hotel-search"),
    "end-users": ("zoe", "#/end-users?org=hotel-search"),
    "keys": ("copilot", "#/keys?org=hotel-search"),
}
END_USERS = ("alice", "bob", "li.wei", "maria@example.com", "team-berlin", "tenant/0042", "zoe")
TERMINAL = """<body style="margin:0;background:#0c1021;display:inline-block"><pre style="margin:0;
padding:16px 20px;color:#f8f8f2;font:14px/1.35 'DejaVu Sans Mono',monospace">{}</pre></body>"""


class Server:
    """A running `weir up` and its commands."""

    def __init__(self, home: Path) -> None:
        self.home = home
        outer = {name: value for name, value in os.environ.items() if name[:5] != "WEIR_"}
        self.environment = outer | {"WEIR_HOME": str(home), "WEIR_LISTEN": "127.0.0.1:0"}

    def weir(self, *arguments: str) -> str:
        """Run a command and return its standard output."""
        command = [sys.executable, "-m", "weir_cli", *arguments]
        done = subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command without output."""
        return subprocess.Popen(
            [sys.executable, "-m", "weir_cli", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def on_terminal(self, *arguments: str) -> str:
        """Run a command on a terminal and return its prompt and coloured output."""
        child, parent = pty.fork()
        if child == 0:
            size = {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            command = [sys.executable, "-m", "weir_cli", *arguments]
            os.execvpe(command[0], command, self.environment | size)
        pieces = []
        try:
            while piece := os.read(parent, 65_536):
                pieces.append(piece)
        except OSError:  # Linux reports the end of a terminal as EIO
            pass
        os.waitpid(child, 0)
        shown = " ".join(f'"{each}"' if " " in each else each for each in arguments)
        return f"\x1b[1m$ weir {shown}\x1b[0m\n{b''.join(pieces).decode()}"


@contextmanager
def running_server() -> Iterator[Server]:
    home = new_home()
    server = Server(home)
    up = server.start("up")
    try:
        wait_for(lambda: up.poll() is not None or (home / "connection.json").exists(), "weir up")
        yield server
    finally:
        up.terminate()
        up.wait()
        remove_home(home)


async def add_past_usage(server: Server, prefix: str) -> None:
    """Add usage of hotel-search on each past day of this month, less on week-ends."""
    postgres = server.home / "postgres"
    engine = create_engine(EmbeddedPostgres(postgres, postgres).url)
    dice = random.Random(7)
    now = datetime.now(UTC)
    noon = now.replace(day=1, hour=12, minute=0, second=0, microsecond=0)
    days = [noon + timedelta(days=day) for day in range(now.day - 1)]
    async with create_sessions(engine)() as session, session.begin():
        organization = await find_organization(session, "hotel-search")
        key = await find_api_key(session, prefix)
        used = [
            Consumed(
                input_count := dice.randrange(400_000, 1_900_000),
                input_count // 20,
                dice.randrange(100_000, 400_000),
                settled_at=day,
            )
            for day in days
            for _ in range(dice.randrange(2, 9) if day.weekday() < 5 else 1)
        ]
        price = await get_price(session, 1)  # that `weir up` set for the demo model
        customer = Customer(organization.id, "hotel-search", key, "")
        for number, name in enumerate(END_USERS):
            share = used[number :: len(END_USERS)]
            await add_usage(session, customer, price, share, end_user=name)
        await session.execute(update(UsageSubject).values(archived_at=None))
    await engine.dispose()


def prepare(server: Server) -> list[str]:
    """Create customers with limits; return a key of each."""
    keys = []
    for name in CUSTOMERS:
        server.weir("org", "create", name)
        server.weir("project", "create", "search", "--org", name)
        index = ("--org", name, "--project", "search", "--scope", "inference")
        keys.append(server.weir("key", "create", "copilot", *index).strip())
        server.weir("quota", "set", "tokens-per-month", "20000", "--org", name)
        server.weir("quota", "set", "cost-per-month", "0.01", "--org", name)
    asyncio.run(add_past_usage(server, keys[1][:11]))
    for limit in (("cost-per-month", "6.00"), ("tokens-per-day", "50000")):
        server.weir("quota", "set", *limit, "--org", "hotel-search", "--each", "end-user")
    return keys


class Browser:
    """A tab of Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            pass
        result: dict[str, Any] = answer["result"]
        return result

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def show(self, url: str, shown: str) -> None:
        """Open an address and wait until the page has a text."""
        await self.call("Page.navigate", url=url)
        await self.wait_for(shown)

    async def wait_for(self, shown: str) -> None:
        """Wait until the page has a text."""
        async with asyncio.timeout(READY_S):
            while True:
                if shown in (await self.value("document.body?.innerText") or ""):
                    break
                await asyncio.sleep(0.1)

    async def picture(self, name: str, width: int, height: int) -> None:
        """Write a picture of the upper left part of the page, in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        taken = await self.call("Page.captureScreenshot", format="png")
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    index = ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    chromium = await asyncio.create_subprocess_exec(
        program, *options, *index, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(READY_S):
            while True:
                if (port := profile / "DevToolsActivePort").exists():
                    break
                await asyncio.sleep(0.1)
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        async with aiohttp.ClientSession() as session:
            async with session.get(address) as response:
                tabs = await response.json()
            tab = next(each for each in tabs if each["type"] == "page")
            socket = await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
            async with socket:
                yield Browser(socket)
    finally:
        chromium.terminate()
        await chromium.wait()


async def take_console(browser: Browser, url: str, key: str) -> None:
    """Take the pages of the console, signed in with a key."""
    await browser.show(url, "Sign in")
    await browser.value(f"sessionStorage.setItem('weir.key', {json.dumps(key)})")
    for name, (shown, index) in PAGES.items():
        await browser.show("about:blank", "")
        await browser.show(url + index, shown)
        await browser.picture(name, WIDTH, HEIGHT)
    await take_playground(browser, url)


async def take_playground(browser: Browser, url: str) -> None:
    """Take a picture of a chat that has ended, with its cost."""
    await browser.show("about:blank", "")
    await browser.show(f"{url}#/playground", "Send")
    await browser.value("document.querySelector('form.playground [type=submit]').click()")
    await browser.wait_for("exact, as billed")
    await browser.picture("playground", WIDTH, HEIGHT + 100)


async def take_terminal(browser: Browser, name: str, output: str) -> None:
    """Take a picture of coloured output."""
    text = Text.from_ansi(ERASED.sub("", output.replace("\r\n", "\n")).rstrip())
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(text)
    code = console.export_html(theme=MONOKAI, inline_styles=True, code_format="{code}")
    page = base64.b64encode(TERMINAL.format(code).encode()).decode()
    await browser.show(f"data:text/html;charset=utf-8;base64,{page}", "$ weir")
    size = await browser.value(
        "(({width, height}) => [width, height])(document.body.getBoundingClientRect())"
    )
    await browser.picture(name, *(round(each) for each in size))


async def take(server: Server, terminal: dict[str, str]) -> None:
    served = json.loads((server.home / "serve.json").read_text())
    connection = json.loads((server.home / "connection.json").read_text())
    async with open_browser(server.home / "chromium") as browser:
        await take_console(browser, served["console_url"], connection["admin_key"])
        for name, output in terminal.items():
            await take_terminal(browser, name, output)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with running_server() as server:
        keys = prepare(server)
        generate = ("generate", "Hello, what can you do?", "--max-output-tokens", "50")
        result = json.loads(server.weir(*generate, "--json"))
        terminal = {
            "generate": server.on_terminal(*generate),
            "trace": server.on_terminal("trace", result["request_id"]),
        }
        long = ("--min-output-tokens", "1500", "--max-output-tokens", "1600")
        many = ("--choices", "8", "--temperature", "1")
        requests = [
            server.start(
                *("generate", "Hello", *long, *many, "--api-key", keys[number % len(keys)]),
                *("--end-user", END_USERS[number]),
            )
            for number in range(RUNNING)
        ]
        asyncio.run(take(server, terminal))
        for request in requests:
            request.terminate()
            request.wait()
    for path in sorted(PICTURES.glob("*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
