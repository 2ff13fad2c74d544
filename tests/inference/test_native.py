"""The native decoder equals the torch decoder, which replaces it if unavailable."""

from __future__ import annotations

import logging
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
from inference.core.options import ComputeDtype, EngineOptions, KvDtype
from inference.core.scheduler import Chunk, StepPlan
from inference.core.sequence import Sequence as EngineSequence
from inference.decoder.model import Logits
from inference.errors import InvariantViolated
from inference.limits import EngineLimits
from inference.native import loader
from inference.native.build import build
from inference.native.decoder import NativeDecoder, TableRows, supports
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import make_core, make_request, random_prompt, run_all

needs_compiler = pytest.mark.skipif(
    loader.load() is None, reason="no native library on this machine, or switched off"
)

SHAPES = {
    "grouped heads": LlamaShape(),
    "nine rows of a group": LlamaShape(hidden_size=144, head_count=9, kv_head_count=1, head_dim=16),
    "heads of 48": LlamaShape(hidden_size=96, head_count=4, head_dim=48),
    "heads of 128, biases": LlamaShape(head_dim=128, attention_bias=True, mlp_bias=True),
    "odd panels, tied": LlamaShape(
        hidden_size=72, intermediate_size=130, head_dim=16, tied_embeddings=True
    ),
    "window": LlamaShape(architecture="MistralForCausalLM", sliding_window=40),
    "head norms": LlamaShape(architecture="Qwen3ForCausalLM", head_dim=32),
}
# As a share of the logits' spread.
MEAN_DIFFERENCE_MAX = {"float32": 1e-5, "bfloat16": 0.07, "int8": 0.07}
# A number between two whole ones may be rounded either way after sums in another order.
KV_DIFFERENCE_MAX = 1e-3
SMALLER_KV: list[tuple[ComputeDtype, KvDtype]] = [
    ("float32", "int8"),
    ("float32", "bfloat16"),
    ("bfloat16", "int8"),
]

LIBRARY = loader.load()
LEVELS = (
    [] if LIBRARY is None else [*loader.available_levels(LIBRARY, is_bfloat16=True)]
)  # best first


@dataclass(slots=True)
class Recorder:
    """Logits of a runner's steps, in order."""

    logits: list[torch.Tensor] = field(default_factory=list)


def run_steps(
    directory: Path,
    dtype: ComputeDtype,
    monkeypatch: pytest.MonkeyPatch,
    *,
    native: bool,
    level: str = "1",
    chunk_size: int = 200,
    kv: KvDtype = "auto",
) -> list[torch.Tensor]:
    """Return all logits of prompts computed in chunks, then of steps with fixed tokens.

    level: best instruction set that may be used.
    """
    recorder = Recorder()
    monkeypatch.setenv(loader.SWITCH, level)
    monkeypatch.setattr(
        "inference.core.model_runner.supports", supports if native else lambda config, dtype: False
    )

    def recording(chunks: list[Chunk]) -> Logits:
        logits = forward(chunks)
        assert logits.best == logits.values.numpy().argmax(axis=-1).tolist()
        recorder.logits.append(logits.values.clone())
        return logits

    options = EngineOptions(
        str(directory), EngineLimits(1024), dtype, kv_cache_bytes=32 << 20, kv_dtype=kv
    )
    runner = ModelRunner(options, read_config(directory), lambda fraction: None)
    assert isinstance(runner._decoder, NativeDecoder) == native
    if native and level != "1" and dtype != "float32":
        assert runner.kernels == level
    forward = runner._decoder.forward
    monkeypatch.setattr(runner._decoder, "forward", recording)
    rng = random.Random(1)
    sequences = [
        _sequence(number, random_prompt(rng, length))
        for number, length in enumerate((1, 16, 17, 70, 555))
    ]
    next_block = 0
    for sequence in sequences:
        count = -(-(len(sequence.token_ids) + 8) // 16)
        # Backwards: the order must not matter.
        sequence.block_table = list(range(next_block + count - 1, next_block - 1, -1))
        next_block += count
    for step in range(10):
        plan = StepPlan()
        for sequence in sequences:
            plan.add(sequence, min(sequence.uncomputed_token_count, chunk_size))
        runner.run(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed_token_count += chunk.token_count
            if sequence.uncomputed_token_count == 0:
                sequence.token_ids.append(7 + (step * 31 + sequence.number) % 300)
    monkeypatch.undo()
    return recorder.logits


def _sequence(number: int, prompt: Sequence[int]) -> EngineSequence:
    """Return the parts of a sequence that the runner reads."""
    request = make_request(prompt, 64)
    return EngineSequence(number, request, seed=0, end_token_ids=frozenset(), detokenizer=None)  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in SHAPES for dtype in ("float32", "bfloat16", "int8")],
)
def test_logits_equal_those_of_torch(
    name: str, dtype: ComputeDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, seed=3, shape=SHAPES[name]).directory

    reference = run_steps(directory, dtype, monkeypatch, native=False)

    for level in LEVELS:
        native = run_steps(directory, dtype, monkeypatch, native=True, level=level)
        assert [len(rows) for rows in native] == [len(rows) for rows in reference]
        assert max(map(len, native)) == 5
        for ours, theirs in zip(native, reference, strict=True):
            difference = (ours - theirs).abs().mean()
            assert difference < MEAN_DIFFERENCE_MAX[dtype] * theirs.std(), level


@needs_compiler
@pytest.mark.parametrize(("dtype", "kv"), SMALLER_KV)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_with_a_smaller_kv_cache_equal_those_of_torch(
    name: str, dtype: ComputeDtype, kv: KvDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 both decoders store the same numbers. Those of the exact cache are farther away."""
    directory = make_checkpoint(tmp_path, seed=3, shape=SHAPES[name]).directory

    reference = torch.cat(run_steps(directory, dtype, monkeypatch, native=False, kv=kv))

    exact = torch.cat(run_steps(directory, dtype, monkeypatch, native=False))
    difference_max = KV_DIFFERENCE_MAX if dtype == "float32" else MEAN_DIFFERENCE_MAX[dtype]
    for level in LEVELS:
        native = torch.cat(
            run_steps(directory, dtype, monkeypatch, native=True, level=level, kv=kv)
        )
        difference = (native - reference).abs().mean() / reference.std()
        assert difference < difference_max, level
    change = (reference - exact).abs().mean() / exact.std()
    assert 0 < change < MEAN_DIFFERENCE_MAX["int8"]
    assert dtype != "float32" or difference < change / 2


@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_one_gib_holds_almost_twice_the_contexts_in_int8(head_dim: int, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, shape=LlamaShape(head_dim=head_dim)).directory
    config = read_config(directory)

    bfloat16, int8 = (
        EngineOptions(str(directory), EngineLimits(1024), "bfloat16", kv_dtype=kv)
        for kv in ("auto", "int8")
    )

    assert int8.block_count(config) >= 1.9 * bfloat16.block_count(config)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("dtype", "kv"),
    [("float32", "auto"), ("bfloat16", "auto"), ("int8", "auto"), *SMALLER_KV],
)
def test_logits_do_not_depend_on_the_size_of_chunks(
    dtype: ComputeDtype,
    kv: KvDtype,
    level: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactly, for a prompt computed at once, in parts, and token by token."""
    directory = make_checkpoint(tmp_path, seed=3, shape=SHAPES["heads of 48"]).directory
    prompt = random_prompt(random.Random(5), 300)

    def last_logits(chunk_size: int) -> torch.Tensor:
        monkeypatch.setenv(loader.SWITCH, level)
        options = EngineOptions(
            str(directory), EngineLimits(1024), dtype, kv_cache_bytes=32 << 20, kv_dtype=kv
        )
        runner = ModelRunner(options, read_config(directory), lambda fraction: None)
        sequence = _sequence(0, prompt)
        sequence.block_table = list(range(20))
        while sequence.uncomputed_token_count:
            plan = StepPlan()
            plan.add(sequence, min(sequence.uncomputed_token_count, chunk_size))
            logits = runner._decoder.forward(plan.chunks).values
            sequence.computed_token_count += plan.chunks[0].token_count
        return logits.clone()

    whole = last_logits(300)

    for chunk_size in (1, 7, 16, 33, 150):
        assert torch.equal(last_logits(chunk_size), whole), chunk_size


@needs_compiler
def test_bfloat16_is_nearer_to_exact_than_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with fp32 on equal weights, native is more exact."""
    directory = make_checkpoint(tmp_path, seed=4, shape=LlamaShape(layer_count=4)).directory

    exact = torch.cat(run_steps(directory, "float32", monkeypatch, native=False))
    native = torch.cat(run_steps(directory, "bfloat16", monkeypatch, native=True))
    reference = torch.cat(run_steps(directory, "bfloat16", monkeypatch, native=False))

    assert (native - exact).abs().mean() <= 1.05 * (reference - exact).abs().mean()


@pytest.fixture
def several_threads() -> Iterator[None]:
    """Make new cores use three threads."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@needs_compiler
def test_tokens_do_not_depend_on_threads(tiny: TinyCheckpoint, several_threads: None) -> None:
    rng = random.Random(8)
    requests = [make_request(random_prompt(rng, rng.randrange(1, 300))) for _ in range(12)]

    on_three = run_all(make_core(tiny.directory), requests)
    torch.set_num_threads(1)
    on_one = run_all(make_core(tiny.directory), requests)

    assert [outcome.token_ids for outcome in on_three] == [outcome.token_ids for outcome in on_one]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_logits_do_not_depend_on_the_number_of_threads(
    level: str, tmp_path: Path, several_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two positions share the words of their values in bfloat16, which two threads must not write
    at once. Many heads and layers make that likely.
    """
    make_checkpoint(
        tmp_path, shape=LlamaShape(head_count=8, kv_head_count=8, head_dim=64, layer_count=6)
    )

    def logits() -> torch.Tensor:
        return torch.cat(
            run_steps(tmp_path, "bfloat16", monkeypatch, native=True, level=level, chunk_size=600)
        )

    on_three = [logits() for _ in range(3)]
    torch.set_num_threads(1)
    on_one = logits()

    assert all(torch.equal(each, on_one) for each in on_three)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_logits_do_not_depend_on_the_order_in_which_threads_take_pieces(
    level: str, tmp_path: Path, several_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, seed=3, shape=SHAPES["grouped heads"]).directory
    assert LIBRARY is not None
    number = loader.available_levels(LIBRARY, is_bfloat16=True)[level]

    def logits(seed: int) -> torch.Tensor:
        LIBRARY.weir_shuffle_pieces(number, seed)
        return torch.cat(run_steps(directory, "int8", monkeypatch, native=True, level=level))

    try:
        ascending, *shuffled = [logits(seed) for seed in (0, 1, 2_654_435_761)]
    finally:
        LIBRARY.weir_shuffle_pieces(number, 0)

    assert all(torch.equal(each, ascending) for each in shuffled)


@pytest.fixture(scope="module")
def team_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the program that holds threads up, or skip the test without a compiler."""
    compiler = next(filter(None, map(shutil.which, loader.COMPILERS)), None)
    if compiler is None:
        pytest.skip("no compiler")
    source, program = Path(__file__).with_name("team.cpp"), tmp_path_factory.mktemp("team") / "team"
    command = [compiler, "-std=c++20", "-O1", "-pthread", "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return program


@pytest.mark.parametrize("case", ["lost", "late", "random"])
def test_a_phase_ends_with_its_last_piece_and_waits_for_no_thread(
    case: str, team_program: Path
) -> None:
    ended = subprocess.run(
        [team_program, case], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stdout) == (0, "ok\n")


def test_switched_off_computes_with_torch_and_says_so(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    loader.load.cache_clear()
    with caplog.at_level(logging.INFO, "weir.inference.native"):
        core = make_core(tiny.directory)
        make_core(tiny.directory)
        assert not loader.is_expected()
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
    monkeypatch.setattr(loader, "PREBUILT", tmp_path)
    monkeypatch.setenv(loader.CACHE_DIRECTORY, str(tmp_path / "no cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    loader.load.cache_clear()

    library = loader.load()
    loader.load.cache_clear()

    assert library is None
    assert not loader.is_expected()
    assert "none of c++, g++, clang++ is installed" in caplog.text


def test_an_unknown_level_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(loader.SWITCH, "avx9")
    loader.load.cache_clear()

    library = loader.load()
    loader.load.cache_clear()

    assert library is None
    if LIBRARY is not None:
        assert "WEIR_NATIVE must be 0, 1 or one of " in caplog.text


@needs_compiler
def test_a_built_library_serves_without_a_compiler_and_computes_the_same(
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = [make_request(random_prompt(random.Random(seed), 40), 12) for seed in range(3)]
    expected = [outcome.token_ids for outcome in run_all(make_core(tiny.directory), requests)]
    built = tmp_path / "prebuilt" / loader.library_file()
    built.parent.mkdir()
    shutil.copy(str(LIBRARY._name if LIBRARY else ""), built)
    monkeypatch.setattr(loader, "PREBUILT", built.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(loader.CACHE_DIRECTORY, str(tmp_path / "no cache"))
    loader.load.cache_clear()

    with caplog.at_level(logging.INFO, "weir.inference.native"):
        outcomes = run_all(make_core(tiny.directory), requests)
        assert loader.is_expected()
    layout = loader.layout_name(is_bfloat16=True)
    loader.load.cache_clear()

    assert [outcome.token_ids for outcome in outcomes] == expected
    assert layout == f"{built.stem} {LEVELS[0]}"
    assert f"native kernels are in use, up to {LEVELS[0]}: {built}" in caplog.text


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the sources by small ones that compile at once."""
    source = tmp_path / "sources" / "decoder.cpp"
    source.parent.mkdir()
    source.write_text("static int one() { return 1; }\n", encoding="utf-8")
    source.with_name("library.cpp").write_text("int library() { return 1; }\n", encoding="utf-8")
    monkeypatch.setattr(loader, "SOURCE", source)
    return source


@needs_compiler
def test_a_build_makes_one_library_and_removes_old_ones(small_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "prebuilt"

    first = build(out)
    again = build(out)

    assert again == first == loader.prebuilt(out)
    assert [path.name for path in out.iterdir()] == [loader.library_file()]
    small_source.write_text("static int two() { return 2; }\n", encoding="utf-8")
    assert loader.prebuilt(out) is None, "a library of other sources is not used"
    changed = build(out)
    assert [*out.iterdir()] == [changed]
    assert changed != first


def test_an_image_s_build_needs_no_package() -> None:
    """The build stage has only Python and a compiler."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys; sys.path.insert(0, '.'); import inference.native.build",
    ]

    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2])


@needs_compiler
def test_a_broken_source_fails_with_the_compilers_words(small_source: Path, tmp_path: Path) -> None:
    small_source.write_text("this is no C++", encoding="utf-8")

    with pytest.raises(loader.NativeUnavailable, match=r"failed to compile decoder\.cpp"):
        loader.compiled(tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-made stays"


@needs_compiler
def test_an_unwritable_cache_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(loader.NativeUnavailable, match="compiling into"):
        loader.compiled(tmp_path / "file" / "cache")


@needs_compiler
def test_the_library_is_compiled_once_per_source(small_source: Path, tmp_path: Path) -> None:
    first = loader.compiled(tmp_path / "cache")
    made_ns = first.stat().st_mtime_ns
    again = loader.compiled(tmp_path / "cache")
    small_source.write_text("static int two() { return 2; }\n", encoding="utf-8")
    changed = loader.compiled(tmp_path / "cache")
    small_source.with_name("header.h").write_text("", encoding="utf-8")
    with_header = loader.compiled(tmp_path / "cache")

    assert len({first, changed, with_header}) == 3
    assert (again, again.stat().st_mtime_ns) == (first, made_ns)


@needs_compiler
def test_a_process_ends_while_its_decoder_runs(tiny: TinyCheckpoint) -> None:
    """The decoder's threads must not keep the worker from exiting, nor crash it."""
    program = (
        "import torch; torch.set_num_threads(2)\n"
        "from pathlib import Path\n"
        "from tests.inference.running import *\n"
        f"core = make_core(Path({str(tiny.directory)!r}))\n"
        "print(len(run_all(core, [make_request([9, 10], 5)])[0].token_ids))\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stdout) == (0, "5\n"), ended.stderr


class TestTableRows:
    """Each start leads to the sequence's own blocks after any history."""

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
                    rng.randrange(1000)
                    for _ in range(rng.randrange(0, width - len(sequence.block_table) + 1))
                ]
            chunks = [
                Chunk(sequence, 1, completes=True)
                for sequence in rng.sample(sequences, rng.randrange(1, 10))
            ]

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
