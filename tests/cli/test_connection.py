"""Address and key of the commands' connection, and messages for a missing server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from weir_cli.checkout import installed_version
from weir_cli.connection import (
    ConnectionProblem,
    Role,
    connection_path,
    explain,
    read_connection_file,
    resolve,
)
from weir_client import (
    Unavailable,
)
from weir_client.status import error_from_status

from api.core.statuses import status_of
from infra.error_examples import quota
from metering.core.models import QuotaDimension
from tests.cli.conftest import Run, ScriptedWeir

FILE = {
    "address": "127.0.0.1:7001",
    "api_key": "file_user",
    "admin_key": "file_admin",
    "organization": "acme",
    "project": "web",
    "written_by": "a newer weir",
}


@pytest.fixture
def connection_file() -> Path:
    path = connection_path()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(FILE))
    return path


@pytest.mark.parametrize(
    ("flags", "environment", "role", "expected"),
    [
        ((None, None), {}, "inference", ("127.0.0.1:7001", "file_user")),
        ((None, None), {}, "admin", ("127.0.0.1:7001", "file_admin")),
        ((None, None), {"WEIR_API_KEY": "env_user"}, "inference", ("127.0.0.1:7001", "env_user")),
        ((None, None), {"WEIR_API_KEY": "env_user"}, "admin", ("127.0.0.1:7001", "env_user")),
        (
            (None, None),
            {"WEIR_API_KEY": "env_user", "WEIR_ADMIN_KEY": "env_admin"},
            "admin",
            ("127.0.0.1:7001", "env_admin"),
        ),
        (
            (None, None),
            {"WEIR_ADDRESS": "h:1", "WEIR_API_KEY": "env_user"},
            "inference",
            ("h:1", "env_user"),
        ),
        (
            ("g:2", "flag"),
            {"WEIR_ADDRESS": "h:1", "WEIR_API_KEY": "env_user"},
            "admin",
            ("g:2", "flag"),
        ),
        ((None, ""), {}, "inference", ("127.0.0.1:7001", "")),
    ],
)
def test_flags_win_over_the_environment_and_that_over_the_file(
    connection_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str | None, str | None],
    environment: dict[str, str],
    role: Role,
    expected: tuple[str, str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    target = resolve(role, *flags)

    assert (target.address, target.api_key) == expected


def test_the_key_of_the_file_is_never_sent_to_another_server(connection_file: Path) -> None:
    with pytest.raises(ConnectionProblem, match="no API key for elsewhere:443"):
        resolve("inference", "elsewhere:443", None)


def test_without_a_file_the_default_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_API_KEY", "key")

    assert read_connection_file().address == ""
    assert resolve("inference", None, None).address == "127.0.0.1:8443"


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_broken_file_is_named_by_path(connection_file: Path, bare_weir: Run, text: str) -> None:
    connection_file.write_text(text)

    result = bare_weir("models")

    assert result.exit_code == 1
    assert str(connection_file) in result.stderr


def test_the_organization_of_the_file_is_the_default(server: ScriptedWeir, bare_weir: Run) -> None:
    connection_path().parent.mkdir(parents=True)
    connection_path().write_text(json.dumps(FILE | {"address": server.address}))

    assert bare_weir("project list").exit_code == 0
    assert bare_weir("key create laptop").exit_code == 0

    assert server.accounts.requests[0].organization == "acme"
    assert server.accounts.requests[1].organization == "acme"
    assert server.accounts.requests[1].project == "web"
    assert server.accounts.keys == ["Bearer file_admin"] * 2


def test_a_missing_server_has_a_remedy(bare_weir: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_API_KEY", "key")

    for command in (
        ["models"],
        ["generate", "Hi"],
        ["org", "list"],
        ["month", "show", "2026-11", "--org", "acme"],
    ):
        result = bare_weir(*command, "--address", "127.0.0.1:1")

        assert result.exit_code == 1
        assert result.stderr.startswith("error: no server at 127.0.0.1:1: start one with `weir up`")
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("address", "reported"),
    [
        (
            "nowhere.invalid:8443",
            "no server at nowhere.invalid:8443: no such host or port; write them as 127.0.0.1:8443",
        ),
        ("127.0.0.1:port", "--address: must be host:port"),
        ("ftp://127.0.0.1:99", "--address: must be host:port"),
    ],
)
def test_an_invalid_address_is_reported_as_such(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch, address: str, reported: str
) -> None:
    monkeypatch.setenv("WEIR_API_KEY", "key")
    monkeypatch.setenv("WEIR_TLS", "0")

    result = bare_weir("models", "--address", address)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {reported}")


def test_another_machine_is_nothing_to_start_with_weir_up() -> None:
    error = Unavailable(
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:8443: Connection"
        " refused"
    )

    line = explain(error, "192.0.2.1:8443")

    assert (
        line
        == "no server at 192.0.2.1:8443: check that it is running and that the address is right"
        " (Connection refused)"
    )


def test_an_http_port_is_distinguished_from_no_server() -> None:
    text = "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)"
    error = Unavailable(
        f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9443: {text}"
    )

    line = explain(error, "127.0.0.1:9443")

    assert line.startswith(
        "no gRPC server at 127.0.0.1:9443: the server there speaks another protocol"
    )


def test_the_version_is_shown(bare_weir: Run) -> None:
    assert bare_weir("--version").stdout == f"weir {installed_version()}\n"


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a file that is always full"
)
@pytest.mark.parametrize("command", [["--help"], ["--version"], ["models"]])
def test_a_full_disk_is_one_line_and_no_traceback(server: ScriptedWeir, command: list[str]) -> None:
    environment = {**os.environ, "WEIR_ADDRESS": server.address, "WEIR_API_KEY": "weir_user"}

    with open("/dev/full", "w") as full:
        run = [sys.executable, "-m", "weir_cli", *command]
        result = subprocess.run(
            run, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )

    assert result.returncode == 1
    assert result.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_refusal_by_a_limit_is_in_the_words_of_the_server() -> None:
    refusal = status_of(quota(QuotaDimension.REQUESTS_PER_MINUTE, 2, 2, 1))

    assert explain(error_from_status(refusal), "127.0.0.1:8443").startswith(
        "This API key may make 2 requests per minute and has made 2. Try again in "
    )


def test_a_missing_key_is_reported_with_the_remedy(bare_weir: Run) -> None:
    result = bare_weir("org list --address 127.0.0.1:1")

    assert result.exit_code == 1
    assert "pass --api-key, set WEIR_ADMIN_KEY, or start a server with `weir up`" in result.stderr


def test_programs_find_what_was_started_by_the_shell(connection_file: Path, bare_weir: Run) -> None:
    url = "http://127.0.0.1:7002/v1"
    connection_file.write_text(json.dumps(FILE | {"api_key": "it's mine", "openai_url": url}))
    reported = bare_weir("env")
    shell = subprocess.run(
        [
            "sh",
            "-c",
            f'{reported.stdout}\necho "$WEIR_ADDRESS $WEIR_API_KEY $WEIR_ADMIN_KEY"'
            ' "$OPENAI_BASE_URL $OPENAI_API_KEY"',
        ],
        capture_output=True,
        text=True,
    )
    connection_file.unlink()
    untold = bare_weir("env")

    assert shell.stdout.strip() == f"127.0.0.1:7001 it's mine file_admin {url} it's mine"
    assert untold.exit_code == 1
    assert "weir up" in untold.stderr
