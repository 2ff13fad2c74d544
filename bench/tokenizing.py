"""Time of encoding a prompt word by word with a cache, beside the library's own encoding.

    python -m bench.tokenizing [--model DIRECTORY] [--seconds 2]

Prompts are different parts of the pages in `docs/`, without characters beyond ASCII, which are left
to the library. The first one is that of a new process, with an empty cache.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from api.core.settings import bundled_models
from bench.harness import ROOT, Bench, Case, Cases, Figure, Values, main
from inference.text.tokenizer import Tokenizer
from inference.text.word_cache import WordCache

PROMPT_CHARS = (150, 4500)  # a question; the 1,025 tokens of the reference workload
PROMPT_COUNT = 200


def time_us(encode: Callable[[str], object], prompts: Sequence[str], seconds: float) -> float:
    """Measure the mean time to encode a prompt, in µs."""
    count, began_at = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_at) < seconds:
        for prompt in prompts:
            encode(prompt)
        count += len(prompts)
    return elapsed_s / count * 1e6


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Draw the prompts, and yield a case for each length."""
    backend = Tokenizer(options.model).backend
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    text = pages.encode("ascii", "ignore").decode()
    chosen = random.Random(0)

    def case(chars: int) -> Case:
        begins = [chosen.randrange(len(text) - chars) for _ in range(PROMPT_COUNT)]
        prompts = [text[begin : begin + chars] for begin in begins]

        def whole() -> Values:
            encode = backend.encode_batch_fast
            return {"us": time_us(lambda prompt: encode([prompt])[0].ids, prompts, options.seconds)}

        def by_words() -> Values:
            words, began_at = WordCache(backend), time.perf_counter()
            words.encode(prompts[0], add_special_tokens=True)
            first_us = (time.perf_counter() - began_at) * 1e6
            encode = partial(words.encode, add_special_tokens=True)
            return {"us": time_us(encode, prompts, options.seconds), "first_us": first_us}

        return Case(f"{chars:,} characters", {"library": whole, "by words": by_words})

    yield [case(chars) for chars in PROMPT_CHARS]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    parser.add_argument("--model", type=Path, default=next(iter(bundled_models().values())))
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="per figure (default: %(default)s)"
    )


FIGURES = {"us": Figure("a prompt, µs"), "first_us": Figure("the first one, µs")}
BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
