"""LoRA adapters on TensorRT-LLM: applied side by side, refused where the base would answer."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.core.settings import Settings
from api.fleet.fleet import build_serving
from bench import engine_streams as streams
from common.settings import SettingInvalid
from inference.adapters.tensorrt_adapters import ATTENTION, MODULES, QUESTION, read_adapter
from inference.adapters.tensorrt_settings import VERSION, TensorRtSettings, with_config
from inference.doctor.tensorrt_questions import lora_adapters
from inference.errors import CheckpointInvalid, EngineStartFailed, RequestImpossible
from inference.routing.router import Router
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.inference.running import make_request
from tests.inference.tensorrt_adapters import write_adapter, write_report
from tests.inference.tensorrt_engines import find_double, tensorrt_settings
from tests.inference.tensorrt_queue import double_imported
from tests.inference.worker_engines import prompt, run, serving, settings_for

FAVOURED = {"formal": 17, "terse": 18}  # tokens that the double's adapters repeat


def adapted(tiny: TinyCheckpoint, folder: Path, **changes: Any) -> TensorRtSettings:
    """Return settings with two adapters."""
    adapters = tuple(
        read_adapter(name, write_adapter(folder / name, r=rank, target_modules=[module]))
        for name, rank, module in (("terse", 8, "down_proj"), ("formal", 16, "q_proj"))
    )
    return replace(tensorrt_settings(tiny, **changes), adapters=adapters)


async def test_the_base_model_and_two_adapters_answer_at_once_without_sharing_a_prefix(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_double(monkeypatch)
    request = make_request(prompt(1, 64), 6, cache_salt="tenant")
    async with serving(adapted(tiny, tmp_path)) as engine:
        base, *outcomes = await asyncio.gather(
            run(engine, request),
            *(
                run(engine, replace(request, adapter=name, cache_salt=f"tenant:{name}"))
                for name in FAVOURED
            ),
        )
        again = await run(engine, request)
        with pytest.raises(RequestImpossible, match="no LoRA adapter 'rude'"):
            await run(engine, replace(request, adapter="rude"))
        names = engine.model.adapters

    assert [each.token_ids for each in outcomes] == [[token] * 6 for token in FAVOURED.values()]
    assert [each.cached_token_count for each in (base, *outcomes)] == [0, 0, 0]
    assert again.token_ids == base.token_ids
    assert not {*base.token_ids} & {*FAVOURED.values()}
    assert again.cached_token_count == 48
    assert {*names} == {*FAVOURED}


async def test_an_engine_without_adapters_refuses_one(tiny: TinyCheckpoint) -> None:
    async with serving(settings_for(tiny)) as engine:
        with pytest.raises(RequestImpossible, match="no LoRA adapter 'terse'"):
            async with streams.stream(engine, replace(make_request([9]), adapter="terse")):
                pass


async def test_an_adapter_without_effect_fails_the_start(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_double(monkeypatch)
    settings = adapted(tiny, tmp_path, faults="lora_ignored")
    async with serving(settings, started=False) as engine:
        with pytest.raises(EngineStartFailed, match=r"'terse' .* does not change the output"):
            await engine.start()


def rewrite_rank(directory: Path) -> None:
    config = directory / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 8', '"r": 99'))


async def test_an_adapter_that_the_library_refuses_fails_the_start(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_double(monkeypatch)
    settings = adapted(tiny, tmp_path)
    for each in settings.adapters:
        rewrite_rank(Path(each.directory))
    async with serving(settings, started=False) as engine:
        with pytest.raises(EngineStartFailed, match=r"cannot be applied: .*max_lora_rank 16"):
            await engine.start()


def test_the_library_is_configured_for_all_adapters(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference.adapters.tensorrt_engine import load_message
    from inference.adapters.tensorrt_library import TensorRtLibrary

    _, load = load_message(adapted(tiny, tmp_path))
    with double_imported(monkeypatch, "lonely"):
        library = TensorRtLibrary()
        llm = library.build(load.directory, load.limits, load.options, load.adapters)
        llm.shutdown()
        ids = {name: each.lora_int_id for name, each in library._adapters.items()}

    config = llm.kwargs["lora_config"]
    attention = {MODULES[name] for name in ATTENTION}
    assert {*config.lora_target_modules} == attention | {"mlp_4h_to_h"}
    assert (config.lora_dir, config.max_lora_rank, config.max_loras) == ([], 16, 2)
    assert llm.kwargs["cuda_graph_config"] is None
    assert ids == {"formal": 1, "terse": 2}


def test_cuda_graphs_are_refused_beside_adapters(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    settings = adapted(tiny, tmp_path)

    assert with_config(settings, {"cuda_graph_config": None}).adapters
    with pytest.raises(ValueError, match="cuda_graph_config must be left out"):
        with_config(settings, {"cuda_graph_config": {"enable_padding": True}})


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
        ({"r": "8"}, "r must be a whole number of at least 1, got '8'"),
        ({"r": 0}, "r must be a whole number"),
        ({"target_modules": []}, "target_modules must be a list of q_proj"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules must be a list of q_proj"),
        ({"modules_to_save": ["lm_head"]}, "ignores modules_to_save: merge the adapter"),
        ({"use_dora": True}, "ignores use_dora"),
        ({"bias": "all"}, "ignores bias"),
        ({"rank_pattern": {"q_proj": 4}}, "ignores rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "ignores alpha_pattern"),
    ],
)
def test_files_that_would_be_applied_in_part_are_refused_by_entry(
    tmp_path: Path, entries: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointInvalid, match=f"adapter_config.json: .*{re.escape(named)}"):
        read_adapter("a", write_adapter(tmp_path / "a", **entries))


def test_an_adapter_needs_its_weights(tmp_path: Path) -> None:
    (write_adapter(tmp_path / "a") / "adapter_model.safetensors").unlink()

    with pytest.raises(CheckpointInvalid, match=r"adapter_model.safetensors is missing"):
        read_adapter("a", tmp_path / "a")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return settings of a model `m` with one adapter, without a report."""
    make_checkpoint(tmp_path / "m")
    return Settings.of(
        home=tmp_path,
        engine="tensorrt",
        models={"m": tmp_path / "m"},
        lora_adapters={"m:terse": write_adapter(tmp_path / "terse")},
    )


def test_adapters_are_models_of_their_bases_engine(settings: Settings, tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json")

    serving = build_serving(settings.having(lora_report=str(report)))
    router = Router(serving.engines, serving.encoders, serving.catalog)
    base, route = router.route("m", "id"), router.route("m:terse", "id")

    assert list(serving.engines) == ["m"]
    assert [model.name for model in router.models()] == ["m", "m:terse"]
    assert (route.model, route.served, route.adapter) == ("m:terse", "m", "terse")
    assert (base.engine, base.adapter) == (route.engine, "")


def test_versions_have_adapters_of_their_own(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "models: {m: {versions: {v1: {engine: tensorrt, directory: m, weight: 0},"
        " v2: {engine: tensorrt, directory: m}}}}"
    )
    adapters = {f"m@{version}:terse": tmp_path / "terse" for version in ("v1", "v2")}
    settings = Settings.of(
        home=tmp_path,
        fleet=str(tmp_path / "fleet.yaml"),
        lora_adapters=adapters | {"m@v2:formal": write_adapter(tmp_path / "formal")},
        lora_report=str(write_report(tmp_path / "report.json")),
    )

    serving = build_serving(settings)
    router = Router(serving.engines, serving.encoders, serving.catalog)

    assert router.versions("m:terse") == {"v1": 0.0, "v2": 1.0}
    assert router.versions("m:formal") == {"v2": 1.0}
    assert router.route("m:terse@v1", "id").served == "m@v1"
    assert router.canonical_name("m:terse@v1") == "m:terse"


@pytest.mark.parametrize(
    ("seen", "version", "named"),
    [
        ("no: the base model answers for 1 of 1", VERSION, "must have the answer 'yes' .*got 'no:"),
        ("not known: the same request varies", VERSION, "got 'not known: "),
        ("not asked: --lora names no adapter", VERSION, "got 'not asked: .*with an adapter"),
        (None, VERSION, "got 'not asked'"),
        ("yes", "1.2.0", f"must be about TensorRT-LLM {re.escape(VERSION)}, got '1.2.0'"),
    ],
)
def test_a_report_that_shows_no_effect_is_refused_with_the_remedy(
    settings: Settings, tmp_path: Path, seen: str | None, version: str, named: str
) -> None:
    report = write_report(tmp_path / "report.json", seen, version)

    with pytest.raises(
        SettingInvalid, match=f"WEIR_LORA_REPORT='.*report.json': .*{named}"
    ) as error:
        build_serving(settings.having(lora_report=str(report)))

    assert "weir doctor tensorrt --model DIR --lora DIR --json" in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"facts": {"tensorrt_llm_version": "1"}}'])
def test_another_file_is_not_a_report(settings: Settings, tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)

    with pytest.raises(SettingInvalid, match="must be a report of TensorRT-LLM's doctor: run `"):
        build_serving(settings.having(lora_report=str(tmp_path / "report.json")))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "WEIR_LORA_ADAPTERS needs WEIR_LORA_REPORT.*run `weir doctor tensorrt"),
        ({"lora_report": "/nowhere"}, "WEIR_LORA_REPORT='/nowhere': cannot be read .*run `weir d"),
        ({"engine": "torch"}, "'m:terse' must be model:adapter .*engine is `tensorrt`"),
        ({"lora_adapters": {"other:terse": Path()}}, "'other:terse' must be model:adapter"),
        ({"lora_adapters": {"m:a@b": Path()}}, "'m:a@b': the adapter's name must match"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(
    settings: Settings, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingInvalid, match=named):
        build_serving(settings.having(**changes))


def test_an_adapter_needs_a_name_of_its_own(settings: Settings, tmp_path: Path) -> None:
    models = {**settings.models.directories, "m:terse": tmp_path / "m"}
    report = str(write_report(tmp_path / "report.json"))

    with pytest.raises(SettingInvalid, match="'m:terse' is also a model or an alias"):
        build_serving(settings.having(models=models, lora_report=report))


def test_the_question_of_the_report_is_the_doctors() -> None:
    assert lora_adapters.__doc__ == QUESTION
