"""`weir retention`: shows which details are kept, and removes those that are due."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from weir_cli.commands import ExitCode
from weir_cli.render import note, print_json, show, table, wrong_use
from weir_cli.texts import counted

from api.cli.stack import run
from common.settings import SettingInvalid, read
from metering.retention import (
    Retention,
    RetentionSettings,
    apply_retention,
    read_retention,
)

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def settings() -> RetentionSettings:
    """Read the settings of the environment, or exit."""
    try:
        return read(RetentionSettings, os.environ)
    except SettingInvalid as error:
        wrong_use(str(error))


def print_retention(home: Path | None, *, as_json: bool) -> Retention:
    """Print what is kept, due and removed, and return it."""
    given = settings()
    found = run(home, lambda sessions: read_retention(sessions, given))
    if as_json:
        print_json(found)
        return found
    rows = [
        (each.month, each.state, f"{each.event_count:,}", size_text(each.size_bytes))
        for each in found.months
    ]
    show(table("month", "details", "requests", "size", right=("requests", "size"), rows=rows))
    for each in found.months:
        for obstacle in each.obstacles:
            note(f"{each.month} cannot be removed: {obstacle}")
    kept = found.settings.usage_months
    note(
        "usage: kept for ever; WEIR_USAGE_RETENTION_MONTHS limits that"
        if kept is None
        else f"usage: details are kept for {kept} months after the month of the usage"
    )
    if found.audit_before is None:
        note("audit log: kept for ever; WEIR_AUDIT_RETENTION_MONTHS limits that")
    else:
        entries = counted(found.audit_entry_count, "entry", "entries")
        note(f"audit log: {entries} before {found.audit_before:%Y-%m-%d} may be removed")
    return found


def remove(home: Path | None, *, as_json: bool) -> None:
    """Remove what is due. Exits with 1 if an obstacle keeps a month that is due."""
    given = settings()

    done = run(home, lambda sessions: apply_retention(sessions, given, actor="weir retention"))
    if as_json:
        print_json(done)
    elif done.is_busy:
        note("another process removes details at this moment: nothing was done")
    else:
        for month in done.months:
            typer.echo(f"removed the details of the usage of {month}")
        if done.audit_entry_count:
            typer.echo(f"removed {counted(done.audit_entry_count, 'audit entry', 'audit entries')}")
        if not done.months and not done.audit_entry_count:
            note("nothing was due")
        for obstacle in done.obstacles:
            note(f"the next month is due and was kept: {obstacle}")
    if done.obstacles or done.is_busy:
        raise typer.Exit(ExitCode.FAILED)


def size_text(size_bytes: int) -> str:
    """Format a size on disk in binary units."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if size_bytes else ""
