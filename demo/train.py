"""Training of the demo model from random weights: `python -m demo.train --out DIR`.

Tokenizer and model are learned from cases that `corpus` draws during training, and from as many
conversations with JSON and tool calls; nothing is downloaded. Contexts grow from three listings to
twelve: copying is learned on short ones and then works on long ones. `--init-from DIR` starts from
a model that was trained on hotels only, and teaches it the rest in the stages of `STAGES`.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo.corpus import draw_case
from demo.hotels import LISTING_COUNT_MAX, Split
from demo.messages import Message, Talk
from demo.network import Network, Shape
from demo.structured import draw_structured
from demo.tokenization import (
    ASSISTANT,
    BEGIN,
    END,
    MARKERS,
    PAD,
    SYSTEM,
    USER,
    extend_tokenizer,
    special_id,
    train_tokenizer,
    write_tokenizer,
)
from demo.tool_talk import draw_long_talk, draw_tool_talk

VOCAB_SIZE = 2560  # whole words for nearly all hotel conversations
TOKENS_TOTAL = 20_000_000
CONTINUED_TOKENS_TOTAL = 6_000_000  # with --init-from
BATCH_TOKENS = 3584  # two or three full conversations: many steps matter more than smooth gradients
CONTINUED_BATCH_TOKENS = 2048  # with --init-from
TALK_BATCH_TOKENS = 2048  # of conversations without listings, in the same step
HOTEL_TOKENS_MAX, TALK_TOKENS_MAX = 1900, 4000  # below the 4,096 positions
LONG_TALK_SHARE, LONG_TALK_CHARS = 0.02, (3000, 8500)
HIDDEN_RATE = 5e-3  # Muon, scaled to AdamW's update size
OTHER_RATE = 3e-3  # AdamW, for the embedding and the norms
WARMUP_STEPS = 60
# With --init-from: end of each stage as a share of the run, and its share of the step size. 0
# trains only the embeddings of tokens that hotel conversations do not have, at the full step size,
# on other conversations. Larger steps would overwrite what the first model knows.
STAGES = ((0.12, 0.0), (0.35, 0.06), (1.0, 0.4))
HOTEL_CASES_COUNTED = 2000  # in which a token must occur to belong to hotel conversations
# A sample of prompt tokens, so that structure is learned cheaply.
LISTING_SHARE, LISTING_WEIGHT = 0.1, 0.1
SAVE_EVERY_S = 240.0


@dataclass(slots=True)
class Progress:
    """Progress of a run, kept in the checkpoint so that the run can be resumed."""

    step: int = 0
    token_count: int = 0
    elapsed_s: float = 0.0

    def share(self, minutes: float | None, token_total: int) -> float:
        """Share of the run that is done, from 0 to 1: by tokens or by time, the larger of both."""
        share = self.token_count / token_total
        if minutes is not None:
            share = max(share, self.elapsed_s / (60 * minutes))
        return min(1.0, share)


def rate_factor(step: int, share: float) -> float:
    """Warm up, then fall along a cosine to almost nothing."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * share))


def stage_factor(step: int, share: float) -> float:
    """Return the share of the step size in the stage of `share`; it falls in the last stage."""
    number = sum(share >= end for end, _ in STAGES[:-1])
    end, factor = STAGES[number]
    done = (share - STAGES[number - 1][0]) / (end - STAGES[number - 1][0]) if end == 1.0 else 0.0
    return factor * min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - 0.95 * done)


def hotel_count_max(share: float) -> int:
    """Return the longest context at this point of the curriculum."""
    for until, count in ((0.12, 3), (0.3, 5), (0.42, 8)):
        if share < until:
            return count
    return LISTING_COUNT_MAX


def _answer_weight(text: str) -> float:
    """Return a high weight for figures, which are the task, and a low one for phrasing."""
    return 2.0 if re.fullmatch(r" ?\d+(\.\d)?", text) else 1.0


class Encoder:
    """Turns cases into token ids with a loss weight each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._weights = [
            _answer_weight(tokenizer.decode([i])) for i in range(tokenizer.get_vocab_size())
        ]
        self._id = {
            token: special_id(tokenizer, token) for token in (BEGIN, SYSTEM, USER, ASSISTANT, END)
        }

    def encode(
        self, messages: Sequence[Message], rng: Random, forced: Collection[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Return ids and weights: 1 or more on answers, a sample on user messages, else 0.

        forced: indexes of answers whose first token has no weight.
        """
        ids, weights = [self._id[BEGIN]], [0.0]
        for index, message in enumerate(messages):
            piece = self._tokenizer.encode(message["content"], add_special_tokens=False).ids
            ids += [self._id[f"<|{message['role']}|>"], *piece, self._id[END]]
            if message["role"] == "assistant":
                answer = [self._weights[token_id] for token_id in piece]
                if index in forced:
                    answer[0] = 0.0
                weights += [0.0, *answer, 1.0]
            elif message["role"] == "user":
                sampled = [LISTING_WEIGHT if rng.random() < LISTING_SHARE else 0.0 for _ in piece]
                weights += [0.0, *sampled, 0.0]
            else:
                weights += [0.0] * (len(piece) + 2)
        return ids, weights

    def hotel_batches(
        self, rng: Random, count_max: int, size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (B, T) of ids and weights, of about `size`, padded on the right."""
        while True:
            counts = [count_max if rng.random() < 0.65 else min(5, count_max) for _ in range(96)]
            cases = [draw_case(rng, Split.TRAIN, count) for count in counts]
            pool = [self.encode(case.messages(), rng) for case in cases]
            yield from _batches(pool, rng, HOTEL_TOKENS_MAX, size)

    def talk_batches(self, rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of conversations with JSON and with tools, of about TALK_BATCH_TOKENS."""
        while True:
            talks = [_draw_talk(rng) for _ in range(96)]
            pool = [self.encode(talk.messages(), rng, talk.forced()) for talk in talks]
            yield from _batches(pool, rng, TALK_TOKENS_MAX, TALK_BATCH_TOKENS)

    def hotel_tokens(self, rng: Random) -> list[int]:
        """Return the ids that hotel conversations have."""
        cases = (draw_case(rng, Split.TRAIN) for _ in range(HOTEL_CASES_COUNTED))
        return sorted({id_ for case in cases for id_ in self.encode(case.messages(), rng)[0]})


def _draw_talk(rng: Random) -> Talk:
    kind = rng.random()
    if kind < LONG_TALK_SHARE:
        return draw_long_talk(rng, rng.randint(*LONG_TALK_CHARS))
    return draw_structured(rng) if kind < 0.45 else draw_tool_talk(rng)


def _batches(
    pool: Sequence[tuple[list[int], list[float]]], rng: Random, length_max: int, size_max: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of conversations of similar lengths, in any order."""
    kept = sorted((item for item in pool if len(item[0]) <= length_max), key=lambda it: len(it[0]))
    groups: list[list[tuple[list[int], list[float]]]] = [[]]
    for item in kept:
        if len(item[0]) * (len(groups[-1]) + 1) > size_max:
            groups.append([])
        groups[-1].append(item)
    rng.shuffle(groups)
    yield from (_padded(group) for group in groups if group)


def _padded(group: list[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    length = max(len(ids) for ids, _ in group)
    token_ids = torch.zeros(len(group), length, dtype=torch.long)
    weights = torch.zeros(len(group), length)
    for row, (ids, weight) in enumerate(group):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        weights[row, : len(ids)] = torch.tensor(weight)
    return token_ids, weights


def weighted_loss(network: Network, token_ids: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Compute the weighted cross entropy of the next token, and the plain loss on answers alone.

    Only positions with a weight are computed.
    """
    targets, target_weights = token_ids[:, 1:], weights[:, 1:]
    chosen = target_weights > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(token_ids[:, :-1], torch.bfloat16)
        logits = network.logits(hidden[chosen])
    losses = F.cross_entropy(logits.float(), targets[chosen], reduction="none")
    weight = target_weights[chosen]
    answer = losses.detach()[weight >= 1.0].mean().item()
    return (losses * weight).sum() / weight.sum(), answer


def listing_number_tokens(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of each listing number: at the beginning of a line, and after a space."""
    texts = ((f"[{number}]", f" [{number}]") for number in range(1, LISTING_COUNT_MAX + 1))
    return [
        tuple(tokenizer.encode(text, add_special_tokens=False).ids[0] for text in pair)
        for pair in texts
    ]


class Trainer:
    """Owns the network, its optimizers and the progress; writes checkpoints."""

    def __init__(self, out: Path, seed: int, resume: bool, init_from: Path | None = None) -> None:
        self.out, self.seed = out, seed
        out.mkdir(parents=True, exist_ok=True)
        state_path = out / "training.pt"
        torch.manual_seed(seed)
        if resume and state_path.exists():
            self.tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        else:
            first = (
                train_tokenizer(seed, VOCAB_SIZE)
                if init_from is None
                else Tokenizer.from_file(str(init_from / "tokenizer.json"))
            )
            is_extended = first.token_to_id(MARKERS[0]) is not None
            self.tokenizer = first if is_extended else extend_tokenizer(first, seed)
        self.network = Network(Shape(self.tokenizer.get_vocab_size()))
        self.network.reset(listing_number_tokens(self.tokenizer))
        # Embeddings that the first stage does not change
        self.kept_rows: list[int] | None = None
        if init_from is not None:
            rng = Random(f"hotel tokens {seed}")
            self.kept_rows = Encoder(self.tokenizer).hotel_tokens(rng)
            self.network.load_state_dict(widened(init_from, self.tokenizer))
        matrices = [
            p for name, p in self.network.named_parameters() if p.dim() == 2 and "embed" not in name
        ]
        others = [
            p for name, p in self.network.named_parameters() if p.dim() != 2 or "embed" in name
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=HIDDEN_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
        ]
        self.token_total = TOKENS_TOTAL if init_from is None else CONTINUED_TOKENS_TOTAL
        self.progress = Progress()
        if resume and state_path.exists():
            state = torch.load(state_path, weights_only=True)
            self.network.load_state_dict(state["network"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.progress = Progress(**state["progress"])

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], share: float) -> list[float]:
        """Update the weights once, with the mean loss of batches; return their loss on answers."""
        step, factor = self.progress.step, rate_factor(self.progress.step, share)
        if self.kept_rows is not None:
            factor = stage_factor(step, share)
        only_new = self.kept_rows is not None and factor == 0.0
        for optimizer, rate in zip(self.optimizers, (HIDDEN_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1.0 if only_new else factor)
        answers = []
        for token_ids, weights in batches:
            loss, answer = weighted_loss(self.network, token_ids, weights)
            torch.autograd.backward(loss / len(batches))
            self.progress.token_count += token_ids.numel()
            answers.append(answer)
        if only_new:
            self._keep_the_rest()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        return answers

    def _keep_the_rest(self) -> None:
        """Drop all gradients but those of embeddings of tokens without hotel conversations."""
        for name, parameter in self.network.named_parameters():
            if "embed" not in name:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad[self.kept_rows] = 0.0

    def save(self) -> None:
        """Write the checkpoint in Hugging Face layout and the resumable state, atomically."""
        write_checkpoint(self.network, self.tokenizer, self.out)
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        torch.save(state, self.out / "training.pt.new")
        os.replace(self.out / "training.pt.new", self.out / "training.pt")

    def run(self, minutes: float | None) -> None:
        """Train to the end, printing one line every 20 steps."""
        rng = Random(f"training {self.seed} {self.progress.step}")
        encoder, count_max = Encoder(self.tokenizer), 0
        hotels: Iterator[tuple[Tensor, Tensor]] = iter(())
        talks = encoder.talk_batches(rng)
        started, offset_s, saved = time.monotonic(), self.progress.elapsed_s, time.monotonic()
        recent: list[list[float]] = []
        self.save()
        while (share := self.progress.share(minutes, self.token_total)) < 1.0:
            wanted = hotel_count_max(share) if self.kept_rows is None else LISTING_COUNT_MAX
            if wanted != count_max:
                count_max = wanted
                size = BATCH_TOKENS if self.kept_rows is None else CONTINUED_BATCH_TOKENS
                hotels = encoder.hotel_batches(rng, count_max, size)
            is_first_stage = self.kept_rows is not None and share < STAGES[0][0]
            batches = (next(talks),) if is_first_stage else (next(hotels), next(talks))
            recent.append(self.step(batches, share))
            self.progress.elapsed_s = offset_s + time.monotonic() - started
            if self.progress.step % 20 == 0:
                losses = [sum(kind) / len(kind) for kind in zip(*recent, strict=False)]
                self._report(losses, count_max, self.progress.share(minutes, self.token_total))
                recent.clear()
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
        self.save()

    def _report(self, losses: Sequence[float], count_max: int, share: float) -> None:
        progress = self.progress
        left_min = progress.elapsed_s * (1 - share) / max(share, 1e-6) / 60
        print(
            f"step {progress.step}  loss {' and '.join(f'{loss:.4f}' for loss in losses)}"
            f"  up to {count_max} listings  {progress.token_count / 1e6:.2f} M tokens "
            f" {progress.token_count / progress.elapsed_s:.0f} tokens/s  {share:.1%} "
            f" {left_min:.0f} min left",
            flush=True,
        )


def widened(directory: Path, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return the weights of a model, with embeddings for the tokens that its tokenizer lacks.

    Each is the mean of the embeddings of the tokens that its text had so far.
    """
    state: dict[str, Tensor] = load_file(directory / "model.safetensors")
    first = Tokenizer.from_file(str(directory / "tokenizer.json"))
    old = state["model.embed_tokens.weight"].float()
    rows = [
        old[first.encode(tokenizer.decode([token_id]), add_special_tokens=False).ids].mean(dim=0)
        for token_id in range(len(old), tokenizer.get_vocab_size())
    ]
    state["model.embed_tokens.weight"] = torch.stack((*old, *rows))
    return state


def write_checkpoint(network: Network, tokenizer: Tokenizer, out: Path) -> None:
    """Write a checkpoint for Hugging Face readers; weights as bfloat16, which halves the file."""
    out.mkdir(parents=True, exist_ok=True)
    token_ids = {
        f"{name}_token_id": special_id(tokenizer, t)
        for name, t in (("bos", BEGIN), ("eos", END), ("pad", PAD))
    }
    shape = network.shape
    (out / "config.json").write_text(json.dumps(shape.config(token_ids), indent=2) + "\n")
    generation = {**token_ids, "do_sample": False, "max_new_tokens": 256}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(tokenizer, out, shape.position_count_max)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors.new", metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)
    os.replace(out / "model.safetensors.new", out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the model; training.pt in it is the state",
    )
    parser.add_argument(
        "--minutes", type=float, default=None, help="end after this time at the latest"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the state in --out")
    parser.add_argument(
        "--init-from",
        type=Path,
        default=None,
        help="a model of hotel conversations to start from; its tokenizer is extended",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Trainer(arguments.out, arguments.seed, arguments.resume, arguments.init_from).run(
        arguments.minutes
    )


if __name__ == "__main__":
    main()
