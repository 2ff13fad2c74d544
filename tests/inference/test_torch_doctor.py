"""Examination of the embedded engine: its device, its kernels and the reasons for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from api.cli.commands import doctor as commands
from common.cpus import UsableCpus
from inference.checkpoint.checkpoint import read_config
from inference.core.options import ComputeDtype, KvDtype
from inference.doctor import embedded as doctor
from inference.doctor.findings import Verdict
from inference.native import loader
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint

KERNELS = "Which kernels compute the model, and why?"
ONE_CPU = UsableCpus(1, "affinity mask")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short measurements on one thread; forget the library that a test has excluded."""
    monkeypatch.setattr(doctor, "measure_bandwidth", lambda thread_count: 12.34e9)
    monkeypatch.setattr(doctor, "ROUNDS", 1)
    loader.load.cache_clear()
    yield
    torch.set_num_threads(1)
    loader.load.cache_clear()


def answers(
    directory: Path, dtype: ComputeDtype = "bfloat16", kv: KvDtype = "auto"
) -> dict[str, tuple[Verdict, str]]:
    found = doctor.examine(directory, dtype, kv, ONE_CPU)
    assert len(found) == len(doctor.QUESTIONS)
    assert [each for each in found if each.verdict is Verdict.BAD] == []
    return {each.question: (each.verdict, each.seen) for each in found}


def test_the_best_kernels_of_the_processor_are_expected(tiny: TinyCheckpoint) -> None:
    if (library := loader.load()) is None:
        pytest.skip("no native library on this machine, or switched off")
    levels = [*loader.available_levels(library, is_bfloat16=True)]

    found = answers(tiny.directory)

    assert found[KERNELS] == (Verdict.EXPECTED, f"{levels[0]}: best of {', '.join(levels)}")
    assert found["With how many threads does it compute, and why?"][1] == "1, by affinity mask"
    assert found["At what rate do all threads together read memory?"][1] == "12.3 GB/s"


def test_the_type_of_the_kv_cache_is_reported_with_its_capacity(tiny: TinyCheckpoint) -> None:
    question = "Which type do keys and values have, and how many tokens fit in 1 GiB?"

    seen = [answers(tiny.directory, kv=kv)[question][1] for kv in ("auto", "int8")]

    config = read_config(tiny.directory)
    heads = 2 * config.layer_count * config.kv_head_count
    tokens = [
        (1 << 30) // (16 * heads * head_bytes) * 16
        for head_bytes in (2 * config.head_dim, config.head_dim + 2)
    ]
    assert seen == [
        f"bfloat16: {tokens[0]:,} tokens in 1 GiB",
        f"int8: {tokens[1]:,} tokens in 1 GiB",
    ]


def test_excluded_kernels_are_named(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    if (library := loader.load()) is None:
        pytest.skip("no native library on this machine, or switched off")
    *_, least = loader.available_levels(library, is_bfloat16=True)
    monkeypatch.setenv(loader.SWITCH, least)

    seen = f"{least}: best of {least}, limited by WEIR_NATIVE={least}"
    assert answers(tiny.directory)[KERNELS] == (Verdict.OTHER, seen)


def test_torch_is_used_without_a_library_or_for_an_odd_shape(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(head_dim=24))
    odd = answers(tmp_path)[KERNELS]
    monkeypatch.setenv(loader.SWITCH, "0")
    loader.load.cache_clear()
    disabled = answers(tiny.directory)[KERNELS]

    slower = "torch, several times slower"
    assert disabled == (Verdict.OTHER, f"{slower}: disabled by WEIR_NATIVE=0")
    assert odd[0] is Verdict.OTHER
    assert odd[1].startswith(f"{slower}: the native kernels need heads of a multiple of 16")


def test_the_command_prints_json(tiny: TinyCheckpoint) -> None:
    result = CliRunner().invoke(commands, ["engine", "--model", str(tiny.directory), "--json"])

    assert result.exit_code == 0, result.output
    questions = [each["question"] for each in json.loads(result.stdout)["observations"]]
    assert KERNELS in questions
