"""The bundled encoder: its vectors find what belongs together, better than equal words do."""

from pathlib import Path

import pytest

import inference.demo_model
from demo.train_encoder import Pair, bag_of_words_scores, evaluation_pairs, right_share
from inference.encoder.worker import LoadEncoder, load_network
from inference.text.tokenizer import Tokenizer

ENCODER = Path(inference.demo_model.__file__).parent / "encoder"
PAIRS = evaluation_pairs(seed=1)


def scores(pairs: list[Pair]) -> list[list[float]]:
    """Return the cosine of each first and each second text, computed as Weir serves it."""
    network = load_network(LoadEncoder(str(ENCODER), "float32", "cpu", 1), lambda *_: None)
    tokenizer = Tokenizer(ENCODER)
    firsts, seconds = (
        network.embed([tokenizer.encode(text) for text in texts])
        for texts in zip(*pairs, strict=True)
    )
    rows: list[list[float]] = (firsts @ seconds.T).tolist()
    return rows


@pytest.mark.parametrize("kind", PAIRS)
def test_the_nearest_text_is_the_right_one(kind: str) -> None:
    pairs = PAIRS[kind]

    assert right_share(scores(pairs)) > max(0.7, right_share(bag_of_words_scores(pairs)))


def test_vectors_distinguish_meanings() -> None:
    pairs = [
        ("A cat sits on the mat.", "A kitten rests on a rug."),
        ("Are pets allowed at Villa Oduvane?", "Can I bring my dog to Villa Oduvane?"),
    ]

    assert right_share(scores(pairs)) == 1.0


def test_the_files_are_small() -> None:
    assert sum(each.stat().st_size for each in ENCODER.rglob("*") if each.is_file()) < 2_000_000
