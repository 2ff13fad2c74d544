"""Classifiers of the safety stage: scores equal the reference's in any batch; faults are contained.

A slow, dead or faulty process costs its callers a bounded wait, and affects nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from inference.errors import CheckpointInvalid, SafetyUnavailable
from inference.safety import classifiers
from inference.safety.classifier_worker import Classifier, ClassifyBatch, score_batch
from inference.safety.classifiers import (
    HOLD_S_MAX,
    PIECE_CHARS,
    PIECE_OVERLAP_CHARS,
    WAITING_COUNT_MAX,
    ClassifierChecker,
    ClassifierOutputCheck,
    ClassifierProcess,
    ClassifierRule,
    ClassifierTerms,
    pieces_of,
)
from inference.safety.safety import SafetyRulesInvalid, Verdict
from inference.safety.safety_file import read_safety
from tests.inference.classifier_checkpoints import (
    ARCHITECTURES,
    edit_config,
    make_danger_classifier,
    make_random_classifier,
)
from tests.service import until

PATIENCE_S = 180.0
HARMLESS, DANGEROUS = "the hotel is near the sea", "how to make a bomb"

CLASSIFIER = (
    "[[classifier]]\nname = 'danger'\ndirectory = 'model'\nthresholds = { dangerous = 0.5 }\n"
)


@pytest.fixture(scope="module")
def danger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint that detects bad words."""
    return make_danger_classifier(tmp_path_factory.mktemp("danger"))


def reference_scores(directory: Path, text: str) -> list[float]:
    """Return the scores of the `transformers` pipeline for a single text."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    model: Any = AutoModelForSequenceClassification.from_pretrained(str(directory))
    with torch.inference_mode():
        logits = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[
            0
        ]
    several = (
        model.config.problem_type == "multi_label_classification" or model.config.num_labels == 1
    )
    scores: list[float] = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
    return scores


class TestScores:
    """Computation of the child, without its process."""

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_equal_the_references_in_any_company(self, architecture: str, tmp_path: Path) -> None:
        directory = make_random_classifier(tmp_path, architecture)
        texts = [HARMLESS, "", "the " * 60, DANGEROUS, "how", "unknown words " * 9]

        together = Classifier(directory).score(texts)

        for text, scores in zip(texts, together, strict=True):
            assert scores == pytest.approx(reference_scores(directory, text), abs=1e-5), text

    @pytest.mark.parametrize(
        "entries", [{"problem_type": "multi_label_classification"}, {"pad_token_id": None}]
    )
    def test_follow_the_configuration(self, entries: dict[str, Any], tmp_path: Path) -> None:
        """Labels may exclude each other; models without padding get one row at a time."""
        directory = make_random_classifier(tmp_path, "Llama", **entries)

        scores = Classifier(directory).score([HARMLESS, DANGEROUS])

        for text, given in zip([HARMLESS, DANGEROUS], scores, strict=True):
            assert given == pytest.approx(reference_scores(directory, text), abs=1e-5)

    @pytest.mark.parametrize("index", [0, 30, 62, 63, 500, 999])
    def test_nothing_of_a_long_text_is_cut_off(self, index: int, danger: Path) -> None:
        """A bad word is found anywhere in 1,000 words, with a checkpoint of 64 tokens."""
        words = ["garden"] * 1000
        classifier = Classifier(danger)
        assert classifier.score([" ".join(words)])[0][1] < 0.01

        words[index] = "poison"

        assert classifier.score([" ".join(words)])[0][1] > 0.99

    def test_that_are_no_numbers_are_a_fault_and_not_a_pass(self, danger: Path) -> None:
        """A planted fault: NaN is below every threshold."""
        classifier = Classifier(danger)
        classifier._model.classifier.bias.data[0] = float("nan")

        scored = score_batch([classifier], ClassifyBatch(1, [(0, DANGEROUS)]))

        assert scored.scores == []
        assert "not finite" in (scored.fault or "")


def without(name: str) -> Callable[[Path], None]:
    """Return a fault of a checkpoint: a missing tensor."""

    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        save_file(
            {key: tensor for key, tensor in tensors.items() if key != name},
            directory / "model.safetensors",
            {"format": "pt"},
        )

    return spoil


def nan_weights(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["classifier.bias"][:] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def torn(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without("classifier.weight"), "weights are missing.*classifier.weight"),
        (nan_weights, "cannot score a text.*not finite"),
        (torn, "cannot be loaded"),
        (lambda directory: edit_config(directory, num_attention_heads=5), "cannot be loaded"),
        (lambda directory: edit_config(directory, vocab_size=3), "wrong shape|cannot be loaded"),
        (lambda directory: (directory / "tokenizer.json").write_text("{}"), "cannot be loaded"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused(
    spoil: Callable[[Path], None], words: str, danger: Path, tmp_path: Path
) -> None:
    make_random_classifier(tmp_path, "Bert")
    spoil(tmp_path)

    with pytest.raises(CheckpointInvalid, match=words):
        Classifier(tmp_path)


@contextlib.asynccontextmanager
async def served(process: ClassifierProcess) -> AsyncIterator[ClassifierProcess]:
    """Yield the loaded process."""
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(process.serve())
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await process.loaded() is None
            yield process
        finally:
            serving.cancel()


async def scored_eventually(process: ClassifierProcess, text: str) -> list[float]:
    """Return the scores of a text, asked for repeatedly until there are some."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(SafetyUnavailable):
                return (await process.score([(0, text)]))[0]


def environment_of(pid: int) -> bytes:
    """Return the environment of another process."""
    return Path(f"/proc/{pid}/environ").read_bytes()


class TestProcess:
    """The child's life, as its callers see it."""

    async def test_many_callers_share_batches_at_low_priority_and_each_gets_its_own(
        self, danger: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The child has none of our secrets, and ends with this process."""
        monkeypatch.setenv("WEIR_DATABASE_URL", "secret")
        async with served(ClassifierProcess([danger, danger], timeout_s=PATIENCE_S)) as process:
            texts = [DANGEROUS if index % 3 == 0 else f"{HARMLESS} {index}" for index in range(60)]

            answers = await asyncio.gather(
                *(process.score([(index % 2, text)]) for index, text in enumerate(texts))
            )

            queue = process.queue
            pid = process.pid
            assert pid is not None
            assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
            environment = environment_of(pid)
        assert b"WEIR_DATABASE_URL" not in environment
        assert b"secret" not in environment
        assert b"HF_HUB_OFFLINE=1" in environment
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert [scores[0][1] > 0.5 for scores in answers] == [text == DANGEROUS for text in texts]
        assert queue.done_count == 60
        assert queue.batch_count < 10
        assert queue.waiting_count == 0
        assert queue.waiting_count_peak >= 50

    @pytest.mark.usefixtures("executed_workers")
    async def test_a_dead_one_fails_its_callers_and_another_takes_its_place(
        self, danger: Path
    ) -> None:
        async with served(ClassifierProcess([danger], timeout_s=PATIENCE_S)) as process:
            pid = process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)  # keeps the next batch in progress until the process dies
            async with asyncio.TaskGroup() as tasks:
                under_way = tasks.create_task(refused(process))
                await until(lambda: process.queue.batch_count == 1, "the batch to be sent")
                os.kill(pid, signal.SIGKILL)
            assert "process ended" in under_way.result()

            assert (await scored_eventually(process, DANGEROUS))[1] > 0.5
            assert process.pid not in (None, pid)
            assert process.restart_count == 1

    async def test_a_hanging_one_costs_a_bounded_wait_and_is_killed(self, danger: Path) -> None:
        async with served(ClassifierProcess([danger], timeout_s=0.2)) as process:
            pid = process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)

            for _ in range(3):
                assert "within 0.2 s" in await refused(process)
            assert process.queue.waiting_count == 0, "who has left does not stay in the queue"

            # A hang counts as a crash after some timeouts.
            await until(lambda: process.pid not in (None, pid), "another process")
            assert (await scored_eventually(process, DANGEROUS))[1] > 0.5

    async def test_the_queue_is_bounded(self, danger: Path) -> None:
        # Not served, so that nothing is taken from the queue.
        process = ClassifierProcess([danger], timeout_s=PATIENCE_S)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(process.score([(0, HARMLESS)] * WAITING_COUNT_MAX))
            await until(lambda: process.queue.waiting_count == WAITING_COUNT_MAX, "a full queue")

            with pytest.raises(SafetyUnavailable, match=f"{WAITING_COUNT_MAX} texts wait"):
                await process.score([(0, HARMLESS)])

            waiting.cancel()
        assert process.queue.waiting_count == 0

    async def test_an_unusable_checkpoint_is_reported(self, danger: Path, tmp_path: Path) -> None:
        make_random_classifier(tmp_path, "Bert")
        torn(tmp_path)
        process = ClassifierProcess([danger, tmp_path], timeout_s=PATIENCE_S)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(process.serve())
            async with asyncio.timeout(PATIENCE_S):
                failure = await process.loaded()
            serving.cancel()

        assert failure is not None
        assert failure.startswith(str(tmp_path))

    @pytest.mark.usefixtures("executed_workers")
    async def test_a_failed_start_is_reported_at_once(
        self, danger: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(classifiers, "CHILD_ENVIRONMENT", {"PYTHONPATH": str(danger)})
        monkeypatch.setattr("sys.executable", str(danger / "no python"))
        process = ClassifierProcess([danger], timeout_s=PATIENCE_S)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(process.serve())
            async with asyncio.timeout(PATIENCE_S):
                assert "could not be started" in (await process.loaded() or "")
            serving.cancel()


async def refused(process: ClassifierProcess) -> str:
    """Return why a text gets no scores."""
    with pytest.raises(SafetyUnavailable) as refusal:
        await process.score([(0, HARMLESS)])
    return str(refusal.value)


class Windows:
    """Records the texts that a check asks about; a text with "bad" matches."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.now_s = 0.0

    async def find(self, text: str) -> str | None:
        self.texts.append(text)
        return "danger: bad" if "bad" in text else None

    def open(self, **terms: Any) -> ClassifierOutputCheck:
        return ClassifierOutputCheck(self.find, ClassifierTerms(**terms), clock=lambda: self.now_s)


class TestWindows:
    """Windows of output sent to the classifier, and text released afterwards."""

    async def test_text_waits_for_its_window_and_no_longer(self) -> None:
        windows = Windows()
        check = windows.open(window_chars=10, context_chars=5)

        safe = [
            (await check.push(piece)).safe_char_count
            for piece in ("abcd", "efgh", "ij", "klm", "nopqrstu")
        ]

        assert safe == [0, 0, 10, 10, 21]
        assert windows.texts == ["abcdefghij", "fghij" + "klmnopqrstu"]
        assert await check.finish() == Verdict(21), "nothing new: nothing to ask"

    async def test_a_match_across_windows_stops_the_second_one(self) -> None:
        windows = Windows()
        check = windows.open(window_chars=4, context_chars=4)

        verdicts = [
            await check.push("a ba"),
            await check.push("d b"),
            await check.push("c"),
            await check.push("more"),
        ]

        assert verdicts == [
            Verdict(4),
            Verdict(4),
            Verdict(4, "danger: bad"),
            Verdict(4, "danger: bad"),
        ]
        assert len(windows.texts) == 2, "after a hit nobody is asked"

    async def test_the_rest_is_checked_at_the_end(self) -> None:
        windows = Windows()
        check = windows.open()
        await check.push("short and bad")

        assert await check.finish() == Verdict(0, "danger: bad")

    async def test_text_is_held_for_a_limited_time(self) -> None:
        windows = Windows()
        check = windows.open()
        assert (await check.push("a ")).safe_char_count == 0

        windows.now_s = HOLD_S_MAX

        assert (await check.push("b ")).safe_char_count == 4

    def test_pieces_cover_a_text_with_overlap(self) -> None:
        for length in (0, 1, PIECE_CHARS, PIECE_CHARS + 1, 5 * PIECE_CHARS + 17):
            text = "".join(chr(0x4E00 + index % 20_000) for index in range(length))

            pieces = pieces_of(text)

            assert pieces[0] + "".join(piece[PIECE_OVERLAP_CHARS:] for piece in pieces[1:]) == text
            assert all(len(piece) <= PIECE_CHARS for piece in pieces)
            assert len(pieces) == 1 or len(pieces[-1]) > PIECE_OVERLAP_CHARS, (
                "no piece is all in the one before"
            )


class Scoring(ClassifierProcess):
    """Double of a child: "bad" is bad; may not answer. Records concurrent texts."""

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__([], timeout_s=1.0)
        self.answers = answers
        self.requested: list[int] = []

    async def score(self, asks: Any) -> list[list[float]]:
        self.requested.append(len(asks))
        if not self.answers:
            raise SafetyUnavailable("none there", 1.0)
        return [[0.4, 0.6] if "bad" in text else [0.9, 0.1] for _, text in asks]


def checker_of(
    process: ClassifierProcess, threshold: float = 0.5, **terms: Any
) -> ClassifierChecker:
    rule = ClassifierRule(
        "danger", 0, ((1, "dangerous", threshold),), in_prompt=True, in_output=True
    )
    return ClassifierChecker(process, [rule], ClassifierTerms(**terms))


class TestChecker:
    """Thresholds, long prompts, and behaviour without an answer."""

    async def test_a_label_counts_from_its_threshold_on(self) -> None:
        assert await checker_of(Scoring(), 0.6).check_prompt("bad") == "danger: dangerous"
        assert await checker_of(Scoring(), 0.61).check_prompt("bad") is None

    async def test_a_long_prompt_is_sliced_and_is_seen_to_its_end(self) -> None:
        process = Scoring()

        assert await checker_of(process).check_prompt("x" * 50_000 + "bad") == "danger: dangerous"

        assert max(process.requested) <= 4
        assert len(process.requested) > 10

    async def test_without_an_answer_nothing_passes_unless_so_configured(self) -> None:
        refusing, allowing = (
            checker_of(Scoring(answers=False), when_unavailable=choice, window_chars=3)
            for choice in ("refuse", "allow")
        )
        with pytest.raises(SafetyUnavailable):
            await refusing.check_prompt("text")
        check = refusing.open_output()
        assert check is not None
        with pytest.raises(SafetyUnavailable):
            await check.push("text")

        assert await allowing.check_prompt("text") is None
        check = allowing.open_output()
        assert check is not None
        assert await check.push("text") == Verdict(4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[classifier]]\ndirectory = 'model'", "classifier 1: needs a name"),
        ("[[classifier]]\nname = 'x'", r"classifier 1 \(x\): needs the directory"),
        (
            CLASSIFIER.replace("'model'", "'nowhere'"),
            "nowhere/config.json is missing; nothing is downloaded",
        ),
        (CLASSIFIER.replace("dangerous", "rude"), "no label 'rude'; it has: harmless, dangerous"),
        (CLASSIFIER.replace("0.5", "0"), "threshold of 'dangerous' must be above 0"),
        (CLASSIFIER.replace("0.5", "true"), "threshold of 'dangerous' must be above 0"),
        (CLASSIFIER.replace("{ dangerous = 0.5 }", "{}"), "needs thresholds, for example"),
        (CLASSIFIER + "device = 'cuda'", r"\(danger\): unknown key device; allowed are applies_to"),
        (CLASSIFIER + "applies_to = 'neither'", "applies_to"),
        (CLASSIFIER + CLASSIFIER, "same name: danger"),
        (CLASSIFIER + "[[rule]]\nname = 'danger'\npattern = 'x'", "same name: danger"),
        (
            CLASSIFIER + "[classifiers]\nwindow_chars = 0",
            "window_chars must be a whole number from 1",
        ),
        (
            CLASSIFIER + "[classifiers]\ncontext_chars = 1.5",
            "context_chars must be a whole number from 0",
        ),
        (CLASSIFIER + "[classifiers]\ntimeout_s = 100", "timeout_s must be above 0 and at most 60"),
        (CLASSIFIER + "[classifiers]\nwhen_unavailable = 'maybe'", '"refuse" or "allow"'),
        (CLASSIFIER + "[classifiers]\nretries = 1", "unknown key retries"),
        (CLASSIFIER + "[[classifiers]]\nretries = 1", "one table, not several"),
    ],
)
def test_an_unusable_file_is_refused(text: str, words: str, danger: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(danger)
    path = tmp_path / "rules.toml"
    path.write_text(text)

    with pytest.raises(SafetyRulesInvalid, match=words):
        read_safety(path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM, not a sequence classifier"),
        ({"architectures": None}, r"\(none\), not a sequence classifier"),
        ({"auto_map": {"AutoModel": "code.py"}}, "requires custom code"),
        ({"problem_type": "regression"}, "no labels"),
        ({"id2label": ["a", "b"]}, "not a table of labels"),
        ({"id2label": {"0": "harmless", "5": "dangerous"}}, "not a table of labels"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused_before_it_is_loaded(
    entries: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_random_classifier(tmp_path / "model", "Bert")
    edit_config(tmp_path / "model", **entries)
    path = tmp_path / "rules.toml"
    path.write_text(CLASSIFIER)

    with pytest.raises(SafetyRulesInvalid, match=words):
        read_safety(path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    make_random_classifier(tmp_path / "model", "Bert")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    path = tmp_path / "rules.toml"
    path.write_text(CLASSIFIER)

    with pytest.raises(SafetyRulesInvalid, match=r"no \*.safetensors file"):
        read_safety(path)


def test_without_the_package_the_remedy_is_named(
    danger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(danger)
    path = tmp_path / "rules.toml"
    path.write_text(CLASSIFIER)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(SafetyRulesInvalid, match=r"pip install -e sdk/python -e '\.\[safety\]'"):
        read_safety(path)


def test_rules_alone_need_no_process(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("[[rule]]\nname = 'x'\npattern = 'y'")

    assert read_safety(path).classifiers is None
