"""Observations about an engine, one per question of a doctor command, and the report of them.

The adapters handle most answers, expected or not. The answers show which precautions an
installation needs, and where the engine differs from its documentation.
"""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from common.gpus import GpusUnknown, read_gpus, visible_gpus
from common.scrubbing import Scrubber
from inference.checkpoint.json_files import read_json
from inference.engine import GrammarKind, ModelInfo, ResponseFormat

REPORT = "weir doctor, format 1"
Patient = TypeVar("Patient")  # an engine under examination, as a list of questions needs it

FORMATS = (
    ResponseFormat(
        GrammarKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    ),
    ResponseFormat(GrammarKind.REGEX, "[0-9]{3}"),
)


class Verdict(StrEnum):
    """Verdict on an answer: as documented, different but handled by the adapter, or unusable."""

    EXPECTED = "expected"
    OTHER = "other"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Observation:
    """Answer to one question of a doctor command, with the verdict on it."""

    question: str
    verdict: Verdict
    seen: str


Question = Callable[[Patient], Awaitable[tuple[Verdict, str]]]


def expected(condition: bool) -> Verdict:
    """Judge an answer that the adapter does not depend on."""
    return Verdict.EXPECTED if condition else Verdict.OTHER


def needed(condition: bool) -> Verdict:
    """Judge an answer that the adapter depends on."""
    return Verdict.EXPECTED if condition else Verdict.BAD


async def ask_all(
    questions: Sequence[Question[Patient]],
    patient: Patient,
    observe: Callable[[Observation], None] = lambda observation: None,
) -> list[Observation]:
    """Ask all questions in order. The text of a question is the docstring of its function.

    Each observation is passed to `observe` at once, since the engine's process may die before the
    last question.
    """
    found = []
    for question in questions:
        question_text = inspect.getdoc(question) or repr(question)
        try:
            verdict, seen = await question(patient)
        except Exception as error:  # the remaining questions are still useful
            verdict, seen = Verdict.BAD, f"no answer: {error!r}"
        found.append(Observation(question_text, verdict, seen))
        observe(found[-1])
    return found


def report_of(
    examined: str,
    found: Sequence[Observation],
    facts: Mapping[str, object],
    scrubber: Scrubber,
) -> dict[str, Any]:
    """Build a report that can be sent to others. `facts` describes the examined model or machine
    and must not contain secrets.

    `scrubber` removes secrets from the texts, such as error messages.
    """
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }
    try:
        machine["gpus"] = [asdict(gpu) for gpu in read_gpus(visible_gpus()).values()]
    except GpusUnknown as error:
        machine["gpus"] = str(error)
    report: dict[str, Any] = scrubber.json(
        {
            "report": REPORT,
            "weir_version": metadata.version("weir-server"),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "examined": examined,
            "machine": machine,
            "facts": facts,
            "observations": [asdict(each) for each in found],
        }
    )
    return report


def checkpoint_facts(model: ModelInfo) -> dict[str, object]:
    """Collect facts from a checkpoint's public configuration, without its path and name."""
    config = read_json(Path(model.directory) / "config.json")
    other = Path(model.directory) / "hf_quant_config.json"  # of NVIDIA's ModelOpt
    quantization = config.get("quantization_config") or {}
    quantized = read_json(other).get("quantization", {}) if other.exists() else {}
    text = config.get("text_config") or config
    return {
        "architecture": model.architecture,
        "dtype": text.get("dtype") or text.get("torch_dtype"),
        "quantization": quantized.get("quant_algo") or quantization.get("quant_method"),
        "expert_count": text.get("num_experts")
        or text.get("num_local_experts")
        or text.get("n_routed_experts"),
        "context_window_tokens": model.context_window_tokens,
        "vocabulary_size": model.vocabulary_size,
    }


async def accepted(
    formats: Iterable[ResponseFormat], answer: Callable[[ResponseFormat], Awaitable[object]]
) -> tuple[Verdict, str]:
    """Try response formats and report which are accepted. `answer` requests one output."""
    kept, failed = [], []
    for response_format in formats:
        try:
            await answer(response_format)
            kept.append(response_format.kind.value)
        except Exception as error:  # any failure belongs in the report
            failed.append(f"{response_format.kind.value} ({error!r})")
    return expected(
        not failed
    ), f"accepted: {', '.join(kept) or 'none'}; refused: {', '.join(failed) or 'none'}"
