"""Training of the demo encoder: `python -m demo.train_encoder --out DIR`.

A small BERT learns by contrast: a question belongs to the sentence that answers it, a wish to the
hotel that fulfils it, and a sentence to the same one in other words. The other texts of a batch are
the wrong answers, most of them about the same hotel or the same subject. At the end it prints how
often the nearest text is the right one, beside a bag of words on the same texts.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import BertConfig, BertModel

from demo import answers, phrases
from demo import vocabulary as words
from demo.hotels import Hotel, Split, draw_hotels

Pair = tuple[str, str]  # two texts that belong together
VOCAB_SIZE, WIDTH, POSITION_COUNT = 2048, 128, 512
STEPS, RATE, WARMUP_STEPS = 800, 1.5e-3, 100
TEMPERATURE = 0.05
PAD = "<|pad|>"
# Words that mean nearly the same, for texts about other things than hotels.
SYNONYMS = (
    ("cat", "kitten"), ("dog", "puppy"), ("car", "automobile"), ("film", "movie"),
    ("doctor", "physician"), ("house", "home"), ("child", "kid"), ("street", "road"),
    ("mat", "rug"), ("sofa", "couch"), ("shop", "store"), ("boat", "ship"), ("stone", "rock"),
    ("present", "gift"), ("job", "work"), ("error", "mistake"), ("picture", "image"),
    ("bicycle", "bike"), ("phone", "telephone"), ("flat", "apartment"),
)  # fmt: skip
VERBS = (
    ("sits on", "rests on"), ("buys", "purchases"), ("sees", "notices"),
    ("begins with", "starts with"), ("likes", "enjoys"), ("repairs", "fixes"),
    ("needs", "requires"), ("is beside", "is next to"), ("looks for", "searches for"),
    ("gets", "receives"),
)  # fmt: skip


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn a byte-level vocabulary of lower-case texts from drawn pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = Random(f"encoder tokenizer {seed}")
    pairs = (pair for _ in range(200) for pair in draw_batch(rng))
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return tokenizer


def questions_and_answers(
    rng: Random, hotels: Sequence[Hotel], attributes: Sequence[str]
) -> list[Pair]:
    """Return a question about each attribute of each hotel, and the sentence that answers it."""
    return [
        (
            phrases.ask_attribute(rng, hotel.name, attribute),
            answers.attribute(hotel, attribute)[0].replace(hotel.label, hotel.name),
        )
        for hotel in hotels
        for attribute in attributes
    ]


def _hotels(rng: Random, count: int, split: Split) -> list[Hotel]:
    """Draw hotels of many cities."""
    return [draw_hotels(rng, 1, split)[0] for _ in range(count)]


def wishes_and_hotels(rng: Random, hotels: Sequence[Hotel]) -> list[Pair]:
    """Return a wish for a city and an amenity, and a hotel that has it; no wish occurs twice."""
    pairs = {}
    for hotel in hotels:
        wish = f"with {words.AMENITIES[rng.choice(hotel.amenities)]} in {hotel.city}"
        question = phrases.ask_recommend(rng, wish, None)
        pairs[wish] = (rng.choice((question, f"hotel {wish}")), hotel.listing().partition("] ")[2])
    return list(pairs.values())


def same_in_other_words(rng: Random, count: int) -> list[Pair]:
    """Return sentences, each with synonyms in the place of its words."""
    pairs = []
    for _ in range(count):
        subject, thing = (
            rng.choice((rng.choice(SYNONYMS), (rng.choice(pool),) * 2))
            for pool in ((*words.FIRST_NAMES, *words.THINGS), words.THINGS)
        )
        verb = rng.choice(VERBS)
        article = rng.choice((("the", "the"), ("a", "the"), ("a", "a")))
        pairs.append(
            tuple(
                f"The {subject[i]} {verb[i]} {article[i]} {thing[i]}."
                for i in rng.sample((0, 1), 2)
            )
        )
    return [(one, other) for one, other in pairs]


def draw_batch(rng: Random) -> list[Pair]:
    """Draw pairs whose first texts are hard to tell apart by their words."""
    kind = rng.random()
    if kind < 0.6:
        attributes = rng.sample(phrases.ATTRIBUTES, 6)
        return questions_and_answers(rng, _hotels(rng, 10, Split.TRAIN), attributes)
    if kind < 0.8:
        return wishes_and_hotels(rng, _hotels(rng, 32, Split.TRAIN))
    return same_in_other_words(rng, 48)


class Encoder(torch.nn.Module):
    """BERT with the mean of its token vectors, normalized."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        config = BertConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=POSITION_COUNT,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=tokenizer.token_to_id(PAD),
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Return vectors (texts, WIDTH) of length 1."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        length = max(map(len, ids))
        token_ids = torch.tensor([each + [0] * (length - len(each)) for each in ids])
        mask = torch.tensor([[1] * len(each) + [0] * (length - len(each)) for each in ids])
        hidden = self.bert(input_ids=token_ids, attention_mask=mask).last_hidden_state
        return F.normalize((hidden * mask[..., None]).sum(1), dim=-1)


def contrast(encoder: Encoder, pairs: Sequence[Pair]) -> Tensor:
    """Compute the loss of choosing the partner of each text among those of the batch."""
    firsts, seconds = (encoder([pair[i] for pair in pairs]) for i in (0, 1))
    scores = firsts @ seconds.T / TEMPERATURE
    right = torch.arange(len(pairs))
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def train(encoder: Encoder, rng: Random, steps: int) -> None:
    """Run the steps, printing the loss of every hundred."""
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=RATE, weight_decay=0.01)
    recent: list[float] = []
    started = time.monotonic()
    for step in range(steps):
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * (
            0.51 + 0.49 * math.cos(math.pi * step / steps)
        )
        optimizer.param_groups[0]["lr"] = RATE * factor
        loss = contrast(encoder, draw_batch(rng))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if len(recent) == 100:
            elapsed_s = time.monotonic() - started
            print(f"step {step + 1}  loss {sum(recent) / 100:.3f}  {elapsed_s:.0f} s", flush=True)
            recent.clear()


def evaluation_pairs(seed: int) -> dict[str, list[Pair]]:
    """Return pairs by kind, about hotels that training never saw."""
    rng = Random(f"encoder evaluation {seed}")
    hotels = _hotels(rng, 40, Split.EVAL)
    return {
        "question and answer": questions_and_answers(rng, hotels, phrases.ATTRIBUTES),
        "wish and hotel": wishes_and_hotels(rng, hotels),
        "same in other words": list(dict(same_in_other_words(rng, 200)).items()),
    }


def right_share(scores: Sequence[Sequence[float]]) -> float:
    """Return the share of rows whose largest score is on the diagonal."""
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    return sum(index == row for row, index in enumerate(best)) / len(best)


def bag_of_words_scores(pairs: Sequence[Pair]) -> list[list[float]]:
    """Return the cosine of words, the rarer the heavier, of each first and each second text."""
    bags = [
        [Counter(text.lower().replace("?", " ").replace(".", " ").split()) for text in texts]
        for texts in zip(*pairs, strict=True)
    ]
    document_counts = Counter(word for bag in bags[1] for word in bag)
    rarity = {word: math.log(len(pairs) / count) for word, count in document_counts.items()}
    weighted = [
        [{word: n * rarity.get(word, 0.0) for word, n in bag.items()} for bag in side]
        for side in bags
    ]
    return [
        [
            sum(weight * other.get(word, 0.0) for word, weight in one.items())
            / (math.hypot(*one.values()) * math.hypot(*other.values()) or 1.0)
            for other in weighted[1]
        ]
        for one in weighted[0]
    ]


def write(encoder: Encoder, out: Path) -> None:
    """Write the files of sentence-transformers; weights as bfloat16."""
    for parameter in encoder.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    encoder.bert.save_pretrained(str(out))
    encoder.tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (out / "1_Pooling").mkdir(exist_ok=True)
    for name, content in (
        ("modules.json", modules),
        (
            "1_Pooling/config.json",
            {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True},
        ),
        ("sentence_bert_config.json", {"max_seq_length": POSITION_COUNT, "do_lower_case": False}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD},
        ),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the encoder")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    encoder = Encoder(train_tokenizer(arguments.seed))
    train(encoder, Random(f"encoder {arguments.seed}"), arguments.steps)
    print("| pairs | texts | encoder | bag of words |\n|---|---:|---:|---:|")
    for kind, pairs in evaluation_pairs(arguments.seed).items():
        firsts, seconds = zip(*pairs, strict=True)
        with torch.no_grad():
            scores = encoder(firsts) @ encoder(seconds).T
        shares = (right_share(scores.tolist()), right_share(bag_of_words_scores(pairs)))
        print(f"| {kind} | {len(pairs)} | {shares[0]:.0%} | {shares[1]:.0%} |")
    write(encoder, arguments.out)


if __name__ == "__main__":
    main()
