"""File of identity providers: each error is reported with its line, its place and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.access.providers import Provider, SignInFile, read_sign_in
from common.settings import SettingInvalid
from metering.tenants.sign_in import GroupRule

WHOLE = """\
url: https://weir.example/console/
providers:
  corp:
    issuer: https://login.example
    client_id: weir
    client_secret_file: secret
    title: Example Corp
    scopes: [openid, email, groups]
    email_domains: [Example.com]
    groups_claim: roles
    groups:
      - {group: devs, organization: acme, role: developer, project: search}
      - {group: ops, organization: acme, role: operator}
    session_hours: 8
    idle_minutes: 30
"""
LEAST = """\
url: http://localhost:8080/console
providers:
  a:
    issuer: http://127.0.0.1:9000/realm
    client_id: weir
"""
PROVIDER = "    issuer: https://login.example\n    client_id: weir\n"


def read(folder: Path, content: str) -> SignInFile:
    (folder / "secret").write_text("s3cret\n")
    file = folder / "sign-in.yaml"
    file.write_bytes(content.encode())
    return read_sign_in(file)


def test_all_keys_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    rules = (
        GroupRule("devs", "acme", "developer", "search"),
        GroupRule("ops", "acme", "operator"),
    )
    assert found.url == "https://weir.example/console"
    assert found.provider("corp") == Provider(
        "corp",
        "https://login.example",
        "weir",
        tmp_path / "secret",
        "Example Corp",
        ("openid", "email", "groups"),
        ("example.com",),
        "roles",
        rules,
        8.0,
        30.0,
    )
    assert found.providers[0].client_secret() == "s3cret"
    assert found.provider("other") is None


def test_the_least_file_is_enough(tmp_path: Path) -> None:
    [found] = read(tmp_path, LEAST).providers
    assert found == Provider("a", "http://127.0.0.1:9000/realm", "weir", title="a")
    assert found.client_secret() == ""
    assert (found.terms.lifetime.total_seconds(), found.terms.idle_max.total_seconds()) == (
        12 * 3600,
        3600,
    )


@pytest.mark.parametrize(
    ("before", "after", "line", "location", "reason"),
    [
        ("url: https://weir.example/console/\n", "", 1, "the file", "url"),
        ("/console/\n", "/\n", 1, "url", "must be the address of the console"),
        ("https://weir", "http://weir", 1, "url", "https"),
        ("https://weir", "javascript://weir", 1, "url", "https"),
        ("https://weir", "https://me@weir", 1, "url", "user"),
        ("console/\n", "console?a=b#/console\n", 1, "url", "query"),
        ("  corp:", "  Corp:", 4, "providers.Corp", "the name must match"),
        (PROVIDER, "    client_id: weir\n", 4, "providers.corp", "issuer"),
        (PROVIDER, "    issuer: https://login.example\n", 4, "providers.corp", "client_id"),
        ("https://login", "http://login", 4, "providers.corp.issuer", "https"),
        ("https://login", "http://localhost.evil", 4, "providers.corp.issuer", "https"),
        ("https://login.example", '"https://["', 4, "providers.corp.issuer", "WEIR_SIGN_IN"),
        ("login.example\n", "login.example?a\n", 4, "providers.corp.issuer", "query"),
        ("login.example\n", "lögin.example\n", 4, "providers.corp.issuer", "https"),
        ("client_id: weir", 'client_id: ""', 5, "providers.corp.client_id", "1 to 255"),
        ("client_id: weir", 'client_id: "a\\n"', 5, "providers.corp.client_id", "printable"),
        ("client_id: weir", f"client_id: {'a' * 256}", 5, "providers.corp.client_id", "1 to 255"),
        ("client_id: weir", "client_id: [weir]", 5, "providers.corp.client_id", "WEIR_SIGN_IN"),
        ("_file: secret", "_file: none", 6, "providers.corp.client_secret_file", "no file"),
        ("_file: secret", "_file: .", 6, "providers.corp.client_secret_file", "no file"),
        ("[openid, email", "[email", 8, "providers.corp.scopes", "must have openid"),
        ("[openid, email", '[openid, "a b"', 8, "providers.corp.scopes[1]", "without spaces"),
        ("[openid, email, groups]", "openid", 8, "providers.corp.scopes", "WEIR_SIGN_IN"),
        ("Example.com", "me@example.com", 9, "providers.corp.email_domains[0]", "domain"),
        ("Example.com", "exämple.com", 9, "providers.corp.email_domains[0]", "domain"),
        ("role: developer", "role: boss", 12, "providers.corp.groups[0].role", "owner"),
        ("group: devs, ", "", 12, "providers.corp.groups[0]", "group"),
        ("organization: acme, role: developer", "role: developer", 12, "groups[0]", "organization"),
        ("role: operator", "roll: operator", 13, "providers.corp.groups[1]", "roll"),
        ("session_hours: 8", "session_hours: 0", 14, "session_hours", "0.1"),
        ("session_hours: 8", "session_hours: nan", 14, "session_hours", "WEIR_SIGN_IN"),
        ("session_hours: 8", "session_hours: 721", 14, "session_hours", "720"),
        ("idle_minutes: 30", "idle_minutes: 4", 15, "idle_minutes", "5"),
        ("idle_minutes: 30", "idle_minutes: 43201", 15, "idle_minutes", "43,?200"),
        ("idle_minutes: 30", "idle: 30", 15, "idle", "WEIR_SIGN_IN"),
        ("providers:", "extra: 1\nproviders:", 2, "extra", "WEIR_SIGN_IN"),
    ],
)
def test_an_error_names_its_line_and_key(
    tmp_path: Path, before: str, after: str, line: int, location: str, reason: str
) -> None:
    assert before in WHOLE
    with pytest.raises(SettingInvalid, match=reason) as failed:
        read(tmp_path, WHOLE.replace(before, after, 1))
    message = str(failed.value)
    assert message.startswith("WEIR_SIGN_IN='"), message
    assert f"line {line}: " in message, message
    assert location in message, message


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    broken = WHOLE.replace("https://", "ftp://").replace("role: operator", "role: boss")
    with pytest.raises(SettingInvalid) as failed:
        read(tmp_path, broken)
    lines = [each.partition(":")[0].strip() for each in str(failed.value).splitlines()[1:]]
    assert lines == ["line 1", "line 4", "line 13"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "url"),
        ("[]", "WEIR_SIGN_IN"),
        ("url: https://x.example/console\nproviders: {}\n", "1 to 20"),
        ("url: https://x.example/console\nproviders: []\n", "providers"),
        ("a: [", "line 1"),
        (LEAST + "  a:\n    issuer: https://b.example\n    client_id: weir\n", "WEIR_SIGN_IN"),
        (LEAST + LEAST.partition("providers:\n")[2].replace("  a:", "  b:"), "another provider"),
        (
            "url: https://x.example/console\nproviders:\n"
            + "".join(
                f"  p{number}: {{issuer: 'https://p{number}.example', client_id: weir}}\n"
                for number in range(21)
            ),
            "1 to 20",
        ),
        (
            LEAST + "    groups:\n" + "      - {group: g, organization: o, role: owner}\n" * 1001,
            "at most 1000",
        ),
    ],
)
def test_files_that_are_wrong_as_a_whole_are_refused(
    tmp_path: Path, content: str, reason: str
) -> None:
    with pytest.raises(SettingInvalid, match=reason):
        read(tmp_path, content)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SettingInvalid, match="cannot be read"):
            read_sign_in(path)
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(SettingInvalid, match="cannot be read"):
        read_sign_in(tmp_path / "binary")
