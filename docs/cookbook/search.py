"""Find the passages that are closest in meaning to a question."""

import math
import sys
from collections.abc import Sequence

from weir_client import Client

PASSAGES = [
    "Breakfast is served from 7 to 10 on the terrace.",
    "The pool on the roof is heated and open all year.",
    "Dogs are welcome and stay for free.",
    "A shuttle leaves for the airport every hour.",
]


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors: 1 is the same meaning."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


question = " ".join(sys.argv[1:]) or "May I bring my dog?"
with Client() as client:
    index = client.embed("demo-embedding", PASSAGES)  # once; keep the vectors in your database
    [target] = client.embed("demo-embedding", [question]).vectors
ranked = sorted(
    zip(PASSAGES, index.vectors, strict=True),
    key=lambda pair: similarity(target, pair[1]),
    reverse=True,
)
for passage, vector in ranked[:2]:
    print(f"{similarity(target, vector):.2f}  {passage}")
