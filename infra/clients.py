"""Run the code of `docs/reference/clients.md` against a new server, each client in its own folder.

Run as `make test-clients`, or `python -m infra.clients [--write] [CLIENT ...]`. A section of the
page has the line that says what runs, a block that installs, and blocks of code. Clients are
installed below `~/.cache/weir/clients` and kept, with `output.log` of the last command. `--write`
writes their rows of the table of the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.architecture import ROOT

TOKENIZER = ROOT / "inference" / "demo_model" / "weights"
PAGE = ROOT / "docs" / "reference" / "clients.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weir" / "clients"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE_HEAD = "| client | version | ran | result | seconds |\n|---|---|---|---|---|\n"
INSTALL_MAX_S, PROGRAM_MAX_S, START_MAX_S, STOP_MAX_S = 600, 180, 180, 10
SUFFIXES = {"python": ".py", "js": ".mjs", "bash": ".sh"}
PASS = "pass"


class ClientFailed(Exception):
    """An installation or a program failed. The message is the last line of its output."""


@dataclass(frozen=True, slots=True)
class Client:
    """Section of the page: arguments of `pip` or `npm`, and code blocks with their languages."""

    name: str
    ran: str
    install: Sequence[str]
    blocks: Sequence[tuple[str, str]]

    @property
    def folder(self) -> Path:
        return CACHE / "-".join(re.findall(r"\w+", self.name.lower()))

    @property
    def package(self) -> str:
        """Name of the first package that is installed."""
        return re.split(r"(?<=.)[@\[=]", self.install[2])[0]


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table. `wall_s` is the duration of the code in seconds, without installation."""

    client: Client
    version: str
    result: str
    wall_s: float

    def __str__(self) -> str:
        cells = (self.client.name, self.version, self.client.ran, self.result, f"{self.wall_s:.0f}")
        return f"| {' | '.join(cells)} |"


def clients_of(page: str) -> list[Client]:
    """Parse the clients of the page, in its order."""
    clients = []
    for section in page.split("\n## ")[1:]:
        if blocks := BLOCK.findall(section):
            title, ran, *_ = section.split("\n\n")
            install = shlex.split(blocks[0][1])
            clients.append(Client(title, " ".join(ran.split()).rstrip("."), install, blocks[1:]))
    return clients


def run(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], limit_s: float
) -> str:
    """Run a command and return its output. Raises: ClientFailed."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise ClientFailed(f"did not end within {limit_s:.0f} s") from None
        finally:
            if process.poll() is None:
                # At this signal, pytest ends what its tests have started.
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_MAX_S)
            # Code may leave processes behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    (folder / "output.log").write_text(output)
    if process.returncode:
        lines = output.strip().splitlines() or [f"status {process.returncode}"]
        raise ClientFailed(lines[-1][:200])
    return output


def install(client: Client, environment: Mapping[str, str]) -> str:
    """Install a client unless it is installed, and return its version. Raises: ClientFailed."""
    folder, stamp = client.folder, client.folder / ".installed"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = shlex.join(client.install)
    is_python = client.install[0] == "pip"
    if not stamp.exists() or stamp.read_text() != wanted:
        if is_python:
            run([sys.executable, "-m", "venv", "."], folder, environment, INSTALL_MAX_S)
            command: list[str | Path] = [folder / "bin" / "python", "-m", *client.install]
        else:
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            command = [*client.install]
        run(command, folder, environment, INSTALL_MAX_S)
        stamp.write_text(wanted)
    if not is_python:
        manifest = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(manifest.read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    return run([folder / "bin" / "python", "-c", code], folder, environment, PROGRAM_MAX_S).strip()


def tried(client: Client, environment: Mapping[str, str]) -> Row:
    """Install a client, run its code, and return its row of the table."""
    folder = client.folder
    paths = [folder / "bin", folder / "node_modules" / ".bin", environment["PATH"]]
    own = {**environment, "PATH": os.pathsep.join(map(str, paths))}
    version, began = "-", time.monotonic()
    try:
        version, began = install(client, own), time.monotonic()
        for number, (language, code) in enumerate(client.blocks):
            program = folder / f"program_{number}{SUFFIXES[language]}"
            program.write_text(code)
            command = {"python": ["python"], "js": ["node"], "bash": ["bash", "-euo", "pipefail"]}
            if not run([*command[language], program], folder, own, PROGRAM_MAX_S).strip():
                raise ClientFailed("no output")
    except ClientFailed as failure:
        return Row(client, version, f"fail: {failure}".replace("|", "/"), time.monotonic() - began)
    return Row(client, version, PASS, time.monotonic() - began)


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Start `weir up` in a new home, and yield the environment of its clients."""
    weir = [sys.executable, "-m", "weir_cli"]
    with tempfile.TemporaryDirectory(prefix="weir-clients-") as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
        outer = kept | {"WEIR_HOME": home, "WEIR_LISTEN": "127.0.0.1:0"}
        log = Path(home, "up.log")
        with log.open("wb") as file:
            up = subprocess.Popen(
                [*weir, "up"], env=outer, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        try:
            give_up_at = time.monotonic() + START_MAX_S
            while not Path(home, "connection.json").exists():
                if up.poll() is not None or time.monotonic() > give_up_at:
                    raise SystemExit(f"weir up did not start:\n{log.read_text()}")
                time.sleep(0.2)
            lines = run([*weir, "env"], Path(home), outer, PROGRAM_MAX_S)
            exported = dict(re.findall(r"^export (\w+)=(\S+)$", lines, re.MULTILINE))
            yield kept | exported | {"TOKENIZER": str(TOKENIZER)}
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(START_MAX_S)


def main(arguments: Sequence[str]) -> int:
    """Run the clients and print the table. Return 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(description="Run third-party clients against a new server.")
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    parser.add_argument("client", nargs="*", help="names of sections of the page; default: all")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    chosen = [
        each for each in clients_of(page) if not options.client or each.name in options.client
    ]
    print(TABLE_HEAD, end="", flush=True)
    rows = []
    with serving() as environment:
        for client in chosen:
            rows.append(tried(client, environment))
            print(rows[-1], flush=True)
    if options.write:
        before, _, after = page.partition(TABLE_HEAD)
        table, _, rest = after.partition("\n\n") if after[:1] == "|" else ("", "", after[1:])
        known = {line.split("|")[1].strip(): line for line in table.splitlines()}
        known |= {row.client.name: str(row) for row in rows}
        lines = [known[each.name] for each in clients_of(page) if each.name in known]
        PAGE.write_text("\n".join((before + TABLE_HEAD.rstrip(), *lines, "", rest)))
    return int(any(row.result != PASS for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
