"""Tests that run the code blocks of README and the documentation against one `weir up`.

Shell and Python blocks must succeed. Each command of a `console` block runs, and its output must
have the lines of the page in their order; numbers, ids and times may differ, `…` stands for omitted
text, and four blanks continue a folded line. A YAML block whose first line names a file is written
to that file. `NOT_RUN` lists the blocks that no test runs, with the reasons.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from sqlalchemy import insert, text
from weir_cli.commands import all_commands

from api.core.settings import DEMO_ENCODER_NAME, bundled_encoders
from api.metrics.operator_http import export_metrics, span_metrics
from api.observability.spans import SpanCounts
from infra.reference import metric_families
from metering.core.models import PriceVersion
from metering.pricing.prices import get_price
from metering.store.db import create_engine, create_sessions
from metering.store.embedded_postgres import EmbeddedPostgres, binaries
from metering.tenants.api_keys import find_api_key
from metering.tenants.tenants import find_organization
from tests.conftest import new_home, remove_home
from tests.forks import Server
from tests.infra.test_docs import BLOCK, DOCS, OUTSIDE, PAGES, ROOT
from tests.metering.usage import Consumed, Customer, add_usage
from tests.scraped import scrape
from tests.service import wait_for

TIMEOUT_S = 300.0  # for a page on a busy machine
COLUMNS = "180"  # wide enough for every table
WEIGHTS = ROOT / "inference" / "demo_model" / "weights"
RUN = ("sh", "bash", "console", "python")
ELSEWHERE = ("yaml", "json", "toml", "ts", "js")  # test_docs.py, test_examples.py, clients
DRAWN = ("text",)  # drawings and test vectors
# Blocks that no test here runs, by page and first words, with the reason.
NOT_RUN = {
    (
        "docs/how-to/scim.md",
        "curl -H",
    ): "asks a host of the example; tests/e2e/test_scim.py",
    (
        "docs/how-to/erase-a-person.md",
        "$ weir person erase",
    ): "needs a person; tests/cli/test_members.py, tests/metering/test_person_erasure.py",
    ("README.md", "make demo"): "CI runs the targets",
    ("CONTRIBUTING.md", "make demo"): "CI runs the targets",
    ("CONTRIBUTING.md", "def attend"): "shows the form of a docstring; test_docs.py compiles it",
    ("docs/quickstart.md", "make setup"): "CI runs `make setup`; the other blocks use `weir up`",
    (
        "docs/how-to/close-a-month.md",
        "$ weir month close 2026-10 --org acme --check\nacme 2026-10: USAGE_MISSTATED",
    ): "needs a changed usage event; tests/e2e/test_months.py",
    (
        "docs/how-to/distributed-engines.md",
        "export DYN_FILE_KV",
    ): "needs GPUs; tests/inference/test_real_dynamo.py runs simulated workers",
    ("docs/how-to/deploy.md", "docker compose"): "needs Docker; tests/test_images.py has the files",
    ("docs/how-to/deploy.md", "pip download"): "downloads all dependencies",
    ("docs/how-to/kubernetes.md", "kubectl create"): "needs a cluster; test_chart.py has the chart",
    ("docs/how-to/monitor.md", "pip install"): "needs a collector; tests/e2e/test_spans.py has one",
    ("docs/reference/fleet.md", "$ weir fleet show"): "needs a canary; tests/cli/test_fleet.py",
    ("docs/how-to/prove-the-ledger.md", "weir chaos"): "takes minutes; tests/faults/test_chaos.py",
    ("docs/how-to/scale-out.md", "export WEIR_HOME"): "needs two machines; test_peer_port.py",
    ("docs/how-to/scale-out.md", "$ python -m bench.router"): "tests/bench/test_router_bench.py",
    ("docs/how-to/scale-out.md", "$ weir org bind"): "needs regions; tests/e2e/test_regions.py",
    **{
        ("docs/how-to/members.md", start): "needs the token of the first block; test_members.py"
        for start in ("WEIR_ADMIN_KEY", "weir member list", "$ weir member remove", "weir person")
    },
    ("docs/how-to/sign-in.md", "weir person"): "needs `weir up`; tests/e2e/test_sign_in.py",
    **{
        ("docs/how-to/browser.md", start): "calls another host; tests/e2e/test_client_tokens.py"
        for start in (
            "curl https://weir.example.com/v1/client_tokens ",
            "curl https://weir.example.com/v1/client_tokens/revoke",
        )
    },
    **{
        ("docs/how-to/tokens.md", start): "needs a provider; tests/e2e/test_tokens.py"
        for start in ("curl", "from pathlib", "weir token-issuer revoke")
    },
    ("docs/reference/clients.md", ""): "`make test-clients` installs the clients and runs it",
    ("docs/reference/engines.md", ""): "needs remote servers; tests/inference has doubles of them",
    ("docs/how-to/install.md", ".venv/bin/python"): "make setup runs it",
    ("docs/releasing.md", ""): "changes the public repository",
    ("api/README.md", ""): "runs tests",
    ("inference/README.md", ""): "runs tests",
    ("metering/README.md", ""): "runs tests",
    ("sdk/python/README.md", ""): "tests/sdk/test_examples.py",
    ("sdk/typescript/README.md", ""): "tests/sdk/test_examples.py",
    **{
        (f"docs/cookbook/{page.name}", ""): "tests/sdk/test_cookbook.py"
        for page in DOCS.glob("cookbook/*.md")
        if re.search("```(python|sh)", page.read_text())
    },
}
MONTHS = (datetime(2026, 9, 10, 12, tzinfo=UTC), datetime(2026, 10, 10, 12, tzinfo=UTC))
# Commands of the pages as functions: servers run in the background of the page's shell, other
# commands are forked from a process that has imported them.
FUNCTIONS = r"""
weir() {
  case "$1" in
    serve|worker)
      (export WEIR_READY_FILE="$PWD/$1.ready"; exec "$PYTHON" -m weir_cli "$@" >"$1.log" 2>&1) &
      until grep -qs '"serving":true' "$WEIR_HOME/serve.json" "$1.ready" || [ -s "$1.ready" ]; do
        sleep 0.2; kill -0 $! || { cat "$1.log"; return 1; }
      done
      export WEIR_ADDRESS=$(jq --raw-output .address "$WEIR_HOME/serve.json") ;;
    up) ;;
    *) "$PYTHON" -IS "$PYTHONPATH/tests/forked_command.py" "$FORKS" weir_cli "$@" ;;
  esac
}
python() { "$PYTHON" "$@"; }
curl() { command curl --fail --silent --show-error "$@"; }
until_found() { until psql "$STAGE_URL" -tAc "$1" | grep -q .; do sleep 0.2; done; }
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
set -e
"""

OWN_PROCESS = """
eval "$(weir env)"; unset WEIR_ADDRESS
export WEIR_HOME="$PWD/home" WEIR_DATABASE_URL="{database_url}"
"""
WITH_ENVIRONMENT = 'eval "$(weir env)"\n'
OWN_KEY = """
KEY=$(weir key create old --org acme --project search --scope inference)
PREFIX=${KEY:0:11}
"""


@dataclass(frozen=True, slots=True)
class Page:
    """Preparation of a page. replaced: texts of the page that differ here. setup: shell commands.

    has_organization: whether acme/search exists. has_past_usage: whether acme used tokens in past
    months. shown: texts that the output must have.
    """

    replaced: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    has_organization: bool = True
    has_past_usage: bool = False
    shown: tuple[str, ...] = ()


PREPARED = {
    "README.md": Page({".venv/bin/weir": "weir"}, WITH_ENVIRONMENT),
    "docs/how-to/see-your-usage.md": Page(setup=WITH_ENVIRONMENT),
    "docs/how-to/add-a-model.md": Page(
        {
            "/models/one": str(WEIGHTS),
            "/models/two": str(WEIGHTS),
            "weir fleet diff": (
                f"sed -i 's|^models:|&\\n  large: {{directory: {WEIGHTS}}}|' fleet.yaml;"
                " weir fleet diff"
            ),
            '"a larger model"': '"a larger model"; weir fleet rollback 1',  # for other pages
        },
        OWN_PROCESS,
    ),
    "docs/how-to/back-up.md": Page(
        {
            "--host=db.internal restored": '"$RESTORED_URL"',
            ".venv/bin/python": "python",
            "$HOME/.weir": "{home}",
        },
        """
        export WEIR_DATABASE_URL="{database_url}" RESTORED_URL="{copied_url}"
        createdb() { psql "$WEIR_DATABASE_URL" -c 'CREATE DATABASE copied'; }
        """,
    ),
    "docs/how-to/close-a-month.md": Page(
        {
            "323430cc-b81b-40ec-b074-89c9fa15eac5": "$(proposed adjustment)",
            "a1af6039-a639-4402-a073-d67b5f368921": "$(proposed credit-note)",
        },
        """
        proposed() {
          weir $1 list --org acme --undecided --json | jq -r '.[0].adjustment_id'
        }
        weir credit grant acme 0.50 --from 2026-09 --until 2036-12 --reason welcome >/dev/null
        """,
        has_past_usage=True,
    ),
    "docs/how-to/configuration.md": Page(
        {"2027-06-30": "2036-06-30"},
        """
        sed 's/limit: 250/limt: 250/; s/model: demo/model: chat/' team.yaml >broken.yaml
        sed 's/250.00/300.00/; /name: nightly/,$d' team.yaml >less.yaml
        """,
        has_organization=False,
    ),
    "docs/how-to/console.md": Page(
        {"2026-11": "{month}", "http://127.0.0.1:9443/": "{http_url}"}, WITH_ENVIRONMENT
    ),
    "docs/how-to/deploy.md": Page(
        {
            "postgresql://weir@db.internal/weir": "{new_url}",
            "postgresql://weir_app:secret@db.internal/weir": "{new_app_url}",
            "127.0.0.1:8443": "127.0.0.1:0",
        },
        'export WEIR_HOME="$PWD/home"; psql "{database_url}" -c "CREATE DATABASE new"\n',
    ),
    "docs/index.md": Page(setup=WITH_ENVIRONMENT, shown=("tokens cost 0.",)),
    "docs/how-to/keys.md": Page(
        {
            "wk_ynxwt5kt": "$PREFIX",
            "$ weir requests\n": "$ generate; weir requests\n",
            "kill 151370b7-36aa-4af1-9f9a-a66311b94917": "kill $(running)",
        },
        OWN_KEY
        + """
        running() { weir requests --json | jq -r '.requests[0].request_id'; }
        generate() {
          key=$(weir key create run --org acme --project search --scope inference 2>/dev/null)
          weir generate Hello --choices 16 --temperature 1 --min-output-tokens 1500 \\
            --max-output-tokens 1600 --api-key $key >/dev/null 2>&1 &
          until [ "$(running)" != null ]; do :; done
        }
        """,
    ),
    "docs/how-to/monitor.md": Page({"127.0.0.1:10443/metrics": "{metrics_url}"}),
    "docs/how-to/prices.md": Page(
        {"2026-12": "2036-12", "bolt": "prices"}, "weir org create prices >/dev/null\n"
    ),
    "docs/how-to/prove-the-ledger.md": Page(
        setup="""
        export WEIR_DATABASE_URL="{database_url}"
        until_found "SELECT true WHERE NOT EXISTS (TABLE unrated_usage)"
        """,
        has_past_usage=True,
    ),
    "docs/how-to/resell.md": Page(
        {
            "python docs/verify_alert.py": f'"$PYTHON" {DOCS / "verify_alert.py"}',  # one process
            "8400": "$PORT",
            "month=": 'until_found "SELECT true WHERE NOT EXISTS (TABLE unrated_usage)"; month=',
        },
        """
        PORT=$(python -c "import socket; print(socket.create_server(('', 0)).getsockname()[1])")
        """,
    ),
    "docs/how-to/quotas.md": Page(
        {
            "https://hooks.example.com/weir": "{webhook_url}",
            "wk_ynxwt5kt": "$PREFIX",
            "$ weir alerts list": "$ wait_for_alert; weir alerts list",
        },
        OWN_KEY
        + """
        weir quota set tokens-per-month 20 --org acme --alert-at 60 --watch
        weir generate Hello --max-output-tokens 9 --api-key $KEY
        wait_for_alert() { until_found "SELECT alerts.id FROM alerts JOIN organizations
          ON organizations.id = organization_id WHERE name = 'acme'"; }
        """,
    ),
    "docs/how-to/end-users.md": Page(
        setup=WITH_ENVIRONMENT
        + "export WEIR_API_KEY=$(weir key create app --org acme --project search)\n",
    ),
    "docs/how-to/erase-an-end-user.md": Page(
        setup=WITH_ENVIRONMENT
        + """
        export WEIR_API_KEY=$(weir key create app --org acme --project search)
        weir generate Hello --max-output-tokens 4 --end-user alice --label user=alice >/dev/null
        """,
    ),
    "docs/how-to/scale-out.md": Page({"chat": "demo", "node-1": socket.gethostname()}),
    "docs/how-to/stripe.md": Page(
        setup="""
        weir org create bolt >/dev/null
        export WEIR_DATABASE_URL="{database_url}" WEIR_EXPORT=stripe STRIPE_API_KEY=sk_test_0
        """
    ),
    "docs/how-to/tls.md": Page(
        {
            "0.0.0.0:8443": "127.0.0.1:0",
            "weir.internal:8443": "$(address)",
            "weir.internal": "localhost",
        },
        OWN_PROCESS
        + """
        address() { jq -r .address "$WEIR_HOME/serve.json" | sed s/127.0.0.1/localhost/; }
        """,
    ),
    "docs/how-to/verify-receipts.md": Page(
        {"2026-11 ": "{month} ", "trace REQUEST_ID": "trace $ID"},
        """
        eval "$(weir env)"
        export WEIR_API_KEY=$(weir key create one --org acme --project search --scope inference)
        ID=$(weir generate Hello --max-output-tokens 9 --json | jq -r .request_id)
        until_found "SELECT true WHERE NOT EXISTS (TABLE unrated_usage)"
        """,
    ),
    "docs/quickstart.md": Page(shown=("acme", "✓ ", " embedded"), has_organization=False),
    "docs/reference/anthropic.md": Page({"http://127.0.0.1:9443": "{http_url}"}, WITH_ENVIRONMENT),
    "docs/reference/openai.md": Page(
        {"http://127.0.0.1:9443/": "{http_url}"},
        WITH_ENVIRONMENT,
        shown=("chat.completion",),
    ),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A running `weir up`, and the environment of commands that find it."""

    home: Path
    environment: dict[str, str]
    webhook_url: str
    commands: Server

    @property
    def database_url(self) -> str:
        return EmbeddedPostgres(self.home / "postgres", self.home / "postgres").url

    def fill(self, template: str) -> str:
        """Return a text with the values of this server for names in braces."""
        served = json.loads((self.home / "serve.json").read_text())
        url = self.database_url
        values = {
            "home": str(self.home),
            "database_url": url,
            "copied_url": url.replace("/weir?", "/copied?"),
            "new_url": url.replace("/weir?", "/new?"),
            "new_app_url": url.replace("/weir?", "/new?").replace("postgres@", "weir_app:secret@"),
            "http_url": served["openai_url"].removesuffix("v1"),
            "metrics_url": served["metrics_url"],
            "webhook_url": self.webhook_url,
            "month": f"{datetime.now(UTC):%Y-%m}",
        }
        return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), template)

    def run(self, script: str, directory: Path) -> str:
        """Run a script in bash and return the output of both streams. It must succeed."""
        names = f"FORKS='{self.commands.path}' STAGE_URL='{self.database_url}'\n"
        done = subprocess.run(
            ["bash", "-c", names + FUNCTIONS + script],
            env=self.environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


class Hook(BaseHTTPRequestHandler):
    """Receiver of webhooks."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()


@pytest.fixture(scope="module")
def webhook_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/weir"
        server.shutdown()


@pytest.fixture(scope="module")
def stage(webhook_url: str) -> Iterator[Stage]:
    home = new_home()
    (home / "fleet.yaml").write_text(
        f"models:\n  demo: {{directory: {WEIGHTS}, replicas: {{min: 2, max: 2}}}}\n"
        f"  {DEMO_ENCODER_NAME}:\n    engine: encoder\n"
        f"    directory: {bundled_encoders()[DEMO_ENCODER_NAME]}\n"
        "    replicas: {min: 0, max: 1}\n"
    )
    outer = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    environment = outer | {
        "WEIR_HOME": str(home),
        "WEIR_LISTEN": "127.0.0.1:0",
        "WEIR_ENGINE_THREADS": "1",
        "WEIR_ALERT_WEBHOOKS_PRIVATE": "1",
        "NO_COLOR": "1",
        "COLUMNS": COLUMNS,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{binaries()}{os.pathsep}{os.environ['PATH']}",
    }
    with (home / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "weir_cli", "up"],
            env=environment | {"WEIR_FLEET": str(home / "fleet.yaml")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: up.poll() is not None or (home / "connection.json").exists(), "weir up")
        assert up.poll() is None, (home / "up.log").read_text()
        modules = {each.target.partition(":")[0] for each in all_commands().values()}
        commands = Server(
            "api.cli.fsck", "api.cli.stripe", *modules, environment=lambda: environment
        )
        yield Stage(home, environment, webhook_url, commands)
    finally:
        up.terminate()
        up.wait(TIMEOUT_S)
        remove_home(home)


async def use_in_past_months(database_url: str, organization: str, key_prefix: str) -> None:
    """Add usage of the model `copilot` in the past months, at a price of its own."""
    engine = create_engine(database_url)
    async with create_sessions(engine)() as session, session.begin():
        for month in MONTHS:
            await session.execute(text(f"SELECT create_usage_partition('{month:%Y-%m}-01')"))
        key = await find_api_key(session, key_prefix)
        customer = Customer(
            (await find_organization(session, organization)).id, organization, key, ""
        )
        version = (
            await session.scalars(
                insert(PriceVersion)
                .values(
                    model=f"copilot-{organization}",
                    currency_code="USD",
                    effective_at=datetime(2026, 1, 1, tzinfo=UTC),
                    input_picos_per_token=150_000,
                    cached_input_picos_per_token=15_000,
                    output_picos_per_token=600_000,
                )
                .returning(PriceVersion.id)
            )
        ).one()
        used = [
            Consumed(26_917_000, 7_341_776, 3_570_729, "stop", MONTHS[0]),
            Consumed(41_000_003, 1_000, 10_007, "cancelled", MONTHS[1]),
        ]
        await add_usage(session, customer, await get_price(session, version), used)
    await engine.dispose()


def replace(text: str, replaced: Mapping[str, str]) -> str:
    """Return a text with each replacement made."""
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def shape(text: str) -> str:
    """Return a text with numbers, ids and times as one sign, and white space as one blank."""
    for pattern, sign in (
        (r"[0-9a-f]{8}-[0-9a-f-]{27,}|\$\([\w -]+\)", "#"),
        (r"\bwk_\w+|\$PREFIX", "wk"),
        (r"\b[0-9a-f]{12,}…?", "#"),
        (r"-?\d[\d,.:TZ+-]*(?<=[\dZ])( \d\d:\d\d:\d\dZ)?", "#"),
        (r"─+", "─"),
        (r"\s+", " "),
    ):
        text = re.sub(pattern, sign, text)
    return text.strip()


def missing_lines(shown: str, output: str) -> list[str]:
    """Return the lines of a page that an output does not have, in their order."""
    missing, rest = [], shape(output)
    for line in re.sub(r"\n {4,}", " ", shown).splitlines():
        found = re.search(re.escape(shape(line)).replace("…", ".*?"), rest)
        if found is None:
            missing.append(shape(line))
        else:
            rest = rest[found.end() :]
    return missing


def commands_and_outputs(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a transcript with the output that the page shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.replace("\\\n", "").partition("\n")
        yield command, output


def id_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return language and text of the blocks of a page."""
    return [
        (each[2], re.sub(rf"^{each[1]}", "", each[3], flags=re.MULTILINE))
        for each in BLOCK.finditer(page.read_text())
    ]


def blocks_to_run(page: Path) -> list[tuple[str, str]]:
    return [
        (language, block)
        for language, block in blocks_of(page)
        if language in RUN
        and not any(name == id_of(page) and block.startswith(start) for name, start in NOT_RUN)
    ]


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=id_of)
def test_each_block_of_a_page_has_a_known_language(page: Path) -> None:
    languages = [language for language, _ in blocks_of(page)]
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(), re.MULTILINE)

    assert [each for each in languages if each not in (*RUN, *ELSEWHERE, *DRAWN)] == []
    assert len(fences) == 2 * len(languages)


def test_the_list_of_blocks_that_are_not_run_is_exact() -> None:
    found = [
        (id_of(page), block)
        for page in (*PAGES, *OUTSIDE)
        for language, block in blocks_of(page)
        if language in RUN
    ]

    assert [
        (name, start)
        for name, start in NOT_RUN
        if not any(name == page and block.startswith(start) for page, block in found)
    ] == []


def test_a_line_that_a_command_does_not_print_is_found() -> None:
    output = "month    state\n2026-10  closed\n2026-09  open\n"

    assert missing_lines("2026-11  closed\n2025-01 …\n", output) == []
    assert missing_lines("month\n    state\n 1 open\n", output) == []
    assert missing_lines("2026-11  open\n2026-11  closed\n", output) == ["# closed"]
    assert missing_lines("month  stage\n", output) == ["month stage"]


def test_the_reference_has_every_metric_of_a_running_process(stage: Stage) -> None:
    url = json.loads((stage.home / "serve.json").read_text())["metrics_url"]
    # Only if there is a collector.
    sent = [*span_metrics(SpanCounts(0, 0, 0)), export_metrics({})]
    otlp = {each.name for each in sent}
    exported = {
        family.name: {label for sample in family.samples for label in sample.labels}
        for family in asyncio.run(scrape(url)).families
        if family.name.startswith(("weir_", "gen_ai_"))
    }
    listed = {each.name.removesuffix("_total"): {*each.labels, "le"} for each in metric_families()}

    assert exported.keys() == listed.keys() - otlp
    assert [name for name, labels in exported.items() if labels - listed[name]] == []


@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, *OUTSIDE) if blocks_to_run(page)], ids=id_of
)
def test_the_code_of_a_page_runs(page: Path, stage: Stage, tmp_path: Path) -> None:
    prepared = PREPARED.get(id_of(page), Page())
    acme = f"a{(*PAGES, *OUTSIDE).index(page):03}"  # an organization of each page
    replaced = {"acme": acme} | {old: stage.fill(new) for old, new in prepared.replaced.items()}
    for language, block in blocks_of(page):
        if language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", block)):
            (tmp_path / named[1]).write_text(replace(block, replaced))
    if prepared.has_organization:
        stage.run(f"weir org create {acme}; weir project create search --org {acme}", tmp_path)
    if prepared.has_past_usage:
        replaced["copilot"] = f"copilot-{acme}"  # a model of this organization
        made = stage.run(f"weir key create past --org {acme} --project search", tmp_path)
        prefix = re.findall(r"wk_\w{8}", made)[-1]
        asyncio.run(use_in_past_months(stage.database_url, acme, prefix))
    script, program = [replace(stage.fill(prepared.setup), {"acme": acme})], ""
    transcripts: list[tuple[str, str]] = []
    for language, block in blocks_to_run(page):
        block = replace(block, replaced)
        if language == "python":
            program += block
        elif language == "console":
            for command, shown in commands_and_outputs(block):
                script.append(
                    f"\necho '@@{len(transcripts)}'\n{{ {command}\n}} || true\necho '@@'\n"
                )
                transcripts.append((command, shown))
        else:
            script.append(block)
    for module in re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE):
        pytest.importorskip(module)
    if program:
        script.append(f"\npython - <<'END'\n{program}END\n")

    output = stage.run("".join(script), tmp_path)

    assert [each for each in prepared.shown if replace(each, replaced) not in output] == []
    printed = dict(re.findall(r"^@@(\d+)\n(.*?)^@@$", output, re.MULTILINE | re.DOTALL))
    wrong = [
        f"$ {command}\n{printed[str(number)]}\nmissing: {missing}"
        for number, (command, shown) in enumerate(transcripts)
        if (missing := missing_lines(shown, printed[str(number)]))
    ]
    assert wrong == [], "\n".join(wrong)
