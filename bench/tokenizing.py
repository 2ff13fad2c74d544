"""Time of encoding a prompt word by word with a cache, beside the library's own encoding.

    python -m bench.tokenizing [--model DIRECTORY] [--seconds 2]

Prompts are different parts of the pages in `docs/`, without characters beyond ASCII, which are left
to the library. "first" is the first prompt of a new process, with an empty cache.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from api.core.settings import bundled_models
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=next(iter(bundled_models().values())))
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="per figure (default: %(default)s)"
    )
    options = parser.parse_args()
    backend = Tokenizer(options.model).backend
    pages = "\n".join(path.read_text() for path in sorted(Path("docs").rglob("*.md")))
    text = pages.encode("ascii", "ignore").decode()
    chosen = random.Random(0)
    print(f"{'characters':>10} {'library µs':>11} {'words µs':>9} {'ratio':>6} {'first µs':>9}")
    for chars in PROMPT_CHARS:
        begins = [chosen.randrange(len(text) - chars) for _ in range(PROMPT_COUNT)]
        prompts = [text[begin : begin + chars] for begin in begins]
        words, began_at = WordCache(backend), time.perf_counter()
        words.encode(prompts[0], add_special_tokens=True)
        first_us = (time.perf_counter() - began_at) * 1e6
        whole_us = time_us(
            lambda prompt: backend.encode_batch_fast([prompt])[0].ids, prompts, options.seconds
        )
        words_us = time_us(partial(words.encode, add_special_tokens=True), prompts, options.seconds)
        print(
            f"{chars:>10,} {whole_us:>11.0f} {words_us:>9.0f} {whole_us / words_us:>5.1f}x"
            f" {first_us:>9.0f}"
        )


if __name__ == "__main__":
    main()
