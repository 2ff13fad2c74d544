"""Classifier process: `python -m inference.safety.classifier_worker --fd N`, a child of the API
process.

Loads sequence-classification checkpoints and scores texts: one thread, low priority, one batch at a
time. Reads only the checkpoints' directories: no hub access, no code from checkpoints, no pickles.
It exits when its socket is closed.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.errors import CheckpointInvalid
from inference.workers.child import EXIT_LOAD_FAILED, Inbox, serve_parent
from inference.workers.protocol import LoadFailed, Message, Ready, decoder_to_worker, encode

if TYPE_CHECKING:
    from torch import Tensor

NICENESS = 10  # a tenth of the weight of an engine's threads when both need a core
# tokens per row, as in BERT-like models; longer texts are scored in overlapping rows
ROW_TOKENS_MAX = 512
OVERLAP_PARTS = 4  # rows overlap by a quarter, so that short passages are whole in one of them
# tokens with padding per forward pass: larger batches gain nothing on one core
FORWARD_TOKENS_MAX = 2048
_log = logging.getLogger("weir.inference.safety")


class LoadClassifiers(Message, tag="load_classifiers", frozen=True):
    """First message: directories of the checkpoints, which later messages name by their index."""

    directories: list[str]


class ClassifyBatch(Message, tag="classify", frozen=True):
    """Texts to score, each with the index of its classifier. The answer repeats the `number` of the
    batch.

    The parent sends the next batch after the scores of the last, so abandoned texts are never
    computed.
    """

    number: int
    texts: list[tuple[int, str]]


class BatchScored(Message, tag="scored", frozen=True):
    """Scores of each text, from 0 to 1, in the order of the classifier's labels. A long text has
    the maximum over its rows.

    `fault` is the reason if scoring failed; `scores` is then empty.
    """

    number: int
    scores: list[list[float]]
    fault: str | None = None


class Classifier:
    """A loaded sequence-classification checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Load the checkpoint, and score a text as a test. Raises CheckpointInvalid."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        only_local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), use_fast=True, **only_local
            )
            model, info = AutoModelForSequenceClassification.from_pretrained(
                str(directory),
                use_safetensors=True,
                dtype="float32",
                output_loading_info=True,
                **only_local,
            )
        except Exception as error:  # the library raises exceptions of any type
            raise CheckpointInvalid(
                directory, f"cannot be loaded as a classifier: {error}"
            ) from error
        self._model: Any = model.eval()
        missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        if missing:  # the library would continue with random weights
            raise CheckpointInvalid(
                directory,
                f"weights are missing or have a wrong shape: {', '.join(missing[:3])}",
            )
        if not self._tokenizer.is_fast:
            raise CheckpointInvalid(directory, "needs a tokenizer.json")
        self._several_labels = (
            model.config.problem_type == "multi_label_classification"
            or model.config.num_labels == 1
        )
        self._row_token_count_max = self._row_limit()
        self._pad_id: int | None = model.config.pad_token_id
        try:
            scores = self.score(["word " * ROW_TOKENS_MAX])
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
            raise CheckpointInvalid(directory, f"cannot score a text: {error}") from error
        if len(scores[0]) != len(model.config.id2label):
            raise CheckpointInvalid(
                directory,
                f"gives {len(scores[0])} scores for {len(model.config.id2label)} labels",
            )

    def score(self, texts: Sequence[str]) -> list[list[float]]:
        """Compute each label's highest score over a text's rows. Raises ArithmeticError for NaN."""
        encoded = self._tokenizer(
            list(texts),
            truncation=True,
            max_length=self._row_token_count_max,
            stride=self._row_token_count_max // OVERLAP_PARTS,
            return_overflowing_tokens=True,
        )
        rows: list[list[int]] = encoded["input_ids"]
        owners: list[int] = encoded["overflow_to_sample_mapping"]
        highest: list[list[float]] = [[] for _ in texts]
        by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        while by_length:
            # The longest rows first: the others of a pass are padded to their length.
            width = len(rows[by_length[-1]])
            count = 1 if self._pad_id is None else max(FORWARD_TOKENS_MAX // width, 1)
            taken, by_length = by_length[-count:], by_length[:-count]
            for index, scores in zip(
                taken, self._forward([rows[index] for index in taken]), strict=True
            ):
                best = highest[owners[index]]
                highest[owners[index]] = (
                    [max(pair) for pair in zip(best, scores, strict=True)] if best else scores
                )
        return highest

    def _forward(self, rows: list[list[int]]) -> list[list[float]]:
        import torch

        width = max(map(len, rows))
        input_ids = torch.full((len(rows), width), self._pad_id or 0)
        attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = torch.tensor(row)
            attention_mask[index, : len(row)] = 1
        with torch.inference_mode():
            logits: Tensor = self._model(
                input_ids=input_ids, attention_mask=attention_mask
            ).logits.float()
        scores = logits.sigmoid() if self._several_labels else logits.softmax(dim=-1)
        if not bool(torch.isfinite(scores).all()):
            # NaN would be below every threshold
            raise ArithmeticError("the scores are not finite; are the weights intact?")
        return [[float(score) for score in row] for row in scores]

    def _row_limit(self) -> int:
        """Determine the maximum number of tokens per row."""
        limits = [ROW_TOKENS_MAX, self._tokenizer.model_max_length]
        for name, module in self._model.named_modules():
            if name.endswith("position_embeddings") and hasattr(module, "num_embeddings"):
                # RoBERTa-like models number positions from the one after the padding's.
                first = 0 if module.padding_idx is None else module.padding_idx + 1
                limits.append(module.num_embeddings - first)
        return int(min(limits))


def serve(connection: socket.socket) -> int:
    """Load the classifiers, then score batches until the socket closes. Return the exit status."""
    os.nice(NICENESS)
    inbox: Inbox[Message] = Inbox(connection, decoder_to_worker(LoadClassifiers, ClassifyBatch))
    load = inbox.wait()
    assert isinstance(load, LoadClassifiers), "the first message must be LoadClassifiers"
    import torch

    torch.set_num_threads(1)
    try:
        classifiers = [Classifier(Path(directory)) for directory in load.directories]
    except CheckpointInvalid as error:
        _log.error("loading failed: %s", error)
        connection.sendall(encode(LoadFailed(str(error))))
        return EXIT_LOAD_FAILED
    connection.sendall(encode(Ready(kv_block_count=0)))
    while True:
        batch = inbox.wait()
        assert isinstance(batch, ClassifyBatch), "later messages must be ClassifyBatch"
        connection.sendall(encode(score_batch(classifiers, batch)))


def score_batch(classifiers: Sequence[Classifier], batch: ClassifyBatch) -> BatchScored:
    """Score a batch; return the scores in the order of its texts, or the fault."""
    scores: list[list[float]] = [[] for _ in batch.texts]
    try:
        for number, classifier in enumerate(classifiers):
            positions = [
                position for position, (index, _) in enumerate(batch.texts) if index == number
            ]
            if positions:
                for position, scored in zip(
                    positions,
                    classifier.score([batch.texts[position][1] for position in positions]),
                    strict=True,
                ):
                    scores[position] = scored
    except Exception as error:
        _log.exception("a batch could not be scored")
        return BatchScored(batch.number, [], f"{type(error).__name__}: {error}")
    return BatchScored(batch.number, scores)


if __name__ == "__main__":
    raise SystemExit(serve_parent("inference.safety.classifier_worker", serve))
