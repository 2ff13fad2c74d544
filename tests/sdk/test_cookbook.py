"""Programs of the cookbook: each runs, as its page shows it, against a server with `weir up`'s
models.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from weir_client import Client

from api.core.settings import bundled_encoders, bundled_models
from infra import typescript_sdk
from infra.reference import COOKBOOK
from metering.core.models import QuotaDimension
from tests.conftest import new_database
from tests.service import Service, running, wait_for

ANSWER_S = 120.0  # of a program on a busy machine
STORY_TOKENS = 400  # of `resume.py`


def run(name: str, environment: dict[str, str], *arguments: str, stdin: str = "") -> str:
    """Run a program to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, COOKBOOK / name, *arguments],
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield a server with the models of `weir up`."""
    [(name, weights)] = bundled_models().items()
    with new_database(postgres_server, template=template_database) as url:
        service = Service(
            tmp_path_factory.mktemp("cookbook"),
            url,
            weights,
            models={name: weights},
            encoders=bundled_encoders(),
        )
        with running(service):
            yield service


@pytest.fixture(scope="module")
def environment(demo: Service) -> dict[str, str]:
    """Return the environment that `weir env` prints."""
    tenant, admin = asyncio.run(demo.tenant()), asyncio.run(demo.tenant(scopes=("admin",)))
    return os.environ | {
        "WEIR_ADDRESS": demo.address,
        "WEIR_API_KEY": tenant.secret,
        "WEIR_ADMIN_KEY": admin.secret,
    }


def test_every_program_has_a_test() -> None:
    names = {path.name for path in COOKBOOK.iterdir() if path.suffix != ".md" and path.is_file()}

    assert len(names) == 10
    assert [name for name in names if name.split(".")[0] not in Path(__file__).read_text()] == []


def test_chat_remembers_the_conversation(environment: dict[str, str]) -> None:
    output = run("chat.py", environment, stdin="Which hotel has a pool?\nIs it cheap?\n\n")

    first, second = re.findall(r"\((\d+) tokens, 0\.\d+ USD\)", output)
    assert int(first) > 0
    assert int(second) > 0


def test_an_agent_calls_a_tool_and_answers(environment: dict[str, str]) -> None:
    call, answer = run("agent.py", environment).split("\n", 1)

    assert re.fullmatch(r"get_weather\(\{'city': '.+'\}\)", call)
    assert answer.strip()


def test_a_record_is_extracted(environment: dict[str, str]) -> None:
    output = run("extraction.py", environment)

    assert re.fullmatch(r"Stay\(hotel='.*', city='.*', nights=\d+, mood='\w+'\)\n", output)


def test_the_closest_passage_is_first(environment: dict[str, str]) -> None:
    output = run("search.py", environment)

    assert output.splitlines()[0].endswith("Dogs are welcome and stay for free.")


@pytest.mark.parametrize(("budget", "is_enough"), [("5.00", True), ("0.000001", False)])
def test_a_user_spends_no_more_than_its_budget(
    budget: str, is_enough: bool, environment: dict[str, str]
) -> None:
    output = run("budget.py", environment, budget)

    assert ("Your budget is used up. It starts again at 01 " in output) is not is_enough
    assert f" of {budget} USD are left" in output


def test_a_killed_program_goes_on_with_its_answer(
    demo: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    state = tmp_path / "story.json"
    command = [sys.executable, str(COOKBOOK / "resume.py"), str(state)]
    crashing = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert crashing.stdout is not None
    begun = crashing.stdout.read(20)
    crashing.send_signal(signal.SIGSTOP)  # so that the rest is not received
    crashing.kill()
    begun += crashing.communicate()[0]
    request_id = json.loads(state.read_text())["request_id"]

    rest = run("resume.py", environment, str(state))

    with Client(environment["WEIR_ADDRESS"], environment["WEIR_API_KEY"]) as client:
        story = client.attach(request_id).wait().text
    [event] = demo.database.rows("SELECT * FROM usage_events WHERE request_id = %s", request_id)
    assert story.encode().startswith(begun)
    assert story.endswith(rest)
    assert len(begun) + len(rest.encode()) >= len(story.encode()) > len(begun)
    assert not state.exists()
    assert event["delivered_token_count"] == event["billed_token_count"] <= STORY_TOKENS


def test_fastapi_streams_answers_and_refusals(
    demo: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    limited = asyncio.run(demo.tenant({QuotaDimension.REQUESTS_PER_WEEK: 1}))
    log = tmp_path / "uvicorn.log"
    command = [sys.executable, "-m", "uvicorn", "--port", "0", "fastapi_server:app"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            cwd=COOKBOOK,
            env=environment | {"WEIR_API_KEY": limited.secret},
            stdout=output,
            stderr=output,
        )
    try:
        found = wait_for(
            lambda: server.poll() or re.search(r"http://127.0.0.1:\d+", log.read_text()), "uvicorn"
        )
        assert isinstance(found, re.Match), log.read_text()
        with post(f"{found[0]}/ask", {"text": "Which hotel has a pool?"}) as answer:
            text = answer.read().decode()
        with pytest.raises(HTTPError) as refused:
            post(f"{found[0]}/ask", {"text": "Which hotel has a pool?"})
    finally:
        server.terminate()
        server.wait(ANSWER_S)

    assert text
    assert refused.value.code == 429
    assert 1 <= int(refused.value.headers["retry-after"]) <= 7 * 24 * 3600 + 61
    assert json.load(refused.value)["reason"] == "QUOTA_EXCEEDED"


def post(url: str, body: dict[str, str]) -> Any:
    """Send a body as JSON; return the open response."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def test_nextjs_streams_answers_and_refusals(
    built: Path, demo: Service, environment: dict[str, str]
) -> None:
    """A route handler takes a `Request` and returns a `Response`, both of which Node.js has."""
    limited = asyncio.run(demo.tenant({QuotaDimension.REQUESTS_PER_WEEK: 1}))
    directory = built / "cookbook"
    directory.mkdir(exist_ok=True)
    route = directory / "route.ts"
    route.write_text((COOKBOOK / "nextjs_route.ts").read_text())
    script = """
        import { POST } from "./route.js";
        const ask = (signal) => POST(new Request("http://localhost/api/ask", {
          method: "POST", body: JSON.stringify({ question: "Which hotel has a pool?" }), signal,
        }));
        for (const response of [await ask(), await ask()])
          console.log(JSON.stringify([
            response.status, response.headers.get("retry-after"), await response.text(),
          ]));
        await globalThis.weir.close();
    """
    # Types of the libraries are checked with the examples of the README.
    flags = (
        "--strict --noUncheckedIndexedAccess --exactOptionalPropertyTypes --skipLibCheck"
        " --target es2022"
    )
    tsc = [str(typescript_sdk.SDK / "node_modules" / ".bin" / "tsc"), *flags.split()]

    compiled = subprocess.run(
        [
            *tsc,
            "--lib",
            "es2023,dom,dom.iterable,esnext.disposable",
            "--module",
            "nodenext",
            str(route),
        ],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stdout
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", script],
        cwd=directory,
        env=environment | {"WEIR_API_KEY": limited.secret},
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
    )

    assert done.returncode == 0, done.stderr
    [answer, refusal] = map(json.loads, done.stdout.splitlines())
    assert answer[:2] == [200, None]
    assert answer[2]
    assert refusal[0] == 429
    assert 1 <= int(refusal[1]) <= 7 * 24 * 3600 + 61
    assert json.loads(refusal[2])["reason"] == "QUOTA_EXCEEDED"


def test_a_celery_task_that_runs_twice_is_billed_once(
    demo: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    request_id, log = str(uuid.uuid4()), tmp_path / "celery.log"
    environment = environment | {
        "CELERY_BROKER_URL": f"sqla+sqlite:///{tmp_path / 'broker.db'}",
        "CELERY_RESULT_BACKEND": f"db+sqlite:///{tmp_path / 'results.db'}",
        "PYTHONPATH": str(COOKBOOK),
    }
    deliver = """
import json, sys
from celery_task import summarize
results = [
    summarize.apply_async(["A hotel with a pool."], task_id=sys.argv[1]) for _ in range(2)
]
print(json.dumps(results[0].get(timeout=100)))
"""
    command = [sys.executable, "-m", "celery", "-A", "celery_task", "worker", "--pool", "solo"]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [*command, "--loglevel", "info"], env=environment, stdout=output, stderr=output
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", deliver, request_id],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
        assert done.returncode == 0, done.stderr + log.read_text()
        wait_for(lambda: log.read_text().count(" succeeded in ") == 2, "the second delivery")
    finally:
        worker.terminate()
        worker.wait(ANSWER_S)

    [event] = demo.database.rows("SELECT * FROM usage_events WHERE request_id = %s", request_id)
    assert event["billed_token_count"] > 0
    result = json.loads(done.stdout)
    assert result["text"]
    assert log.read_text().count(result["text"][:20]) == 2


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WEIR_ADDRESS", "WEIR_API_KEY"):
        monkeypatch.setenv(name, environment[name])
    namespace: dict[str, Any] = {}
    for cell in json.loads((COOKBOOK / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)

    assert re.search(r"^0\.\d{8} USD$", capsys.readouterr().out, re.M)
