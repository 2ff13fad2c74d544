"""`weir audit-export`: three formats, one line an entry, and the position from run to run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from google.protobuf.json_format import Parse
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData

from tests.cli.conftest import Run, ScriptedWeir

SYSLOG = re.compile(
    r"<109>1 (?P<time>\S+) \S+ weir - (?P<id>[!-~]{1,32}) - \ufeff(?P<text>.*)", re.ASCII
)


def test_lines_of_json_have_exact_values(weir: Run, server: ScriptedWeir) -> None:
    result = weir("audit-export")

    entries = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["entry_id"] for each in entries] == [4, 7, 9]
    assert entries[0]["create_time"] == "2026-11-20T12:00:00.000004Z"
    assert entries[0]["before"] is None
    assert entries[0]["after"] == {"limit_value": 9007199254740993, "reason": "café\n"}
    assert [each.after_entry_id for each in server.accounts.requests] == [0, 7, 12]
    assert "position: 12" in result.stderr


def test_the_position_in_a_file_goes_on_from_run_to_run(
    weir: Run, server: ScriptedWeir, tmp_path: Path
) -> None:
    path = tmp_path / "position"

    first, second = (
        weir(f"audit-export --position-file {path}"),
        weir(f"audit-export --position-file {path}"),
    )

    assert (len(first.stdout.splitlines()), second.stdout) == (3, "")
    assert path.read_text() == "12\n"
    assert [each.after_entry_id for each in server.accounts.requests] == [0, 7, 12, 12]
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("x")
    assert "does not have a position" in weir(f"audit-export --position-file {path}").output
    assert "either" in weir(f"audit-export --position-file {path} --after 4").output


def test_messages_of_syslog_follow_rfc_5424(weir: Run, server: ScriptedWeir) -> None:
    lines = weir("audit-export --format syslog --after 4").stdout.splitlines()

    found = [SYSLOG.fullmatch(line) for line in lines]
    assert len(found) == 2
    assert all(found)
    assert found[0] is not None
    assert found[0]["time"] == "2026-11-20T12:00:00.000007Z"
    assert found[0]["id"] == "quota.set"
    assert json.loads(found[0]["text"])["entry_id"] == 7
    assert len(server.accounts.requests) == 2


def test_records_of_opentelemetry_are_those_of_its_contract(
    weir: Run, server: ScriptedWeir
) -> None:
    lines = weir("audit-export --format otlp").stdout.splitlines()

    records: list[LogRecord] = []
    for line in lines:
        [resource] = Parse(line, LogsData()).resource_logs
        assert resource.resource.attributes[0].value.string_value == "weir"
        records += resource.scope_logs[0].log_records
    assert len(records) == len(lines) == 3
    assert records[0].time_unix_nano == 1_795_176_000_000_004_000
    assert records[0].severity_number == 9
    attributes = {each.key: each.value.string_value for each in records[0].attributes}
    assert attributes["weir.audit.entry_id"] == "4"
    assert attributes["weir.audit.actor"] == "weir_ab12cd"
    assert json.loads(records[0].body.string_value)["action"] == "quota.set"
    assert server.accounts.requests
