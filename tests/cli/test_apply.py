"""`weir apply` and `weir export`: output for people and for scripts, and exit codes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from weir.v1 import configuration_pb2 as pb
from weir.v1 import types_pb2

from tests.cli.conftest import Run, ScriptedWeir

FILE = """\
organizations:
- name: acme
  quotas:
  - {dimension: cost-per-month, limit: 250.00}
  projects:
  - name: search
    keys:
    - name: copilot
"""
MONEY = pb.QuotaConfiguration(dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH)
TOKENS = pb.QuotaConfiguration(
    dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE, model="demo", for_new_keys=True
)
CHANGES = [
    pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_CREATE,
        kind="organization",
        path="acme",
        fields=[pb.FieldChange(field="currency_code", after_json='"USD"')],
    ),
    pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_UPDATE,
        kind="quota",
        path="acme",
        quota=MONEY,
        fields=[
            pb.FieldChange(
                field="limit_value", before_json="100000000000000", after_json="1250500000000000"
            ),
            pb.FieldChange(field="alert_at", after_json="[60, 100]"),
        ],
    ),
    pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_DELETE, kind="quota", path="acme/search", quota=TOKENS
    ),
    pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_CREATE,
        kind="key",
        path="acme/search/copilot",
        api_key_prefix="wk_copilot1",
        secret="wk_copilot1_topsecret",
        fields=[
            pb.FieldChange(field="scopes", after_json='["admin", "inference"]'),
            pb.FieldChange(field="expire_time", after_json='"2027-06-30T00:00:00Z"'),
        ],
    ),
    pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_DELETE,
        kind="key",
        path="acme/search/old",
        api_key_prefix="wk_old12345",
    ),
    pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_UPDATE,
        kind="price",
        path="demo in USD",
        fields=[
            pb.FieldChange(
                field="output_picos_per_token", before_json="600000", after_json="700000"
            )
        ],
    ),
]
KEPT = pb.ConfigurationChange(
    action=pb.ConfigurationChange.ACTION_KEEP, kind="quota", path="acme", quota=TOKENS
)
PLAN = """\
+ organization acme
    currency  USD
~ quota acme · cost-per-month
    limit     100.00 → 1,250.50
    alert_at  default → 60, 100 %
- quota acme/search · tokens-per-minute for demo, for new keys
+ key acme/search/copilot (wk_copilot1)
    scopes   admin, inference
    expires  2027-06-30T00:00:00Z
- key acme/search/old (wk_old12345)  is revoked, and its running requests end
~ price demo in USD
    output  0.60 → 0.70
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a file without an error."""
    path = tmp_path / "team.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture(autouse=True)
def replies(server: ScriptedWeir) -> None:
    """Prepare the server's replies."""
    server.accounts.replies["ApplyConfiguration"] = pb.ApplyConfigurationResponse(
        changes=CHANGES, kept=[KEPT]
    )


def test_applied_changes_are_printed_by_line(weir: Run, file: Path, server: ScriptedWeir) -> None:
    result = weir("apply", str(file))

    assert result.exit_code == 0
    assert (
        "\n".join(line.rstrip() for line in result.stdout.splitlines()) + "\n"
        == PLAN + "acme/search/copilot wk_copilot1_topsecret\n"
    )
    assert result.stderr.splitlines() == [
        "created 2, changed 2, removed 2",
        (
            "1 more exists, absent from the file; --prune removes it: quota acme ·"
            " tokens-per-minute for demo, for new keys"
        ),
        "These secrets are shown only now. Store them:",
    ]
    [request] = server.accounts.requests
    assert not request.dry_run
    [organization] = request.configuration.organizations
    assert organization.quotas[0].limit_value == 250 * 10**12
    assert not organization.prune_quotas


def test_a_dry_run_says_so_and_can_report_to_a_script_that_there_is_something_to_do(
    weir: Run, file: Path, server: ScriptedWeir
) -> None:
    plain = weir("apply", str(file), "--dry-run", "--prune")
    checked = weir("apply", str(file), "--dry-run", "--exit-code")
    server.accounts.replies["ApplyConfiguration"] = pb.ApplyConfigurationResponse()
    settled = weir("apply", str(file), "--dry-run", "--exit-code")

    assert (plain.exit_code, checked.exit_code, settled.exit_code) == (0, 3, 0)
    assert "would create 2, change 2, remove 2; nothing was changed" in plain.stderr
    assert settled.stderr == "nothing to change: everything matches the file\n"
    assert settled.stdout == ""
    assert [request.dry_run for request in server.accounts.requests] == [True] * 3
    assert server.accounts.requests[0].configuration.organizations[0].projects[0].prune_keys


def test_scripts_get_one_document(weir: Run, file: Path) -> None:
    document = json.loads(weir("apply", str(file), "--json").stdout)

    assert document["applied"] is True
    assert document["errors"] == []
    assert document["changes"][1] == {
        "action": "update",
        "kind": "quota",
        "path": "acme",
        "quota": {"dimension": "QUOTA_DIMENSION_COST_PICOS_PER_MONTH"},
        "fields": [
            {"field": "limit_value", "before": 100_000_000_000_000, "after": 1_250_500_000_000_000},
            {"field": "alert_at", "before": None, "after": [60, 100]},
        ],
    }
    assert document["changes"][3]["secret"] == "wk_copilot1_topsecret"
    assert document["kept"][0]["action"] == "keep"


def test_secrets_go_into_a_file_of_ones_own_and_nowhere_else(
    weir: Run, file: Path, tmp_path: Path, server: ScriptedWeir
) -> None:
    secrets = tmp_path / "secrets"
    result = weir("apply", str(file), "--secrets-file", str(secrets))
    as_json = weir("apply", str(file), "--secrets-file", str(tmp_path / "more"), "--json")
    again = weir("apply", str(file), "--secrets-file", str(secrets))

    assert secrets.read_text() == "acme/search/copilot wk_copilot1_topsecret\n"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    assert "topsecret" not in result.output + as_json.output
    assert again.exit_code == 2
    assert "cannot be created" in again.stderr
    assert len(server.accounts.requests) == 2, "nothing is applied whose secrets could not be kept"


def test_mistakes_of_file_and_server_are_reported_together_and_nothing_is_applied(
    weir: Run, file: Path, server: ScriptedWeir, tmp_path: Path
) -> None:
    server.accounts.replies["ApplyConfiguration"] = pb.ApplyConfigurationResponse(
        violations=[
            pb.ConfigurationViolation(
                field="organizations[0].projects[0].name", description="give 1 to 63 of a-z"
            ),
            pb.ConfigurationViolation(
                field="organizations[0].quotas[0].limit_value", description="the limit is missing"
            ),
        ]
    )
    file.write_text(FILE.replace("250.00", "many").replace("name: search", "name: Search"))

    result = weir("apply", str(file))
    as_json = weir("apply", str(file), "--json")

    assert result.exit_code == as_json.exit_code == 2
    assert result.stderr.splitlines() == [
        f"{file}:4: organizations[0].quotas[0].limit: 'many' is not a number",
        f"{file}:6: organizations[0].projects[0].name: give 1 to 63 of a-z",
        "nothing was changed: 2 errors",
    ]
    assert result.stdout == ""
    assert [request.dry_run for request in server.accounts.requests] == [True, True]
    found = json.loads(as_json.stdout)
    assert found["applied"] is False
    assert [error["line"] for error in found["errors"]] == [4, 6]
    missing = weir("apply", str(tmp_path / "nothing.yaml"))
    assert (missing.exit_code, "cannot be read" in missing.stderr) == (2, True)


def test_a_file_comes_from_stdin_too(weir: Run, server: ScriptedWeir) -> None:
    assert weir("apply -", stdin=FILE).exit_code == 0
    assert server.accounts.requests[0].configuration.organizations[0].name == "acme"


def test_only_terminals_get_colours(weir: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weir("apply", str(file)).stdout
    monkeypatch.delenv("NO_COLOR")
    piped = weir("apply", str(file)).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = weir("apply", str(file)).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    refused = weir("apply", str(file)).stdout

    assert "\x1b[" not in plain + piped
    assert "\x1b[32m+ organization acme" in terminal
    assert "\x1b[3" not in refused


def test_names_cannot_steer_the_terminal(weir: Run, file: Path, server: ScriptedWeir) -> None:
    evil = pb.ConfigurationChange(
        action=pb.ConfigurationChange.ACTION_CREATE,
        kind="key",
        path="acme/search/\x1b[2J",
        fields=[pb.FieldChange(field="name", before_json='"a\\u001b[31m"', after_json='"b"')],
    )
    server.accounts.replies["ApplyConfiguration"] = pb.ApplyConfigurationResponse(changes=[evil])

    assert "\x1b" not in weir("apply", str(file)).output


def test_an_export_is_a_file_that_apply_takes(weir: Run, server: ScriptedWeir) -> None:
    key = pb.ApiKeyConfiguration(name="copilot", scopes=["inference"])
    organization = pb.OrganizationConfiguration(
        name="acme",
        currency_code="USD",
        quotas=[pb.QuotaConfiguration(dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_DAY)],
        projects=[pb.ProjectConfiguration(name="search", keys=[key])],
    )
    configuration = pb.Configuration(organizations=[organization])
    server.accounts.replies["ExportConfiguration"] = pb.ExportConfigurationResponse(
        configuration=configuration
    )

    exported = weir("export --org acme")
    weir("apply -", stdin=exported.stdout)

    assert (
        exported.stdout
        == "version: 1\norganizations:\n- name: acme\n  currency: USD\n  quotas:\n  - dimension:"
        " tokens-per-day\n    limit: 0\n  projects:\n  - name: search\n    keys:\n    - name:"
        " copilot\n      scopes: [inference]\n"
    )
    assert server.accounts.requests[-1].configuration == configuration
    assert json.loads(weir("export --json").stdout)["organizations"][0]["name"] == "acme"
