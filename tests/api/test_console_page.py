"""Page of the console without a browser: its source is safe, its modules are exact, and the built
files are those of the source."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.console.console import MEDIA_TYPES, NAMES, STATIC
from infra import console_page
from infra.console_page import COMPRESSED_BYTES_MAX, SOURCE, Outdated, compare
from metering.core.models import QuotaDimension
from metering.core.money import MINOR_DIGITS
from metering.tenants.billing_profiles import COUNTRY_CODES, BillingProfile
from tests.node import node_of

MODULES = sorted(
    path
    for path in (SOURCE / "src").rglob("*.ts*")
    if "gen" not in path.relative_to(SOURCE / "src").parts
)
NODE_WAIT_S = 60.0

# Constructs that turn text into markup or code, load from elsewhere, or store what a tenant sees.
# The source must not use them.
DANGERS = (
    *(
        r"\binnerHTML\b",
        r"\bdangerouslySetInnerHTML\b",
        r"\bouterHTML\b",
        r"insertAdjacentHTML",
        r"document\.write",
        r"createContextualFragment",
        r"DOMParser",
    ),
    *(
        r"\beval\b",
        r"\bFunction\s*\(",
        r"setTimeout\(\s*[\"'`]",
        r"javascript:",
        r"\bsrcdoc\b",
        r"\bsrcDoc\b",
        r"localStorage",
        r"document\.cookie",
    ),
    *(r"[\"'`(](?:https?:)?//", r"<style", r"\bstyle\s*=", r"@import", r"import\s*\("),
)
EXAMPLE = "https://example.com/weir-alerts"  # in an empty field


@pytest.fixture(scope="module")
def node() -> str:
    return node_of(console_page.missing())


def test_no_module_of_the_page_can_make_text_into_markup_or_code() -> None:
    for path in (*MODULES, SOURCE / "index.html"):
        for danger in DANGERS:
            assert re.findall(danger, path.read_text().replace(EXAMPLE, "")) == [], path.name


@pytest.mark.parametrize(
    "planted",
    [
        "x.innerHTML = y",
        "eval(y)",
        "<p dangerouslySetInnerHTML={y}>",
        'import("https://a.example/x.mjs")',
        "<p style={y}>",
    ],
)
def test_such_a_thing_would_be_found(planted: str) -> None:
    assert any(re.search(danger, planted) for danger in DANGERS)


def test_only_one_module_knows_where_credentials_are() -> None:
    named = {path.name for path in MODULES if re.search("sessionStorage|Bearer ", path.read_text())}

    assert named == {"credentials.ts", "snippets.ts"}, "the second shows a call to copy"


def test_all_files_are_in_the_wheel_and_served() -> None:
    declared = Path("pyproject.toml").read_text()
    assert '"api.console" = ["static/*"]' in declared
    assert all(path.is_file() for path in STATIC.iterdir()), "folders below it would stay behind"
    assert {path.suffix for path in STATIC.iterdir()} <= MEDIA_TYPES.keys()
    page = (STATIC / "index.html").read_text()
    loaded = set(re.findall(r'(?:src|href)="\./([^"#]+)"', page))
    assert loaded == {"console.js", "console.css", "icon.svg"}
    assert loaded <= {path.name for path in STATIC.iterdir()}
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon[a-z]+=|\bstyle=", page)


def test_the_built_page_is_that_of_the_source(node: str, tmp_path: Path) -> None:
    console_page.build(tmp_path)
    built = console_page.files(tmp_path)

    compare(console_page.files(STATIC), built)

    with pytest.raises(Outdated, match=r"console\.js in api/console/static"):
        compare(built | {"console.js": b"x"}, built)
    with pytest.raises(Outdated, match=r"old\.js in"):
        compare(built | {"old.js": b""}, built)
    large = {"console.js": os.urandom(COMPRESSED_BYTES_MAX)}
    with pytest.raises(Outdated, match="at most 300,000 compressed bytes"):
        compare(large, large)


def test_the_page_asks_for_every_offered_call_and_no_other() -> None:
    text = "".join(path.read_text() for path in MODULES)
    called = set(re.findall(r'"((?:\w+Service)/\w+)"', text))
    called |= {f"AdminService/{name}" for name in re.findall(r"`AdminService/(\w+)`", text)}

    assert called == set(NAMES)


def test_the_page_offers_every_dimension_of_a_limit(node: str) -> None:
    text = (SOURCE / "src" / "pages" / "limits.tsx").read_text()
    counted, windows = (
        re.findall(r'"(\w+)"', found)
        for found in re.findall(r"const (?:COUNTED|WINDOWS) = \[(.*?)\];", text)
    )
    offered = {f"{each}_per_{window}".lower() for each in counted for window in windows}
    offered = offered - {"cost_picos_per_minute"} | {"concurrent_requests"}

    assert offered == set(QuotaDimension) - {QuotaDimension.PREPAID_CREDIT_PICOS}


@pytest.fixture(scope="module")
def bundles(node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundles")
    console_page.build_tests(directory)
    return directory


@pytest.mark.parametrize("name", ["format", "pages"])
def test_the_modules_format_exactly_and_show_text_as_text(
    name: str, node: str, bundles: Path
) -> None:
    done = subprocess.run(
        [node, "--test", "--test-reporter=tap", bundles / f"{name}.test.mjs"],
        capture_output=True,
        text=True,
        timeout=NODE_WAIT_S,
        env={"TZ": "Europe/Berlin"},
    )

    assert done.returncode == 0, done.stdout


def test_the_console_knows_the_decimals_of_every_currency() -> None:
    lists = re.findall(r'\[(\d), "([A-Z ]+)"\]', (SOURCE / "src" / "format.ts").read_text())

    known = {code: int(digits) for digits, codes in lists for code in codes.split()}
    assert known == {code: digits for code, digits in MINOR_DIGITS.items() if digits != 2}


def test_the_addressee_is_written_in_the_order_of_the_documents(node: str, bundles: Path) -> None:
    profiles = [
        BillingProfile(("a@b.example",), "Acme", "Road 1", "", "Town", "1234", "State", country)
        for country in COUNTRY_CODES.split()
    ]
    requested = "".join(lines_of(profiles))

    done = subprocess.run(
        [node, bundles / "shown.mjs"],
        input=requested,
        capture_output=True,
        text=True,
        timeout=NODE_WAIT_S,
        check=True,
    )

    shown = [json.loads(line)["billedTo"] for line in done.stdout.splitlines()]
    assert shown == [", ".join((each.legal_name, *each.lines)) for each in profiles]


def lines_of(profiles: list[BillingProfile]) -> Iterator[str]:
    """Yield reports with these profiles as the console receives them, one a line."""
    for profile in profiles:
        message = {
            "emails": list(profile.emails),
            "legalName": profile.legal_name,
            "addressLine1": profile.address_line1,
            "city": profile.city,
            "postalCode": profile.postal_code,
            "state": profile.state,
            "country": profile.country,
        }
        yield json.dumps({"billingProfile": message}) + "\n"
