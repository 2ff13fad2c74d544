"""Training of the demo model from random weights: `python -m demo.train --out DIR`.

Tokenizer and model are learned from cases that `corpus` draws during training; nothing is
downloaded. Contexts grow from three listings to twelve: copying is learned on short ones and then
works on long ones. `--init-from DIR` starts from the model of an earlier run.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo.corpus import Case, draw_case
from demo.hotels import LISTING_COUNT_MAX, Split
from demo.network import Network, Shape
from demo.tokenization import (
    ASSISTANT,
    BEGIN,
    END,
    PAD,
    SYSTEM,
    USER,
    special_id,
    train_tokenizer,
    write_tokenizer,
)

VOCAB_SIZE = 2560  # whole words for nearly all of the corpus
# Slightly more than for the bundled weights; an hour and a half on one or two cores.
TOKENS_TOTAL = 14_000_000
BATCH_TOKENS = 3584  # two or three full conversations: many steps matter more than smooth gradients
SEQUENCE_TOKENS_MAX = 1900  # leaves room below the 2,048 positions
HIDDEN_RATE = 5e-3  # Muon, scaled to AdamW's update size
OTHER_RATE = 3e-3  # AdamW, for the embedding and the norms
WARMUP_STEPS = 60
# A sample of prompt tokens, so that structure is learned cheaply.
LISTING_SHARE, LISTING_WEIGHT = 0.1, 0.1
SAVE_EVERY_S = 240.0


@dataclass(slots=True)
class Progress:
    """Progress of a run, kept in the checkpoint so that the run can be resumed."""

    step: int = 0
    token_count: int = 0
    elapsed_s: float = 0.0

    def share(self, minutes: float | None) -> float:
        """Share of the run that is done, from 0 to 1: by tokens or by time, the larger of both."""
        share = self.token_count / TOKENS_TOTAL
        if minutes is not None:
            share = max(share, self.elapsed_s / (60 * minutes))
        return min(1.0, share)


def rate_factor(step: int, share: float) -> float:
    """Warm up, then fall along a cosine to almost nothing."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * share))


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

    def encode(self, case: Case, rng: Random) -> tuple[list[int], list[float]]:
        """Return ids and weights: 1 or more on answers, a sample on user messages, else 0."""
        ids, weights = [self._id[BEGIN]], [0.0]
        for message in case.messages():
            piece = self._tokenizer.encode(message["content"], add_special_tokens=False).ids
            ids += [self._id[f"<|{message['role']}|>"], *piece, self._id[END]]
            if message["role"] == "assistant":
                weights += [0.0, *(self._weights[token_id] for token_id in piece), 1.0]
            elif message["role"] == "user":
                sampled = [LISTING_WEIGHT if rng.random() < LISTING_SHARE else 0.0 for _ in piece]
                weights += [0.0, *sampled, 0.0]
            else:
                weights += [0.0] * (len(piece) + 2)
        return ids, weights

    def batches(self, rng: Random, count_max: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (B, T) of ids and weights, of about BATCH_TOKENS, padded on the right."""
        while True:
            counts = [count_max if rng.random() < 0.65 else min(5, count_max) for _ in range(96)]
            pool = [self.encode(draw_case(rng, Split.TRAIN, count), rng) for count in counts]
            pool = sorted(
                (item for item in pool if len(item[0]) <= SEQUENCE_TOKENS_MAX),
                key=lambda item: len(item[0]),
            )
            groups: list[list[tuple[list[int], list[float]]]] = [[]]
            for item in pool:
                if len(item[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS:
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
    """Return the weighted cross entropy of the next token, and the plain loss on answers alone.

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
        elif init_from is not None:
            self.tokenizer = Tokenizer.from_file(str(init_from / "tokenizer.json"))
        else:
            self.tokenizer = train_tokenizer(seed, VOCAB_SIZE)
        self.network = Network(Shape(self.tokenizer.get_vocab_size()))
        self.network.reset(listing_number_tokens(self.tokenizer))
        if init_from is not None:
            self.network.load_state_dict(load_file(init_from / "model.safetensors"))
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
        # Large steps would overwrite the weights of the first model.
        scale = 1.0 if init_from is None else 0.5
        self.rates = (scale * HIDDEN_RATE, scale * OTHER_RATE)
        self.progress = Progress()
        if resume and state_path.exists():
            state = torch.load(state_path, weights_only=True)
            self.network.load_state_dict(state["network"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.progress = Progress(**state["progress"])

    def step(self, token_ids: Tensor, weights: Tensor, share: float) -> float:
        """Update the weights once; return the loss on answers."""
        factor = rate_factor(self.progress.step, share)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss, answer = weighted_loss(self.network, token_ids, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.token_count += token_ids.numel()
        return answer

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
        batches: Iterator[tuple[Tensor, Tensor]] = iter(())
        started, offset_s, saved = time.monotonic(), self.progress.elapsed_s, time.monotonic()
        recent: list[float] = []
        self.save()
        while (share := self.progress.share(minutes)) < 1.0:
            if hotel_count_max(share) != count_max:
                count_max = hotel_count_max(share)
                batches = encoder.batches(rng, count_max)
            recent.append(self.step(*next(batches), share))
            self.progress.elapsed_s = offset_s + time.monotonic() - started
            if self.progress.step % 20 == 0:
                self._report(sum(recent) / len(recent), count_max, self.progress.share(minutes))
                recent.clear()
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
        self.save()

    def _report(self, loss: float, count_max: int, share: float) -> None:
        progress = self.progress
        left_min = progress.elapsed_s * (1 - share) / max(share, 1e-6) / 60
        print(
            f"step {progress.step}  loss {loss:.4f}  up to {count_max} listings "
            f" {progress.token_count / 1e6:.2f} M tokens "
            f" {progress.token_count / progress.elapsed_s:.0f} tokens/s  {share:.1%} "
            f" {left_min:.0f} min left",
            flush=True,
        )


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
        "--init-from", type=Path, default=None, help="a model to start from; its tokenizer is kept"
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
