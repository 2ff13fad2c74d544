"""A running `weir up` seen from other terminals: its status, its logs, its start in the background
and its end.

They read the files that it keeps in its home directory; only its own supervisor starts and stops
processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weir_cli.checkout import installed_version
from weir_cli.render import fail, note, print_json, show, table
from weir_cli.texts import printable

from api.cli.guard import LOCK_FILE, AlreadyRunning, lock_home
from api.core.endpoint import ConnectionFile, make_private, read_endpoint
from common.processes import alive

PROBE_TIMEOUT_S = 3.0
POLL_S = 0.1
START_TIMEOUT_S = 600.0  # of `weir up --detach`: a large checkpoint, and a first database
STOP_TIMEOUT_S = 180.0  # the drain time of the api server, then the worker and PostgreSQL
TAIL_BYTES = 1 << 20  # of a log, where its last lines are searched
UP_LOG = "up.log"  # of `weir up --detach`, in the directory of the logs
LOGS: Mapping[str, str] = {
    "up": f"logs/{UP_LOG}",
    "api": "logs/api.log",
    "worker": "logs/worker.log",
    "webhooks": "logs/webhooks.log",
    "postgres": "postgres/server.log",
}


def supervisor(home: Path) -> int | None:
    """Find the process of the `weir up` that runs in a home directory; None if there is none."""
    with contextlib.suppress(OSError, ValueError), (home / LOCK_FILE).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read())
    return None


def print_status(home: Path, *, as_json: bool) -> bool:
    """Print the state of the server and its parts. Return whether it takes requests."""
    endpoint, up = read_endpoint(home), supervisor(home)
    if not endpoint.pid or (up is None and not endpoint.serving):
        fail(f"no server is running in {home}: start one with `weir up`")
    found = probed(endpoint)
    ready = bool(found["status"] == "ready")
    parts = found.get("parts", {})
    if as_json:
        document = {"home": str(home), "address": endpoint.address, "supervisor_pid": up}
        further = [each.pid for each in further_endpoints(home)]
        print_json(document | {"pid": endpoint.pid, "further_pids": further, **found})
        return ready
    reasons = [*found.get("reasons", ()), *found.get("warnings", ())]
    rows = [("server", found["status"], "; ".join(reasons) or endpoint.address)]
    for name, part in parts.items():
        about = part.get("reason") or f"since {part['since'].replace('+00:00', 'Z')}"
        rows.append((name.replace("_", " ").replace("/", " "), part["state"], about))
    apis = [endpoint, *further_endpoints(home)]
    processes = [
        *(f"api server {each.pid}{'' if each.serving else ' (not ready)'}" for each in apis),
        *([f"`weir up` {up}"] if up else []),
    ]
    # The metadata of a checkout have no version: that of its commit is shown.
    running = found["version"] if found["version"] != "0.0.0" else installed_version()
    show(table("part", "state", "about", title=f"Weir {running} in {home}", rows=rows))
    note(f"processes: {', '.join(processes)}")
    for name, url in (("HTTP", endpoint.openai_url), ("console", endpoint.console_url)):
        if url:
            note(f"{name}: {url}")
    return ready


def further_endpoints(home: Path) -> list[ConnectionFile]:
    """Read the connection files of the api processes beside the first that run."""
    found = map(read_endpoint, sorted(home.glob("api-*/")))
    return [each for each in found if each.pid and alive(each.pid)]


def probed(endpoint: ConnectionFile) -> dict[str, Any]:
    """Ask a server for its health and version. `status` says why, if it does not answer."""
    version = ""
    if not endpoint.metrics_url:
        status = "ready" if endpoint.serving else "not ready"
        return {"version": version, "status": status, "warnings": ["WEIR_METRICS_LISTEN is off"]}
    try:
        metrics = fetched(endpoint.metrics_url).decode()
        if known := re.search(r'^weir_build_info\{version="([^"]*)"', metrics, re.MULTILINE):
            version = known[1]
        answer = json.loads(fetched(endpoint.metrics_url.replace("/metrics", "/readyz")))
    except (OSError, ValueError) as error:
        return {"version": version, "status": "no answer", "reasons": [str(error)]}
    return {"version": version, **answer}


def fetched(url: str) -> bytes:
    """Read a page of this machine's server, past any proxy. Raises: OSError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:  # a server that is not ready answers 503 and says why
        return error.read()


def print_logs(home: Path, parts: Sequence[str], *, count: int, follow: bool) -> None:
    """Print the last lines of logs, then new ones until interrupted if `follow`."""
    paths = {name: home / LOGS[name] for name in parts or LOGS}
    if "api" in paths:
        paths |= {path.stem: path for path in sorted(home.glob("logs/api-*.log"))}
    found = {name: path for name, path in paths.items() if path.exists()}
    if not found:
        fail(f"there is no log in {home}: start a server with `weir up`, or give its --home")
    width = max(map(len, found)) if len(found) > 1 else 0
    ends = {}
    for name, path in found.items():
        lines, ends[name] = tail(path, count)
        print_lines(name, lines, width)
    while follow:
        time.sleep(POLL_S)
        for name, path in found.items():
            with contextlib.suppress(OSError):
                if path.stat().st_size < ends[name]:  # rotated or emptied
                    ends[name] = 0
                lines, ends[name] = lines_after(path, ends[name])
                print_lines(name, lines, width)


def print_lines(name: str, lines: Sequence[bytes], width: int) -> None:
    """Print lines of a log, with its name before each unless `width` is 0.

    JSON is text on a terminal; a pipe gets it as it is.
    """
    head = f"{name:<{width}} | " if width else ""
    for each in lines:
        text = each.decode(errors="replace")
        sys.stdout.write(f"{head}{readable(text) if sys.stdout.isatty() else text}\n")
    sys.stdout.flush()


def readable(line: str) -> str:
    """Format a line of JSON as time, level, event and fields. Other lines stay as they are."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    if not isinstance(fields, dict) or "event" not in fields:
        return line
    moment, level, event = (str(fields.pop(name, "")) for name in ("timestamp", "level", "event"))
    values = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in fields.items()
    )
    return printable(" ".join([moment[:19].replace("T", " "), f"{level:<7}", event, *values]))


def tail(path: Path, count: int) -> tuple[list[bytes], int]:
    """Read the last complete lines of a file. Returns them, and where they end."""
    lines, end = lines_after(path, max(0, path.stat().st_size - TAIL_BYTES))
    return lines[-count:] if count else [], end


def lines_after(path: Path, start: int) -> tuple[list[bytes], int]:
    """Read the complete lines after an offset. Returns them, and where the last one ends."""
    with path.open("rb") as file:
        file.seek(start)
        whole = file.read(TAIL_BYTES).rpartition(b"\n")
    return whole[0].split(b"\n") if whole[1] else [], start + len(whole[0] + whole[1])


def detach(home: Path) -> None:
    """Start this command in the background without `--detach`, and wait until it serves.

    Shows its messages meanwhile. Exits with 1 if it ends.
    """
    make_private(home)
    make_private(home / "logs")
    try:
        os.close(lock_home(home))
    except AlreadyRunning as error:
        fail(str(error))
    path = home / "logs" / UP_LOG
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    command = [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--detach")]
    with os.fdopen(fd, "ab") as log:
        shown = log.tell()
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    for _ in waits(START_TIMEOUT_S):
        status = started.poll()
        serves = supervisor(home) not in (None, started.pid) and read_endpoint(home).serving
        lines, shown = lines_after(path, shown)
        for each in lines:
            note(each.decode(errors="replace"))
        if status is not None:
            raise SystemExit(status or 1)
        if serves:
            note("it runs in the background: `weir status`, `weir logs --follow`, `weir down`")
            return
    fail(f"it does not serve after {START_TIMEOUT_S:.0f} s and goes on in the background: {path}")


def end(home: Path) -> None:
    """End the `weir up` of a home directory, and wait until it has. Idempotent."""
    pid = supervisor(home)
    if pid is None:
        note(f"no `weir up` is running in {home}")
        return
    note("stopping: running requests finish first")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    for _ in waits(STOP_TIMEOUT_S):
        if supervisor(home) is None:
            note(f"stopped; the data is kept in {home}")
            return
    fail(f"process {pid} has not ended after {STOP_TIMEOUT_S:.0f} s: see `weir logs`")


def waits(limit_s: float) -> Iterator[None]:
    """Yield at short intervals for a time."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
        time.sleep(POLL_S)
