"""`weir audit-export`: the audit log for other systems, with a position that resumes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_cli.connection import admin_client, calls
from weir_cli.render import fail, jsonable, note

if TYPE_CHECKING:
    from weir_client import AdminClient, AuditEntry

FOLLOW_S = 1.0  # between two calls at the end of the log
PRIORITY = 13 * 8 + 5  # facility "log audit", severity "notice"
INFO = 9  # severity number of OpenTelemetry


class AuditFormat(StrEnum):
    """Format of exported entries; each is one line."""

    JSONL = "jsonl"
    SYSLOG = "syslog"
    OTLP = "otlp"


@calls(admin_client)
def export(
    client: AdminClient,
    form: Annotated[
        AuditFormat,
        typer.Option(
            "--format",
            help="jsonl; syslog: RFC 5424; otlp: log records of OpenTelemetry as JSON. One a line.",
        ),
    ] = AuditFormat.JSONL,
    after: Annotated[
        int, typer.Option(help="Position of an earlier export; 0 begins with the oldest entry.")
    ] = 0,
    position_file: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps the position from one run to the next, instead of --after."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for new entries, until interrupted.")
    ] = False,
) -> None:
    """Write the audit log to stdout, oldest first, for another system.

    Each entry is written once if you continue with the position that is on stderr at the end, or in
    the file: even entries of changes that are committed late. The file is written after the entries
    of a page, so a killed run may repeat those of one page: `entry_id` tells them.
    """
    if position_file is not None and after:
        raise typer.BadParameter("give either --after or --position-file", param_hint="--after")
    position = after if position_file is None else read_position(position_file)
    line_of = LINES[form]
    while True:
        page = client.export_audit_entries(position)
        for entry in page.entries:
            typer.echo(line_of(entry))
        moved, position = page.position != position, page.position
        if position_file is not None and moved:
            write_position(position_file, position)
        if page.entries:
            continue
        if not follow:
            break
        time.sleep(FOLLOW_S)
    note(f"position: {position}")


def read_position(path: Path) -> int:
    """Read the position in a file; 0 if there is none."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):
        fail(f"{path} does not have a position: remove it, or name another --position-file")


def write_position(path: Path, position: int) -> None:
    """Replace the position in a file as a whole."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(f"{position}\n")
        unfinished.replace(path)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")


def fields_of(entry: AuditEntry) -> dict[str, Any]:
    """Return an entry as plain JSON, with the objects before and after it as values."""
    fields: dict[str, Any] = jsonable(entry)
    for name in ("before", "after"):
        text = fields.pop(f"{name}_json")
        fields[name] = json.loads(text) if text else None
    return fields


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def json_line(entry: AuditEntry) -> str:
    """Format an entry as one line of JSON."""
    return compact(fields_of(entry))


def syslog_line(entry: AuditEntry) -> str:
    """Format an entry as a message of RFC 5424: the action is its id, its text is JSON."""
    fields = fields_of(entry)
    action = entry.action[:32]  # printable ASCII, as all actions
    head = f"<{PRIORITY}>1 {fields['create_time']} {socket.gethostname() or '-'} weir - {action} -"
    return f"{head} \ufeff{compact(fields)}"


def otlp_line(entry: AuditEntry) -> str:
    """Format an entry as the `LogsData` of OTLP, as file exporters write them."""
    assert entry.create_time is not None, "each entry has its time"
    seconds = int(entry.create_time.timestamp())
    time_ns = str(seconds * 10**9 + entry.create_time.microsecond * 1000)
    fields = fields_of(entry)
    attributes = {
        "weir.audit.entry_id": str(entry.entry_id),
        "weir.audit.actor": entry.actor,
        "weir.audit.actor_role": entry.actor_role,
        "weir.audit.subject_id": entry.subject_id,
    }
    record = {
        "timeUnixNano": time_ns,
        "observedTimeUnixNano": time_ns,
        "severityNumber": INFO,
        "severityText": "INFO",
        "eventName": f"weir.audit.{entry.action}",
        "body": {"stringValue": compact(fields)},
        "attributes": attributes_of(attributes),
    }
    return compact(
        {
            "resourceLogs": [
                {
                    "resource": {"attributes": attributes_of({"service.name": "weir"})},
                    "scopeLogs": [{"scope": {"name": "weir.audit"}, "logRecords": [record]}],
                }
            ]
        }
    )


def attributes_of(values: dict[str, str]) -> list[dict[str, object]]:
    return [{"key": key, "value": {"stringValue": each}} for key, each in values.items() if each]


LINES: dict[AuditFormat, Callable[[AuditEntry], str]] = {
    AuditFormat.JSONL: json_line,
    AuditFormat.SYSLOG: syslog_line,
    AuditFormat.OTLP: otlp_line,
}
