"""Packed weights in a file: the same tokens, one copy, and never those of another checkpoint."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from inference.core.engine_core import EngineCore
from inference.core.options import ComputeDtype, EngineOptions
from inference.errors import CheckpointInvalid
from inference.limits import EngineLimits
from inference.native import decoder as packing
from inference.native import loader
from inference.native.packed_file import PackedFile, PackedTarget, trim_packed
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.inference.running import SMALL_KV_BYTES, make_request, run_all
from tests.inference.worker_engines import prompt

pytestmark = pytest.mark.skipif(
    loader.load() is None, reason="torch computes here, and reads weights where they lie anyway"
)

SHAPES = {
    "biases": LlamaShape(layer_count=2, attention_bias=True, mlp_bias=True),
    "odd panels, tied": LlamaShape(
        layer_count=2, hidden_size=72, intermediate_size=130, head_dim=16, tied_embeddings=True
    ),
    "head norms": LlamaShape(architecture="Qwen3ForCausalLM", layer_count=2, head_dim=32),
    "window": LlamaShape(architecture="MistralForCausalLM", layer_count=2, sliding_window=20),
}


@pytest.fixture(autouse=True)
def _keep_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACKED_BYTES_MIN", 0)


def core_of(
    directory: Path, packed: Path | None, dtype: ComputeDtype = "float32", bytes_max: int = 1 << 40
) -> EngineCore:
    limits = EngineLimits(context_window_tokens=256, step_token_count_max=128)
    index = None if packed is None else PackedTarget(str(packed), bytes_max)
    return EngineCore(EngineOptions(str(directory), limits, dtype, SMALL_KV_BYTES, packed=index))


def tokens(core: EngineCore) -> list[list[int]]:
    return [
        outcome.token_ids
        for outcome in run_all(core, [make_request(prompt(seed), 12) for seed in range(3)])
    ]


def files(packed: Path) -> list[Path]:
    return sorted(packed.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_mapped_weights_give_the_tokens_of_packed_ones(
    tmp_path: Path, dtype: ComputeDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory)
    expected = tokens(core_of(directory, None, dtype))

    first = tokens(core_of(directory, packed, dtype))
    [file] = files(packed)
    # The checkpoint's own weights are not read again.
    monkeypatch.setattr("inference.core.model_runner.load_weights", None)
    second = tokens(core_of(directory, packed, dtype))

    assert first == second == expected
    assert files(packed) == [file]
    assert file.stat().st_mode & 0o077 == 0 or packed.stat().st_mode & 0o077 == 0, (
        "weights are for nobody else to change"
    )


def test_another_level_has_its_own_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes may be equal, so only the file's name tells the layouts apart."""
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory)
    library = loader.load()
    assert library is not None
    levels = loader.available_levels(library, is_bfloat16=True)
    kept: set[Path] = set()

    for level in levels:
        monkeypatch.setenv(loader.SWITCH, level)
        assert tokens(core_of(directory, packed, "int8")) == tokens(
            core_of(directory, None, "int8")
        )
        [file] = files(packed)
        kept.add(file)

    assert len(kept) == len(levels)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_that_not_every_model_has_are_kept_too(tmp_path: Path, shape: LlamaShape) -> None:
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory, shape=shape)
    expected = tokens(core_of(directory, None))

    assert [tokens(core_of(directory, packed)) for _ in range(2)] == [expected] * 2


def test_another_checkpoint_is_packed_again_without_the_old_file(tmp_path: Path) -> None:
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory, seed=1)
    before = tokens(core_of(directory, packed))
    [old] = files(packed)
    for file in directory.iterdir():
        file.unlink()
    make_checkpoint(directory, seed=2)

    after = tokens(core_of(directory, packed))

    assert after == tokens(core_of(directory, None)) != before
    [new] = files(packed)
    assert new != old


def test_weights_that_are_not_finite_are_refused_and_not_kept(tmp_path: Path) -> None:
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory)
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-64:] = b"\xff" * 64
    weights.write_bytes(content)

    with pytest.raises(CheckpointInvalid, match="not finite"):
        core_of(directory, packed)

    assert not packed.exists()


@pytest.mark.parametrize("damage", ["torn", "empty", "other", "parts missing"])
def test_an_incomplete_file_is_written_again(tmp_path: Path, damage: str) -> None:
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory)
    expected = tokens(core_of(directory, packed))
    [file] = files(packed)
    content = file.read_bytes()
    if damage == "parts missing":
        length = int.from_bytes(content[8:16], "little")
        header = b"[]".ljust(length)
        file.write_bytes(content[:16] + header + content[16 + length :])
    else:
        file.write_bytes(
            {"torn": content[:-5000], "empty": b"", "other": b"something else" * 1000}[damage]
        )

    assert tokens(core_of(directory, packed)) == expected
    assert file.read_bytes() == content
    assert len(list(PackedFile(file).parts())) > 10


def test_without_room_each_worker_has_its_own(tmp_path: Path) -> None:
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory)
    packed.write_text("in the way")

    assert tokens(core_of(directory, packed)) == tokens(core_of(directory, None))


def test_unused_packed_weights_are_removed_above_the_limit(tmp_path: Path) -> None:
    """The least recently used go first; mapped files stay."""
    packed = tmp_path / "packed"
    models = [tmp_path / f"model{seed}" for seed in range(4)]
    made: list[Path] = []
    for seed, directory in enumerate(models):
        make_checkpoint(directory, seed=seed)
        core_of(directory, packed)
        [new] = set(files(packed)) - set(made)
        os.utime(new, ns=(seed, seed))  # in this order, whatever the resolution of the clock
        made.append(new)
    size = made[0].stat().st_size

    mapped = core_of(models[0], packed, bytes_max=4 * size)
    assert files(packed) == sorted(made)
    os.utime(made[0], ns=(0, 0))
    trim_packed(packed, 3 * size)
    assert files(packed) == sorted([made[0], *made[2:]]), (
        "the second was used before the third, and the first is mapped"
    )
    again = core_of(models[2], packed, bytes_max=0)
    assert files(packed) == sorted([made[0], made[2]]), "only what is mapped, now by two"

    assert tokens(mapped) == tokens(core_of(models[0], None))
    assert tokens(again) == tokens(core_of(models[2], None))
    del mapped, again
    gc.collect()
    trim_packed(packed, 0)
    assert files(packed) == []


def test_only_weights_that_matter_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    directory, packed = tmp_path / "model", tmp_path / "packed"
    make_checkpoint(directory)

    core_of(directory, packed)

    assert not os.path.exists(packed)
