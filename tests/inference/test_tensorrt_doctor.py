"""The doctor's questions to the double: documented answers, faults, a report without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from api.cli.commands import doctor as commands
from common.gpus import Gpu
from inference.adapters.tensorrt_adapters import Adapter, check_report, read_adapter
from inference.adapters.tensorrt_engine import load_message
from inference.adapters.tensorrt_settings import VERSION
from inference.doctor import tensorrt as doctor
from inference.doctor import tensorrt_questions as questions
from inference.doctor.findings import Observation, Verdict
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.tensorrt_adapters import write_adapter
from tests.inference.tensorrt_engines import find_double, tensorrt_settings
from tests.inference.tensorrt_queue import double_imported

KILLED = "After a worker's death, do its sequence and the library's health check stay silent"
SIZES: dict[str, Any] = {
    "context_window_tokens_max": 2048,
    "step_token_count_max": 64,
    "running_sequence_count_max": 2,
}

ADAPTERS = "Do LoRA adapters change the output"


def ask(
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    faults: str,
    adapters: tuple[Adapter, ...] = (),
) -> dict[str, Any]:
    """Ask the questions in this process."""
    monkeypatch.setattr(questions, "SILENCE_S", 0.5)
    monkeypatch.setattr(questions, "HELPERS_END_S", 2.0)
    found: list[Observation] = []
    with double_imported(monkeypatch, faults):
        _, load = load_message(tensorrt_settings(tiny, **SIZES))
        questions.ask(msgspec.structs.replace(load, adapters=adapters), found.append)
    return {observation.question.partition("?")[0]: observation for observation in found}


def test_a_machine_that_does_what_is_written_down(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ask(tiny, monkeypatch, "")

    assert len(found) == len(questions.QUESTIONS) + 2
    assert [each for each in found.values() if each.verdict is not Verdict.EXPECTED] == []
    assert found["Does it cache prompts, separated by salt"].seen.startswith("cold 0, again 320")
    assert "silence" in found[KILLED].seen
    [processes] = [each for question, each in found.items() if "live on when" in question]
    assert "needed: 1" in processes.seen


def test_a_machine_on_which_the_engine_would_not_work(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "SUBMITTED", questions.SUBMITTED | {"tenant"})
    monkeypatch.setattr(questions, "SUBMIT_US_MAX", 0.0)
    found = ask(tiny, monkeypatch, "lonely,mute_abort")

    assert found["Does `generate_async` accept the adapter's arguments"].verdict is Verdict.BAD
    assert found["Does an abort after the first token end it as cancelled"].verdict is Verdict.OTHER
    assert found["Does a submission return at once"].verdict is Verdict.OTHER
    assert "no worker process" in found[KILLED].seen


@pytest.mark.parametrize(
    ("faults", "names", "answer"),
    [
        ("", "ab", (Verdict.EXPECTED, "yes")),
        ("", "", (Verdict.EXPECTED, "not asked: --lora names no adapter")),
        ("lora_ignored", "ab", (Verdict.OTHER, "no: the base model answers for 2 of 2")),
    ],
)
def test_adapters_are_seen_to_take_effect_or_not(
    faults: str,
    names: str,
    answer: tuple[Verdict, str],
    tiny: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "QUESTIONS", (questions.lora_adapters,))
    adapters = tuple(read_adapter(name, write_adapter(tmp_path / name)) for name in names)

    found = ask(tiny, monkeypatch, faults, adapters)[ADAPTERS]

    assert (found.verdict, found.seen) == answer


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes find the double, and shorten the waits."""
    find_double(monkeypatch)
    monkeypatch.setattr(doctor, "OUTLIVES_S", 0.2)
    monkeypatch.setattr(doctor, "FREE_S", 0.5)
    monkeypatch.setattr(doctor, "QUESTIONS", "tests.inference.short_questions")


@pytest.mark.usefixtures("double")
async def test_a_killed_worker_leaves_processes_that_weir_ends(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter((1 << 30, 60 << 30, 1 << 30))
    monkeypatch.setattr(doctor, "read_gpus", lambda ids: {"0": Gpu("H100", 80 << 30, next(used))})
    settings = tensorrt_settings(tiny, **SIZES)

    found = await doctor._killed_worker(settings, load_message(settings)[1], ["0"])

    assert found.verdict is Verdict.EXPECTED
    assert "alive after Weir killed them: none" in found.seen
    assert "outliving it: python" in found.seen
    assert "before 1,073,741,824, loaded 64,424,509,440, afterwards 1,073,741,824" in found.seen


@pytest.mark.usefixtures("double")
async def test_memory_that_stays_in_use_is_bad(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter((1 << 30, *[60 << 30] * 100))
    monkeypatch.setattr(doctor, "read_gpus", lambda ids: {"0": Gpu("H100", 80 << 30, next(used))})
    settings = tensorrt_settings(tiny, **SIZES)

    found = await doctor._killed_worker(settings, load_message(settings)[1], ["0"])

    assert found.verdict is Verdict.BAD


@pytest.mark.usefixtures("double")
def test_a_load_that_ends_the_process_is_in_the_report_without_secrets(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", "postgresql://weir:hunter22@db.internal/weir")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    monkeypatch.setenv("TENSORRT_DOUBLE", "abort_on_load")

    result = CliRunner().invoke(
        commands, ["tensorrt", "--model", str(tiny.directory), "--batch", "2", "--json"]
    )
    report = json.loads(result.stdout)

    assert result.exit_code == 1
    [only] = report["observations"]
    assert only["question"] == doctor.ALIVE
    assert "MPI_ABORT was invoked on rank 0" in only["seen"]
    assert report["facts"]["architecture"] == "LlamaForCausalLM"
    assert report["facts"]["options"]["tensor_parallel_size"] == 1
    for secret in ("hunter22", "db.internal", "hf_abc", str(tiny.directory.parent)):
        assert secret not in result.stdout


@pytest.mark.usefixtures("double")
def test_the_command_asks_in_a_process_of_its_own(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("max_seq_len: 2048\nmax_num_tokens: 64\nmax_batch_size: 2\n")
    arguments = ["tensorrt", "--model", str(tiny.directory), "--config", str(config), "--json"]
    for name in ("a", "b"):
        arguments += ["--lora", str(write_adapter(tmp_path / name))]

    result = CliRunner().invoke(commands, arguments)
    report = json.loads(result.stdout)
    found = {each["question"]: each for each in report["observations"]}

    assert [each for each in found.values() if each["verdict"] != "expected"] == []
    assert result.exit_code == 0
    assert len(found) == len(questions.QUESTIONS) + 4
    assert report["facts"]["limits"]["running_sequence_count_max"] == 2
    assert found[doctor.ALIVE]["seen"] == "yes"
    (tmp_path / "report.json").write_text(result.stdout)
    check_report(tmp_path / "report.json", VERSION)
    assert str(tmp_path) not in result.stdout
    assert found[doctor.KILLED]["seen"].endswith("the GPU's memory is not known")
