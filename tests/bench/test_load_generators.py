"""Load generators of other projects: the workload that they are given, and their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.load_generators import GENERATORS, Load, measured
from bench.service import BENCH
from infra import clients
from infra.clients import PAGE, TOKENIZER, Client, ClientFailed, clients_of

LOAD = Load("http://127.0.0.1:1", "wk", "demo", TOKENIZER, agent_count=50, request_count=100)


def quantiles(p50: float, p99: float) -> dict[str, Any]:
    """Return the part of GuideLLM's results for one metric."""
    values = {"mean": p50 + 1, "percentiles": {"p50": p50, "p99": p99}}
    return {"successful": values, "errored": None}


# Results of both, without what is not read
RESULTS: dict[str, Any] = {
    "GuideLLM": {
        "benchmarks": [
            {
                "metrics": {
                    "request_totals": {"successful": 100, "errored": 0, "incomplete": 0},
                    "prompt_token_count": quantiles(1024, 1024),
                    "output_token_count": quantiles(149, 149),
                    "output_tokens_per_second": quantiles(128, 300),
                    "time_to_first_token_ms": quantiles(2135.5, 3982.0),
                    "inter_token_latency_ms": quantiles(52.5, 59.1),
                },
                "requests": {"successful": [], "errored": []},
            }
        ]
    },
    "AIPerf": {
        "request_count": {"unit": "requests", "avg": 100.0},
        "usage_prompt_tokens": {"avg": 1025.0},
        "usage_completion_tokens": {"avg": 150.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 129.0},
        "time_to_first_token": {"p50": 2135.5, "p99": 3982.0},
        "inter_token_latency": {"p50": 52.5, "p99": 59.1},
        "error_summary": [],
    },
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_gets_the_reference_workload_and_no_switch_for_this_server(name: str) -> None:
    """The user message fills the prompt of 1,025 tokens; the chat template has six."""
    line = " ".join(GENERATORS[name].arguments(LOAD))

    assert LOAD.user_tokens == 1025 - 200 - 6
    for number in ("200", "819", "150", "50", "100"):
        assert number in line
    assert "validate" not in line
    assert "request_format" not in line


@pytest.mark.parametrize("name", GENERATORS)
def test_the_figures_are_those_that_the_generator_reports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CACHE", tmp_path)
    [client] = [each for each in clients_of(PAGE.read_text()) if each.name == name]
    install_program(client, RESULTS[name])

    assert measured(name, client, LOAD) == {
        "request_count": 100,
        "input_tokens": 1025,
        "output_tokens": 150,
        "tokens_per_s": 129,
        "ttft_p50_ms": 2135.5,
        "ttft_p99_ms": 3982.0,
        "gap_p50_ms": 52.5,
        "gap_p99_ms": 59.1,
    }
    assert measured(name, client, LOAD).keys() <= BENCH.figures.keys()


@pytest.mark.parametrize(
    ("name", "results"),
    [
        (
            "GuideLLM",
            {
                "benchmarks": [
                    RESULTS["GuideLLM"]["benchmarks"][0]
                    | {"requests": {"errored": [{"info": {"error": "400 Bad Request"}}]}}
                ]
            },
        ),
        (
            "AIPerf",
            RESULTS["AIPerf"] | {"error_summary": [{"error_details": {"code": 400}, "count": 1}]},
        ),
    ],
)
def test_a_failed_request_fails_the_run(name: str, results: Any) -> None:
    with pytest.raises(ClientFailed, match="400"):
        GENERATORS[name].read(results)


def install_program(client: Client, results: Any) -> None:
    """Install a program that writes these results where the generator writes its own."""
    generator = GENERATORS[client.name]
    program = client.folder / "bin" / generator.program
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\ncat > {generator.results} <<'END'\n{json.dumps(results)}\nEND\n"
    )
    program.chmod(0o755)
