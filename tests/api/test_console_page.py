"""Page of the console without a browser: its files are safe, and its arithmetic runs in Node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from api.console.console import STATIC
from metering.core.money import MINOR_DIGITS
from metering.tenants.billing_profiles import COUNTRY_CODES, BillingProfile

MODULES = sorted(STATIC.glob("*.mjs"))
NODE_WAIT_S = 60.0

# Constructs that turn text into markup or code, or load from elsewhere. The page's files must not
# use them.
DANGERS = (
    *(
        r"\binnerHTML\b",
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
        r"localStorage",
        r"document\.cookie",
    ),
    *(
        r"[\"'`(](?:https?:)?//(?!www\.w3\.org/2000/svg)",
        r"\bon[a-z]+\s*=\s*[\"'{]",
        r"<script(?![^>]*\bsrc=)[^>]*>",
        r"<style",
        r"\bstyle\s*=",
    ),
    *(r"@import", r"url\(", r"import\s*\("),
)


def test_no_file_of_the_page_can_make_text_into_markup_or_code() -> None:
    for path in STATIC.iterdir():
        for danger in DANGERS:
            assert re.findall(danger, path.read_text()) == [], path.name
    page = (STATIC / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) <= {
        path.name for path in STATIC.iterdir()
    }


@pytest.mark.parametrize(
    "planted",
    [
        "x.innerHTML = y",
        "eval(y)",
        '<p onclick="y()">',
        'import("https://a.example/x.mjs")',
        "<script>y</script>",
    ],
)
def test_such_a_thing_would_be_found(planted: str) -> None:
    assert any(re.search(danger, planted) for danger in DANGERS)


def test_all_files_are_in_the_wheel() -> None:
    declared = Path("pyproject.toml").read_text()
    assert '"api.console" = ["static/*"]' in declared
    assert all(path.is_file() for path in STATIC.iterdir()), "folders below it would stay behind"


@pytest.mark.parametrize("name", ["console_format", "console_pages"])
def test_the_modules_format_exactly_and_show_text_as_text(name: str) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("Node.js is not installed")
    tests = Path(__file__).with_name(f"{name}.test.mjs")

    done = subprocess.run(
        [node, "--test", "--test-reporter=tap", tests],
        capture_output=True,
        text=True,
        timeout=NODE_WAIT_S,
        env={"TZ": "Europe/Berlin"},
    )

    assert done.returncode == 0, done.stdout


def test_the_console_knows_the_decimals_of_every_currency() -> None:
    lists = re.findall(r'\[(\d), "([A-Z ]+)"\]', (STATIC / "format.mjs").read_text())

    known = {code: int(digits) for digits, codes in lists for code in codes.split()}
    assert known == {code: digits for code, digits in MINOR_DIGITS.items() if digits != 2}


def test_the_addressee_is_written_in_the_order_of_the_documents() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("Node.js is not installed")
    profiles = [
        BillingProfile(("a@b.example",), "Acme", "Road 1", "", "Town", "1234", "State", country)
        for country in COUNTRY_CODES.split()
    ]
    requested = [{"billingProfile": message_of(each)} for each in profiles]
    script = f"""
        import {{ billedTo }} from "{STATIC / "month.mjs"}";
        for (const each of {json.dumps(requested)}) console.log(billedTo(each));
    """

    done = subprocess.run(
        [node, "--input-type=module", "--eval", script],
        capture_output=True,
        text=True,
        timeout=NODE_WAIT_S,
        check=True,
    )

    expected = [", ".join((each.legal_name, *each.lines)) for each in profiles]
    assert done.stdout.splitlines() == expected


def message_of(profile: BillingProfile) -> dict[str, object]:
    """Return a profile as the console receives it."""
    return {
        "emails": list(profile.emails),
        "legalName": profile.legal_name,
        "addressLine1": profile.address_line1,
        "city": profile.city,
        "postalCode": profile.postal_code,
        "state": profile.state,
        "country": profile.country,
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_every_module_parses(module: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("Node.js is not installed")

    check = [node, "--check", str(module)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=NODE_WAIT_S)

    assert done.returncode == 0, done.stderr
