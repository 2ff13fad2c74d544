"""Tests of the built site: search, API reference, home. They build it once, as `make docs` does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import weir_client
from weir_cli.checkout import version

from infra.architecture import ROOT

# Needs what `make docs` installs.
api_reference = pytest.importorskip("infra.api_reference", exc_type=ImportError)

HOW_TOS = sorted((ROOT / "docs" / "how-to").glob("*.md"))
FOUND_MAX = 3  # pages among which the one that answers a question must be
# What readers look for, and the page that answers it.
QUESTIONS = {
    "429": "reference/errors",
    "add model": "how-to/add-a-model",
    "anthropic": "reference/anthropic",
    "api key": "how-to/keys",
    "change currency": "how-to/prices",
    "free tier": "how-to/prices",
    "gdpr": "security",
    "how much did I spend": "how-to/see-your-usage",
    "json mode": "reference/openai",
    "sample data": "how-to/close-a-month",
    "async client": "reference/python/client",
    "backup": "how-to/back-up",
    "base url": "reference/openai",
    "billing address": "how-to/invoices",
    "budget": "how-to/quotas",
    "cancel a request": "clients/python",
    "certificate": "how-to/tls",
    "claude code": "how-to/coding-agents",
    "close month": "how-to/close-a-month",
    "create key": "how-to/keys",
    "credit note": "how-to/close-a-month",
    "docker": "how-to/deploy",
    "embeddings": "clients/python",
    "environment variables": "reference/settings",
    "error codes": "reference/errors",
    "function calling": "how-to/tools",
    "getting started": "quickstart",
    "grafana": "how-to/monitor",
    "gpu": "how-to/distributed-engines",
    "install": "quickstart",
    "invoice pdf": "how-to/invoices",
    "kubernetes": "how-to/deploy",
    "load balancer": "how-to/scale-out",
    "logs": "how-to/monitor",
    "openai": "reference/openai",
    "playground": "how-to/console",
    "price": "how-to/prices",
    "prometheus": "how-to/monitor",
    "rate limit": "how-to/quotas",
    "refund": "how-to/close-a-month",
    "restore": "how-to/back-up",
    "retry after": "reference/errors",
    "revoke key": "how-to/keys",
    "rotate key": "how-to/keys",
    "slow request": "how-to/debug-a-slow-request",
    "stop a stream": "clients/python",
    "streaming": "clients/python",
    "stripe": "how-to/stripe",
    "structured output": "reference/openai",
    "tax": "how-to/invoices",
    "timeout": "clients/python",
    "token count": "clients/python",
    "typescript": "clients/typescript",
    "upgrade": "how-to/upgrade",
    "usage": "how-to/console",
    "webhook": "how-to/quotas",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--site-dir", str(built)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": "https://git.example"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout.decode()
    return built


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("node") is None, reason="the search of the site is JavaScript")
def test_the_search_finds_the_page_that_answers_a_question(site: Path) -> None:
    done = subprocess.run(
        ["node", Path(__file__).with_name("search.mjs"), site],
        input=json.dumps(list(QUESTIONS)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = dict(zip(QUESTIONS, json.loads(done.stdout), strict=True))

    wrong = {
        question: found[question][:FOUND_MAX]
        for question, page in QUESTIONS.items()
        if f"{page}.html" not in found[question][:FOUND_MAX]
    }
    assert wrong == {}
    assert not any("/adr/" in page for pages in found.values() for page in pages)


@pytest.mark.timeout(300)
def test_the_reference_has_every_public_name_of_the_python_client(site: Path) -> None:
    pages = "".join(path.read_text() for path in site.glob("reference/python/*.html"))

    documented = set(re.findall(r'id="weir_client\.(\w+)"', pages))
    assert set(weir_client.__all__) - documented == set()
    for call in (
        "AsyncClient.generate",
        "AdminClient.create_api_key",
        "Client.complete",
        "AsyncBillingClient.list_alerts",
    ):
        assert f'id="weir_client.{call}"' in pages, call


@pytest.mark.timeout(300)
def test_a_page_has_version_repository_and_neighbours(site: Path) -> None:
    page = (site / "how-to" / "quotas.html").read_text()

    assert f"Weir {version(ROOT)}" in page
    assert 'href="https://git.example"' in page
    assert 'data-md-component="source"' not in page  # would ask the server of the repository
    titles = re.findall(r"- (.*): how-to/.*\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert f"Previous: {titles[titles.index('Quotas and alerts') - 1]}" in page
    assert 'href="../icon.svg"' in page


@pytest.mark.timeout(300)
def test_no_page_is_a_dead_end(site: Path) -> None:
    lost = (site / "404.html").read_text()
    reason = (site / "reference" / "errors" / "QUOTA_EXCEEDED.html").read_text()

    for page in ("quickstart", "how-to/keys", "reference/errors", "reference/cli"):
        assert re.search(rf'<article.*href="[./]*/{page}\.html".*</article>', lost, re.S), page
    assert re.search(r'<article.*href="\.\./errors\.html".*</article>', reason, re.S)


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.name)
def test_a_how_to_begins_with_when_you_need_it(page: Path) -> None:
    first = page.read_text().split("\n\n")[1]  # below the title

    assert first[0].isalpha(), "a code block, a table or a heading comes first"
    assert re.search(r"\b(you|your|when|before|if|each)\b", first), first


def test_a_docstring_becomes_markdown() -> None:
    text = "Do it.\n\naddress: where to;\n    or not.\n`key`: which.\n\n>>> f()\n1"

    assert api_reference.as_markdown(text).split("\n\n") == [
        "Do it.",
        "- `address`: where to;\n    or not.\n- `key`: which.",
        "```pycon\n>>> f()\n1\n```",
    ]


def test_the_typescript_reference_repeats_no_base_class() -> None:
    page = (
        "## B\n\n### Methods\n\n#### run()\n\n##### Inherited from\n\n`A`\n\n## WeirClient\n\n"
        "### Methods\n\n#### stop()\n\n##### Returns\n\n`void`\n"
    )

    assert api_reference.shortened(page).split() == ["##", "WeirClient", "###", "stop()", "##", "B"]
