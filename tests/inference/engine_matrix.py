"""Observes what an engine supports, by the effects on its outputs: a column of the matrix in
`docs/reference/engines.md`.

`WEIR_WRITE_MATRIX=1 pytest tests/inference/test_engine_contract.py -k matrix` writes the columns.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from bench import engine_streams as streams
from inference.adapters.remote_connection import open_dialect
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_examination import Examination
from inference.engine import (
    BeamSearchParams,
    Engine,
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import RequestImpossible
from inference.sequences import RequestField
from infra.architecture import ROOT
from infra.peers import PEERS
from tests.inference.real_servers import STARTS, python_of
from tests.inference.running import Outcome, make_request
from tests.inference.worker_engines import prompt

PAGE = ROOT / "docs" / "reference" / "engines.md"
HEAD = re.compile(r"^\| capability \|.*\n\|[-|]+\n", re.MULTILINE)
# Columns of the page, by engine; servers of tests/remote_servers are compared with the column of
# the real one, if there is one.
COLUMNS = {
    "torch": "torch",
    "simulated": "simulated",
    "tensorrt": "tensorrt",
    "remote-trtllm": "trtllm://",
    "remote-vllm": "vllm://",
    "remote-sglang": "sglang://",
    "remote-openai+http": "openai+http://",
    "vllm-grpc": "vllm://",
    "vllm-http": "openai+http://",
    "smg-vllm": "SMG",
}
SEEN_ON = "seen on"
ON = {
    "torch": "Weir",
    "simulated": "Weir",
    "tensorrt": "stand-in of 1.2.1",
    "remote-trtllm": "test server",
    "remote-sglang": "test server",
}
YES, REFUSED, NO_EFFECT = "yes", "refused", "no effect"
SEEDS = (1, 2, 3)  # of prompts
HOT = SamplingParams(temperature=2.0)
BIAS = 100.0
END = 2  # end token of the checkpoints
Effect = Callable[[Engine], Awaitable[bool]]

SCHEMA = json.dumps({"type": "string", "enum": ["weir"]})


async def ask(engine: Engine, request: GenerationRequest) -> Outcome:
    """Return an output with its log-probabilities."""
    outcome = Outcome()
    async with streams.stream(engine, request) as stream:
        async for event in stream:
            match event:
                case Scheduled():
                    outcome.cached_token_count = event.cached_token_count
                case TokensGenerated():
                    outcome.token_ids += event.token_ids
                    outcome.text += event.text
                    outcome.logprobs += event.logprobs
                case SequenceFinished():
                    outcome.cached_token_count = event.cached_token_count
                    outcome.text += event.text
                    outcome.finished = event
    return outcome


async def outputs(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    """Return the outputs of some prompts."""
    return [
        (await ask(engine, make_request(prompt(seed), 24, sampling=sampling))).token_ids
        for seed in SEEDS
    ]


def leaves_the_likeliest(**limits: Any) -> Effect:
    async def effect(engine: Engine) -> bool:
        greedy = await outputs(engine, SamplingParams())
        limited = await outputs(engine, replace(HOT, **limits))
        return greedy == limited != await outputs(engine, HOT)

    return effect


def changes_greedy_outputs(**penalty: float) -> Effect:
    async def effect(engine: Engine) -> bool:
        penalized = await outputs(engine, SamplingParams(**penalty))  # type: ignore[arg-type]
        return penalized != await outputs(engine, SamplingParams())

    return effect


def makes_text(kind: GrammarKind, source: str, expected: str) -> Effect:
    async def effect(engine: Engine) -> bool:
        form = ResponseFormat(kind, source)
        request = make_request(prompt(1), 40, response_format=form, ignore_eos=False)
        return re.fullmatch(expected, (await ask(engine, request)).text) is not None

    return effect


async def repeats_with_a_seed(engine: Engine) -> bool:
    first, again, other = [await outputs(engine, replace(HOT, seed=seed)) for seed in (7, 7, 8)]
    return first == again != other


async def forces_a_token(engine: Engine) -> bool:
    biased = SamplingParams(logit_bias=((9, BIAS),))
    return set((await outputs(engine, biased))[0]) == {9}


async def reports_log_probabilities(engine: Engine, temperature: float = 0.0) -> bool:
    sampling = SamplingParams(temperature=temperature, top_logprobs=2)
    outcome = await ask(engine, make_request(prompt(1), 5, sampling=sampling))
    return [each.chosen.token_id for each in outcome.logprobs] == outcome.token_ids and all(
        len(each.top) == 2 for each in outcome.logprobs
    )


async def stops_at_a_token(engine: Engine) -> bool:
    [free, *_] = await outputs(engine, SamplingParams())
    request = make_request(prompt(SEEDS[0]), 24, stop_token_ids=frozenset(free[3:4]))
    outcome = await ask(engine, request)
    assert outcome.finished is not None
    return (
        outcome.token_ids == free[: free.index(free[3]) + 1]
        and outcome.finished.reason is EngineFinishReason.STOP
    )


async def runs_past_the_end(engine: Engine) -> bool:
    biased = SamplingParams(logit_bias=((END, BIAS),))
    counts = [
        len(
            (
                await ask(
                    engine, make_request(prompt(1), 5, sampling=biased, ignore_eos=ignore_eos)
                )
            ).token_ids
        )
        for ignore_eos in (True, False)
    ]
    return counts == [5, 1]


async def suppresses_the_end(engine: Engine) -> bool:
    # Greedy outputs ignore the seed, but for the simulation, which would end here by chance.
    biased = SamplingParams(logit_bias=((END, 50.0),), seed=1)
    request = make_request(prompt(1), 12, sampling=biased, ignore_eos=False, min_output_tokens=5)
    return len((await ask(engine, request)).token_ids) == 6


async def searches(engine: Engine) -> bool:
    request = replace(make_request(prompt(1), 5), beam_search=BeamSearchParams(2))
    return len((await ask(engine, request)).token_ids) == 5


EFFECTS: dict[str, Effect] = {
    RequestField.TOP_P: leaves_the_likeliest(top_p=1e-6),
    RequestField.TOP_K: leaves_the_likeliest(top_k=1),
    RequestField.MIN_P: leaves_the_likeliest(min_p=1.0),
    RequestField.SEED: repeats_with_a_seed,
    RequestField.REPETITION_PENALTY: changes_greedy_outputs(repetition_penalty=1.9),
    RequestField.PRESENCE_PENALTY: changes_greedy_outputs(presence_penalty=2.0),
    RequestField.FREQUENCY_PENALTY: changes_greedy_outputs(frequency_penalty=2.0),
    RequestField.LOGIT_BIAS: forces_a_token,
    RequestField.TOP_LOGPROBS: reports_log_probabilities,
    "top_logprobs` with `temperature": lambda engine: reports_log_probabilities(engine, 1.0),
    RequestField.STOP_TOKEN_IDS: stops_at_a_token,
    RequestField.IGNORE_EOS: runs_past_the_end,
    RequestField.MIN_OUTPUT_TOKENS: suppresses_the_end,
    RequestField.JSON_SCHEMA: makes_text(GrammarKind.JSON_SCHEMA, SCHEMA, '"weir"'),
    RequestField.REGEX: makes_text(GrammarKind.REGEX, "[0-9]{3}", "[0-9]{3}"),
    RequestField.LARK: makes_text(GrammarKind.LARK, 'start: "abc"', "abc"),
    RequestField.BEAM_SEARCH: searches,
}


async def seen(engine: Engine, field: str, effect: Effect) -> str:
    """Return what becomes of a request with the field."""
    try:
        return YES if await effect(engine) else NO_EFFECT
    except RequestImpossible as error:
        # The effect of some fields is only visible with a bias.
        if error.field == RequestField.LOGIT_BIAS != field:
            return REFUSED if field in engine.model.capabilities.unsupported else "accepted"
        return REFUSED


async def cached_counts(engine: Engine) -> tuple[list[int], list[int]]:
    """Return the cached tokens of a prompt sent cold, again, and by another tenant: as the server
    counts them, and as billed.
    """
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    head = prompt(uuid.uuid4().int, 400)
    billed = [
        (await ask(engine, make_request(head, 2, cache_salt=salt))).cached_token_count or 0
        for salt in (one, one, other)
    ]
    if not isinstance(engine, RemoteEngine):
        return billed, billed
    async with open_dialect(engine._settings) as dialect:
        examination = Examination(dialect, engine._settings, engine.model, engine._decoder)
        await dialect.probe(engine.model.vocabulary_size)  # which finds the server's path
        probe = examination.probe_prompt()
        counted = [await examination.cached_tokens(probe, salt) for salt in (one, one, other)]
    return counted, billed


async def column_of(engine: Engine) -> dict[str, str]:
    """Return the column of an engine, observed."""
    column = {f"`{name}`": await seen(engine, name, effect) for name, effect in EFFECTS.items()}
    counted, billed = await cached_counts(engine)
    assert counted[0] == counted[2] == 0, f"prefixes are shared: {counted}"
    column["prefix cache"] = "by tenant" if counted[1] else "none"
    column["cached tokens billed as such"] = YES if billed[1] else "no"
    greedy = make_request(prompt(1), 24)
    drawn = make_request(prompt(1), 24, sampling=SamplingParams(presence_penalty=1.0))
    for name, request in (
        ("continues a lost output", greedy),
        ("continues exactly with penalties", drawn),
    ):
        try:
            whole = (await ask(engine, request)).token_ids
            rest = await ask(engine, replace(request, output_token_ids=tuple(whole[:9])))
            column[name] = YES if whole[:9] + rest.token_ids == whole else NO_EFFECT
        except RequestImpossible:
            column[name] = REFUSED
    return column


def seen_on(name: str) -> str | None:
    """Return what an engine of `COLUMNS` is; None for a double of a real one."""
    for peer, server in STARTS:
        if server == name:
            package = PEERS[peer].package
            code = f"import importlib.metadata as m; print(m.version({package!r}))"
            version = subprocess.check_output([python_of(peer), "-c", code], text=True)
            return f"{package} {version.strip()}"
    return ON.get(name)


def page_table() -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns of the page, and its rows by capability."""
    lines = _table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0][1:], {row[0]: row[1:] for row in cells[2:]}


def write(name: str, column: dict[str, str]) -> None:
    """Write a column of the page, a new one at the end."""
    columns, rows = page_table()
    if (head := heading(name)) not in columns:
        columns.append(head)
        rows = {capability: [*cells, "?"] for capability, cells in rows.items()}
    for capability, cell in column.items():
        rows.setdefault(capability, ["?"] * len(columns))[columns.index(head)] = cell
    text = _line(["capability", *columns]) + f"|{'---|' * (len(columns) + 1)}\n"
    text += "".join(_line([capability, *cells]) for capability, cells in rows.items())
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(_table(), text), encoding="utf-8")


def heading(name: str) -> str:
    """Return the heading of an engine's column."""
    return f"`{COLUMNS.get(name, name)}`"


def _table() -> str:
    page = PAGE.read_text(encoding="utf-8")
    head = HEAD.search(page)
    assert head is not None
    return page[head.start() : page.index("\n\n", head.start()) + 1]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
