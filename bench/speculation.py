"""Prompt-lookup speculation on the reference queries of the demo model, one request at a time.

    python -m bench.speculation [--precision bfloat16] [--requests 20] [--temperature 0]
        [--threads N]

Two engine cores in this process, one without drafts, answer each request in turn. Prints steps,
tokens per second after the first token, and whether all outputs are equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

# As in the engine worker: torch's threads would spin on the cores of the decoder.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tokenizers import Tokenizer

from api.core.settings import DEMO_MODEL_NAME, bundled_models
from common.cpus import usable_cpus
from demo.corpus import sized_reference_case
from demo.messages import Message
from demo.tokenization import token_ids_of
from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.engine import GenerationRequest, SamplingParams, StopCriteria, TokensGenerated
from inference.limits import EngineLimits

ANSWER_TOKENS_MAX = 200
FIRST_SEED = 5000


def answer(core: EngineCore, number: int, request: GenerationRequest) -> tuple[list[int], float]:
    """Answer a request. Return the output, and the seconds from its first token to its last."""
    core.add(number, request)
    output: list[int] = []
    first_s = 0.0
    while not core.idle:
        for _, event in core.step():
            if isinstance(event, TokensGenerated):
                output += event.token_ids
                first_s = first_s or time.perf_counter()
    return output, time.perf_counter() - first_s


def main() -> None:
    """Measure both cores and print one line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=usable_cpus().count)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    directory = bundled_models()[DEMO_MODEL_NAME]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(messages: list[Message]) -> list[int]:
        return token_ids_of(tokenizer, messages, generation_prompt=True)

    plain, drafting = (
        EngineCore(
            EngineOptions(
                str(directory),
                EngineLimits(2048),
                arguments.precision,
                draft_token_count_max=count,
            )
        )
        for count in (0, 10)
    )
    seconds, ratios, token_count, is_equal = [0.0, 0.0], [], 0, True
    for number in range(arguments.requests + 1):
        prompt = ids(sized_reference_case(FIRST_SEED + number, lambda it: len(ids(it))).messages(1))
        sampling = SamplingParams(temperature=arguments.temperature, seed=number)
        request = GenerationRequest(tuple(prompt), sampling, StopCriteria(ANSWER_TOKENS_MAX))
        (output, plain_s), (other, drafting_s) = (
            answer(core, number, request) for core in (plain, drafting)
        )
        is_equal &= output == other
        if number == 0:
            before = [core.statistics() for core in (plain, drafting)]
            continue  # warms up
        token_count += len(output)
        ratios.append(plain_s / drafting_s)
        seconds = [seconds[0] + plain_s, seconds[1] + drafting_s]
    after = [core.statistics() for core in (plain, drafting)]
    steps = [now.step_count - then.step_count for now, then in zip(after, before, strict=True)]
    print(
        f"{drafting.kernels}: {arguments.requests} answers of {token_count} tokens,"
        f" {'equal' if is_equal else 'DIFFERENT'}; steps {steps[0]} -> {steps[1]}; tokens/s"
        f" {token_count / seconds[0]:.0f} -> {token_count / seconds[1]:.0f},"
        f" {seconds[0] / seconds[1]:.2f} times; median of answers {statistics.median(ratios):.2f};"
        f" drafts {after[1].draft_token_count}, right {after[1].accepted_token_count}"
    )


if __name__ == "__main__":
    main()
