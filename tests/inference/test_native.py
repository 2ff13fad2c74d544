"""The native decoder computes what the torch decoder computes, and does without where it cannot be had."""

from __future__ import annotations

import logging
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from inference.checkpoint.checkpoint import read_config
from inference.core.model_runner import ModelRunner
from inference.core.options import ComputeDtype, EngineOptions
from inference.core.scheduler import Chunk, StepPlan
from inference.core.sequence import Sequence as EngineSequence
from inference.decoder.model import Logits
from inference.errors import InvariantViolated
from inference.limits import EngineLimits
from inference.native import loader
from inference.native.build import build
from inference.native.decoder import TableRows, supports
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all

needs_compiler = pytest.mark.skipif(loader.load() is None, reason="no native library on this machine, or switched off")

SHAPES = {
    "grouped heads": LlamaShape(),
    "nine rows of a group": LlamaShape(hidden_size=144, head_count=9, kv_head_count=1, head_dim=16),
    "heads of 48": LlamaShape(hidden_size=96, head_count=4, head_dim=48),
    "heads of 128, biases": LlamaShape(head_dim=128, attention_bias=True, mlp_bias=True),
    "odd panels, tied": LlamaShape(hidden_size=72, intermediate_size=130, head_dim=16, tied_embeddings=True),
    "window": LlamaShape(architecture="MistralForCausalLM", sliding_window=40),
    "head norms": LlamaShape(architecture="Qwen3ForCausalLM", head_dim=32),
}
MEAN_DIFFERENCE_MAX = {"float32": 1e-5, "bfloat16": 0.07, "int8": 0.07}  # as a share of the logits' spread


@dataclass(slots=True)
class Recorder:
    """Logits of a runner's steps, in order, as its decoder gives them."""

    logits: list[torch.Tensor] = field(default_factory=list)


def run_steps(directory: Path, dtype: ComputeDtype, monkeypatch: pytest.MonkeyPatch, *, native: bool) -> list[torch.Tensor]:
    """All logits of a batch of prompts computed in chunks, then of steps that feed fixed tokens."""
    recorder = Recorder()
    monkeypatch.setattr("inference.core.model_runner.supports", supports if native else lambda config, dtype: False)

    decode = ModelRunner._decode

    def recording(runner: ModelRunner, chunks: list[Chunk]) -> Logits:
        logits = decode(runner, chunks)
        assert logits.best == logits.values.numpy().argmax(axis=-1).tolist()
        recorder.logits.append(logits.values.clone())
        return logits

    monkeypatch.setattr(ModelRunner, "_decode", recording)
    options = EngineOptions(str(directory), EngineLimits(1024), dtype, kv_cache_bytes=32 << 20)
    runner = ModelRunner(options, read_config(directory), lambda fraction: None)
    assert (runner._native is not None) == native
    rng = random.Random(1)
    sequences = [_sequence(number, random_prompt(rng, length)) for number, length in enumerate((1, 16, 17, 70, 555))]
    next_block = 0
    for sequence in sequences:
        count = -(-(len(sequence.token_ids) + 8) // 16)
        sequence.block_table = list(range(next_block + count - 1, next_block - 1, -1))  # backwards: order must not matter
        next_block += count
    for step in range(10):
        plan = StepPlan()
        for sequence in sequences:
            plan.add(sequence, min(sequence.uncomputed_token_count, 200))
        runner.run(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed_token_count += chunk.token_count
            if sequence.uncomputed_token_count == 0:
                sequence.token_ids.append(7 + (step * 31 + sequence.number) % 300)
    monkeypatch.undo()
    return recorder.logits


def _sequence(number: int, prompt: Sequence[int]) -> EngineSequence:
    """Enough of one for the runner, which detokenizes nothing."""
    request = make_request(prompt, 64)
    return EngineSequence(number, request, seed=0, end_token_ids=frozenset(), detokenizer=None)  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in SHAPES for dtype in ("float32", "bfloat16")] + [("grouped heads", "int8")]
)
def test_logits_equal_those_of_torch(name: str, dtype: ComputeDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, seed=3, shape=SHAPES[name]).directory

    native = run_steps(directory, dtype, monkeypatch, native=True)
    reference = run_steps(directory, dtype, monkeypatch, native=False)

    assert [len(rows) for rows in native] == [len(rows) for rows in reference]
    assert max(map(len, native)) == 5
    for ours, theirs in zip(native, reference, strict=True):
        assert (ours - theirs).abs().mean() < MEAN_DIFFERENCE_MAX[dtype] * theirs.std()


@needs_compiler
def test_bfloat16_is_nearer_to_exact_than_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tolerances must not hide errors: compared with fp32 on equal weights, native is more exact."""
    directory = make_checkpoint(tmp_path, seed=4, shape=LlamaShape(layer_count=4)).directory

    exact = torch.cat(run_steps(directory, "float32", monkeypatch, native=False))
    native = torch.cat(run_steps(directory, "bfloat16", monkeypatch, native=True))
    reference = torch.cat(run_steps(directory, "bfloat16", monkeypatch, native=False))

    assert (native - exact).abs().mean() <= 1.05 * (reference - exact).abs().mean()


@pytest.fixture
def several_threads() -> Iterator[None]:
    """Cores made now spread their steps over three threads."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@needs_compiler
def test_tokens_do_not_depend_on_the_number_of_threads(tiny: TinyCheckpoint, several_threads: None) -> None:
    rng = random.Random(8)
    requests = [make_request(random_prompt(rng, rng.randrange(1, 300))) for _ in range(12)]

    on_three = run_all(make_core(tiny.directory), requests)
    torch.set_num_threads(1)
    on_one = run_all(make_core(tiny.directory), requests)

    assert [outcome.token_ids for outcome in on_three] == [outcome.token_ids for outcome in on_one]


def test_switched_off_computes_with_torch_and_says_so(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    loader.load.cache_clear()
    with caplog.at_level(logging.INFO, "weir.inference.native"):
        core = make_core(tiny.directory)
        make_core(tiny.directory)
    loader.load.cache_clear()

    outcome = run_all(core, [make_request([9, 10, 11], 4)])[0]

    assert len(outcome.token_ids) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "native kernels are disabled by WEIR_NATIVE=0; computing with torch"
    ]


def test_without_a_compiler_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(loader.SWITCH, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    loader.load.cache_clear()

    library = loader.load()
    loader.load.cache_clear()

    assert library is None
    assert "none of c++, g++, clang++ is installed" in caplog.text


@needs_compiler
def test_a_library_of_the_image_serves_without_a_compiler_and_computes_the_same(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [make_request(random_prompt(random.Random(seed), 40), 12) for seed in range(3)]
    expected = [outcome.token_ids for outcome in run_all(make_core(tiny.directory), requests)]
    kind = next(each for each in loader.INSTRUCTION_SETS if can_run(each))
    image = tmp_path / "prebuilt"
    image.mkdir()
    shutil.copy(loader.compiled(loader.cache_directory()), image / loader.prebuilt_name(kind))
    monkeypatch.setattr(loader, "PREBUILT", image)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(loader.CACHE_DIRECTORY, str(tmp_path / "no cache"))
    loader.load.cache_clear()

    with caplog.at_level(logging.INFO, "weir.inference.native"):
        outcomes = run_all(make_core(tiny.directory), requests)
    name = loader.library_name()
    loader.load.cache_clear()

    assert [outcome.token_ids for outcome in outcomes] == expected
    assert name == Path(loader.prebuilt_name(kind)).stem
    assert f"native kernels are in use: {image / loader.prebuilt_name(kind)}" in caplog.text


def can_run(each: loader.InstructionSet) -> bool:
    return each.machine == platform.machine() and each.cpu_flags <= loader._cpu_flags()


@needs_compiler
def test_an_image_s_build_makes_a_library_for_each_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The steps of the Dockerfile, on a source that compiles at once."""
    source = tmp_path / "sources" / "decoder.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }\n', encoding="utf-8")
    monkeypatch.setattr(loader, "SOURCE", source)
    out = tmp_path / "prebuilt"

    made = build(out)

    mine = [each for each in loader.INSTRUCTION_SETS if each.machine == platform.machine()]
    assert [path.name for path in made] == [loader.prebuilt_name(each) for each in mine]
    assert sorted(out.iterdir()) == sorted(made)
    runnable = [out / loader.prebuilt_name(each) for each in mine if can_run(each)]
    assert loader.prebuilt(out) == next(iter(runnable), None), "the best that this processor can run"
    monkeypatch.setattr(loader, "_cpu_flags", lambda: frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}))
    if platform.machine() == "x86_64":
        assert loader.prebuilt(out) == made[-1], "an older processor gets what it can run"
    source.write_text('extern "C" int one() { return 2; }\n', encoding="utf-8")
    assert loader.prebuilt(out) is None, "a library of other sources is not used"


def test_an_image_s_build_needs_no_package() -> None:
    """Its stage has Python and a compiler alone."""
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.'); import inference.native.build"]

    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2])


@needs_compiler
def test_a_broken_source_is_reported_with_the_compilers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "decoder.cpp"
    broken.write_text("this is no C++", encoding="utf-8")
    monkeypatch.setattr(loader, "SOURCE", broken)

    with pytest.raises(loader.NativeUnavailable, match=r"failed to compile decoder\.cpp"):
        loader.compiled(tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-made stays"


@needs_compiler
def test_an_unwritable_cache_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(loader.NativeUnavailable, match="compiling into"):
        loader.compiled(tmp_path / "file" / "cache")


@needs_compiler
def test_the_library_is_compiled_once_and_anew_for_another_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "decoder.cpp"
    source.write_text('extern "C" int one() { return 1; }\n', encoding="utf-8")
    monkeypatch.setattr(loader, "SOURCE", source)

    first = loader.compiled(tmp_path / "cache")
    made_ns = first.stat().st_mtime_ns
    again = loader.compiled(tmp_path / "cache")
    source.write_text('extern "C" int one() { return 2; }\n', encoding="utf-8")
    changed = loader.compiled(tmp_path / "cache")
    (tmp_path / "header.h").write_text("", encoding="utf-8")
    with_header = loader.compiled(tmp_path / "cache")

    assert len({first, changed, with_header}) == 3
    assert (again, again.stat().st_mtime_ns) == (first, made_ns)


@needs_compiler
def test_a_process_ends_while_its_decoder_lives(tiny: TinyCheckpoint) -> None:
    """The decoder's threads must not keep the host from exiting, nor crash it on the way out."""
    program = (
        "import torch; torch.set_num_threads(2)\n"
        "from pathlib import Path\n"
        "from tests.inference.running import *\n"
        f"core = make_core(Path({str(tiny.directory)!r}))\n"
        "print(len(run_all(core, [make_request([9, 10], 5)])[0].token_ids))\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (0, "5\n"), ended.stderr


class TestTableRows:
    """Each start leads to the sequence's own blocks, whatever came and went before."""

    def test_follow_tables_that_grow_end_and_begin_again(self) -> None:
        rng = random.Random(9)
        width = 12
        rows = TableRows(width)
        sequences = [_sequence(number, [1]) for number in range(9)]
        for _ in range(300):
            for sequence in sequences:
                if rng.random() < 0.1 or len(sequence.block_table) == width:
                    sequence.block_table = []
                sequence.block_table += [
                    rng.randrange(1000) for _ in range(rng.randrange(0, width - len(sequence.block_table) + 1))
                ]
            chunks = [Chunk(sequence, 1, completes=True) for sequence in rng.sample(sequences, rng.randrange(1, 10))]

            starts = rows.starts(chunks)

            for chunk, start in zip(chunks, starts, strict=True):
                table = chunk.sequence.block_table
                assert rows._rows.reshape(-1)[start : start + len(table)].tolist() == table
                assert start % width == 0

    def test_refuse_a_table_beyond_the_context(self) -> None:
        sequence = _sequence(0, [1])
        sequence.block_table = [0] * 5

        with pytest.raises(InvariantViolated, match="5 KV blocks"):
            TableRows(4).starts([Chunk(sequence, 1, completes=True)])
