"""Examples in the documentation of the clients: each runs as printed against a server.

An example that does not open a client gets one as `client`. Names of models are replaced by those
of the tests.
"""

from __future__ import annotations

import asyncio
import doctest
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import weir_client

from infra import typescript_sdk
from tests.sdk.conftest import ENCODER, TOOL_MODEL
from tests.service import MODEL, Service

PYTHON_README = typescript_sdk.SDK.parent / "python" / "README.md"
TYPESCRIPT_README = typescript_sdk.SDK / "README.md"
TYPESCRIPT_PRELUDE = """import { WeirClient } from "@weir/client";
await using client = new WeirClient();
const hotels = ["Sea View", "Old Mill"];
"""
TYPESCRIPT_ANSWER_S = 120  # of node, for all examples


def examples(readme: Path, language: str) -> list[tuple[int, str]]:
    """Return the blocks of a language with their first lines."""
    text = readme.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text[: each.start(1)].count("\n") + 1, with_test_models(each[1])) for each in found]


def with_test_models(text: str) -> str:
    """Return an example with the models of the tests."""
    return (
        text.replace('"demo"', f'"{MODEL}"')
        .replace('"minilm"', f'"{ENCODER}"')
        .replace('"qwen"', f'"{TOOL_MODEL}"')
    )


@pytest.fixture(scope="module")
def keys(service: Service) -> dict[str, str]:
    """Return the environment of a developer."""
    tenant, admin = asyncio.run(service.tenant()), asyncio.run(service.tenant(scopes=("admin",)))
    return {
        "WEIR_ADDRESS": service.address,
        "WEIR_API_KEY": tenant.secret,
        "WEIR_ADMIN_KEY": admin.secret,
    }


@pytest.fixture
def client(keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[weir_client.Client]:
    """Open a client in that environment."""
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    with weir_client.Client() as client:
        yield client


@pytest.mark.parametrize(
    ("line", "source"),
    examples(PYTHON_README, "python"),
    ids=lambda value: str(value).split("\n")[0][:40],
)
def test_an_example_of_the_python_readme_runs(
    line: int, source: str, client: weir_client.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(
        compile("\n" * (line - 1) + source, str(PYTHON_README), "exec"),
        {"client": client, "__name__": "example"},
    )

    assert "print" not in source or capsys.readouterr().out.strip()


def docstrings() -> list[doctest.DocTest]:
    """Return all public docstrings with examples."""
    finder = doctest.DocTestFinder()
    public = [getattr(weir_client, name) for name in weir_client.__all__]
    ours = [each for each in public if getattr(each, "__module__", "").startswith("weir_client")]
    return [found for each in ours for found in finder.find(each) if found.examples]


def test_the_examples_of_docstrings_are_true(client: weir_client.Client) -> None:
    tests = docstrings()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    message: list[str] = []

    for test in tests:
        for example in test.examples:
            example.source = with_test_models(example.source)
        test.globs = {**vars(weir_client), "client": client}
        runner.run(test, out=message.append)

    assert len(tests) >= 5
    assert not runner.failures, "".join(message)


def test_the_examples_of_the_readme_compile_and_run(built: Path, keys: dict[str, str]) -> None:
    directory = built / "examples"
    directory.mkdir(exist_ok=True)  # the build is kept while nothing changes
    sources = [
        source if "new WeirClient" in source else TYPESCRIPT_PRELUDE + source
        for _, source in examples(TYPESCRIPT_README, "ts")
    ]
    for number, source in enumerate(sources):
        (directory / f"example{number}.ts").write_text(source)
    strict = [
        "--strict",
        "--noUncheckedIndexedAccess",
        "--exactOptionalPropertyTypes",
        "--skipLibCheck",
        "false",
    ]
    target = [
        "--target",
        "es2022",
        "--lib",
        "es2023,esnext.disposable",
        "--module",
        "nodenext",
        "--types",
        "node",
    ]
    files = sorted(directory.glob("*.ts"))

    tsc = subprocess.run(
        [typescript_sdk.SDK / "node_modules" / ".bin" / "tsc", *strict, *target, *files],
        capture_output=True,
        text=True,
        cwd=directory,
    )
    assert tsc.returncode == 0, tsc.stdout
    for file in files:
        environment = {**os.environ, **keys}
        node = ["node", str(file.with_suffix(".js"))]
        done = subprocess.run(
            node, env=environment, capture_output=True, text=True, timeout=TYPESCRIPT_ANSWER_S
        )
        assert done.returncode == 0, f"{file.read_text()}\n{done.stderr}"
        assert done.stdout.strip() or "console.log" not in file.read_text()
    assert len(files) >= 4
