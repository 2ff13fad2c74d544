"""Score greedy answers on names and listings that training never saw, with Weir's own engine.

`python -m demo.evaluate --model DIR --cases N` prints a table by kind of question, and with `--show
N` some answers of each kind. Many cases run at once: continuous batching does the rest.
"""

import argparse
import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tokenizers import Tokenizer

from bench import engine_streams as streams
from demo.corpus import (
    Case,
    evaluation_case,
    evaluation_follow_up,
    evaluation_small_talk,
    sized_reference_case,
)
from demo.messages import Message
from demo.scoring import Score, score
from demo.tokenization import token_ids_of
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.core.options import ComputeDtype, KvDtype
from inference.engine import (
    EngineFinishReason,
    GenerationRequest,
    SamplingParams,
    SequenceFinished,
    StopCriteria,
    TokensGenerated,
)

ANSWER_TOKENS_MAX = 200
CASES_AT_ONCE = 128  # the engine refuses requests beyond its queue
COLUMNS = ("hotels", "facts", "faithful", "ended", "right")


def build_cases(tokenizer: Tokenizer, case_count: int, first_seed: int) -> list[tuple[str, Case]]:
    """Return questions, and a quarter as many each of follow-ups, small talk, reference prompts."""

    def count_tokens(messages: list[Message]) -> int:
        return len(token_ids_of(tokenizer, messages, generation_prompt=True))

    seeds, fewer = (
        range(first_seed, first_seed + count) for count in (case_count, case_count // 4)
    )
    cases = [(case.turns[0].kind, case) for case in map(evaluation_case, seeds)]
    cases += [("follow-up", case) for case in map(evaluation_follow_up, fewer)]
    cases += [("small talk", case) for case in map(evaluation_small_talk, fewer)]
    cases += [("reference workload", sized_reference_case(seed, count_tokens)) for seed in fewer]
    return cases


async def answer_all(
    settings: TorchEngineSettings, tokenizer: Tokenizer, cases: Sequence[Case]
) -> list[tuple[str, bool]]:
    """Return the answer to each case's last question, and whether it ended by itself."""
    engine = TorchEngine(settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        prompts = [
            token_ids_of(tokenizer, case.messages(len(case.turns)), generation_prompt=True)
            for case in cases
        ]
        places = asyncio.Semaphore(CASES_AT_ONCE)
        answers = await asyncio.gather(*(answer(engine, places, prompt) for prompt in prompts))
        await engine.close()
    return answers


async def answer(
    engine: TorchEngine, places: asyncio.Semaphore, prompt: Sequence[int]
) -> tuple[str, bool]:
    """Return one greedy answer, and whether it ended by itself."""
    request = GenerationRequest(tuple(prompt), SamplingParams(), StopCriteria(ANSWER_TOKENS_MAX))
    text, ended = "", False
    async with places, streams.stream(engine, request) as stream:
        async for event in stream:
            match event:
                case TokensGenerated():
                    text += event.text
                case SequenceFinished():
                    text += event.text
                    ended = event.reason is not EngineFinishReason.LENGTH
                case _:
                    pass
    return text, ended


def print_table(scores: dict[str, list[Score]]) -> None:
    """Print one row per kind of question, in Markdown."""
    print(f"| question | cases | {' | '.join(COLUMNS)} |")
    print(f"|---|---:|{'---:|' * len(COLUMNS)}")
    everything = [mark for marks in scores.values() for mark in marks]
    for kind, marks in [*sorted(scores.items()), ("all", everything)]:
        shares = (sum(getattr(mark, column) for mark in marks) / len(marks) for column in COLUMNS)
        print(f"| {kind} | {len(marks)} | {' | '.join(f'{share:.0%}' for share in shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument(
        "--first-seed",
        type=int,
        default=0,
        help="of the cases; those from 0 on steered the training",
    )
    parser.add_argument(
        "--show", type=int, default=0, help="how many answers of each kind to print"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=get_args(ComputeDtype), default="float32")
    parser.add_argument("--kv", choices=get_args(KvDtype), default="auto")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    cases = build_cases(tokenizer, arguments.cases, arguments.first_seed)
    settings = TorchEngineSettings(
        arguments.model,
        "demo",
        compute_dtype=arguments.precision,
        kv_dtype=arguments.kv,
        torch_thread_count=arguments.threads,
    )
    answers = asyncio.run(answer_all(settings, tokenizer, [case for _, case in cases]))
    scores: dict[str, list[Score]] = defaultdict(list)
    shown: Counter[str] = Counter()
    for (kind, case), (text, ended) in zip(cases, answers, strict=True):
        mark = score(case, text, ended)
        scores[kind].append(mark)
        if shown[kind] < arguments.show:
            shown[kind] += 1
            turn = case.turns[-1]
            print(f"--- {kind}: {turn.question}\n{text}\n{mark}; reference:\n{turn.answer}\n")
    print_table(scores)


if __name__ == "__main__":
    main()
