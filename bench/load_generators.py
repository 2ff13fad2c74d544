"""Reference workload from GuideLLM and AIPerf over HTTP, with the figures that they report.

`docs/reference/clients.md` says how they are installed; `infra/clients.py` installs them. Prompts
are the generators' own text of the workload's sizes: a system prompt that all share, and a user
message of its own in each request.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.cli.demo import OUTPUT_TOKENS
from demo.corpus import REFERENCE_PROMPT_TOKENS
from inference.text.tokenizer import ChatMessage, Tokenizer
from infra.clients import PAGE, Client, ClientFailed, clients_of, install, run

SYSTEM_TOKENS = 200  # of the prompt; the same for all
RUN_MAX_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """Server with its model and key, the number of concurrent agents, and that of all requests."""

    url: str
    api_key: str
    model: str
    directory: Path
    agent_count: int
    request_count: int

    @property
    def user_tokens(self) -> int:
        """Tokens of the user message: those of the prompt, less system prompt and template."""
        empty = [ChatMessage("system", ""), ChatMessage("user", "")]
        template_tokens = len(Tokenizer(self.directory).encode_chat(empty))
        return REFERENCE_PROMPT_TOKENS - SYSTEM_TOKENS - template_tokens


# Figures of one run, by those of `bench.service`. Token counts are means per request; times between
# tokens are averaged over each request.
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Generator:
    """Load generator: arguments of its program, the file of its results, and their meaning."""

    program: str
    arguments: Callable[[Load], Sequence[str]]
    results: str
    read: Callable[[Any], Figures]


def guidellm_arguments(load: Load) -> Sequence[str]:
    """Build the arguments of `guidellm` for the workload, with its defaults for everything else."""
    data = {
        "kind": "synthetic_text",
        "prompt_tokens": load.user_tokens,
        "output_tokens": OUTPUT_TOKENS,
        "prefix_buckets": [{"prefix_tokens": SYSTEM_TOKENS}],
    }
    return (
        "run",
        *("--backend", f"kind=openai_http,target={load.url},api_key={load.api_key}"),
        *("--profile", f"kind=concurrent,streams={load.agent_count}"),
        *("--constraint", f"kind=max_requests,count={load.request_count}"),
        *("--data", json.dumps(data)),
        *("--tokenizer", f"kind=hf_auto,model={load.directory}"),
    )


def guidellm_figures(results: Any) -> Figures:
    """Read the figures in GuideLLM's `benchmarks.json`. Raises: ClientFailed."""
    [benchmark] = results["benchmarks"]
    metrics = benchmark["metrics"]
    if failed := benchmark["requests"]["errored"]:
        raise ClientFailed(
            f"{len(failed)} requests failed, the first: {failed[0]['info']['error']}"
        )

    def of(name: str) -> Any:
        return metrics[name]["successful"]

    return {
        "request_count": metrics["request_totals"]["successful"],
        "input_tokens": of("prompt_token_count")["mean"],
        "output_tokens": of("output_token_count")["mean"],
        "tokens_per_s": of("output_tokens_per_second")["mean"],
        **{
            f"{key}_{share}_ms": of(name)["percentiles"][share]
            for key, name in {
                "ttft": "time_to_first_token_ms",
                "gap": "inter_token_latency_ms",
            }.items()
            for share in ("p50", "p99")
        },
    }


def aiperf_arguments(load: Load) -> Sequence[str]:
    """Build the arguments of `aiperf`. Unlike GuideLLM, it lets answers end early."""
    return (
        "profile",
        *("--model", load.model, "--url", load.url, "--api-key", load.api_key),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(load.directory)),
        *("--concurrency", str(load.agent_count), "--request-count", str(load.request_count)),
        *("--num-dataset-entries", str(load.request_count)),
        *("--shared-system-prompt-length", str(SYSTEM_TOKENS), "--isl", str(load.user_tokens)),
        *("--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true", "--ui-type", "none"),
        *("--artifact-dir", "."),
    )


def aiperf_figures(results: Any) -> Figures:
    """Read the figures in AIPerf's `profile_export_aiperf.json`. Raises: ClientFailed.

    Tokens are counted by the server.
    """
    if failed := results["error_summary"]:
        raise ClientFailed(f"requests failed: {failed}")

    return {
        "request_count": int(results["request_count"]["avg"]),
        "input_tokens": results["usage_prompt_tokens"]["avg"],
        "output_tokens": results["usage_completion_tokens"]["avg"],
        "tokens_per_s": results["output_token_throughput"]["avg"],
        **{
            f"{key}_{share}_ms": results[name][share]
            for key, name in {"ttft": "time_to_first_token", "gap": "inter_token_latency"}.items()
            for share in ("p50", "p99")
        },
    }


GENERATORS: Mapping[str, Generator] = {
    "GuideLLM": Generator("guidellm", guidellm_arguments, "benchmarks.json", guidellm_figures),
    "AIPerf": Generator("aiperf", aiperf_arguments, "profile_export_aiperf.json", aiperf_figures),
}


def installed() -> dict[str, Client]:
    """Install the load generators unless they are installed. Raises: ClientFailed."""
    clients = {each.name: each for each in clients_of(PAGE.read_text(encoding="utf-8"))}
    for name in GENERATORS:
        print(f"{name} {install(clients[name], os.environ)}", flush=True)
    return {name: clients[name] for name in GENERATORS}


def measured(name: str, client: Client, load: Load) -> Figures:
    """Run a load generator and return its figures. Blocks. Raises: ClientFailed."""
    generator = GENERATORS[name]
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        program = client.folder / "bin" / generator.program
        run([program, *generator.arguments(load)], Path(folder), os.environ, RUN_MAX_S)
        return generator.read(json.loads(Path(folder, generator.results).read_text()))
