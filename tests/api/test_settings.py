"""Settings from the environment: each has its name, and an invalid one is refused by name."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from api.cli.stack import with_issuer
from api.core.settings import QueueSettings, Settings, bundled_encoders
from api.fleet.fleet import compute_dtype, engine_plan, fleet_of_models
from common.settings import SettingInvalid, settings_of, short
from inference.native import loader
from inference.text.tools import CallFormat
from inference.workers.process import open_worker
from metering.invoicing.invoice_document import Issuer

SPECS = {spec.metadata["variable"]: spec for _, spec in settings_of(Settings)}
NUMBERS = [name for name, spec in SPECS.items() if isinstance(spec.default, int | float)]

BUNDLED = Settings.of(encoders=bundled_encoders())

MAY_BE_ZERO = {"WEIR_MODEL_IDLE_TIMEOUT_S", "WEIR_HTTP_PADDING_AFTER_S"}  # which then means never
CASES: list[dict[str, Any]] = [
    {},
    {
        "database_url": "postgresql://u:p@h/d?sslmode=require",
        "listen": "[::]:1",
        "models": {"a": Path("/b"), "c": Path("/d e")},
    },
    {"home": Path("/tmp/x"), "drain_s": 0.25, "lease_slice_tokens": 1, "engine_dtype": "int8"},
]


def test_an_empty_environment_gives_the_defaults_and_the_bundled_encoder() -> None:
    assert Settings.from_environment({}) == BUNDLED
    assert Settings.from_environment(dict.fromkeys(SPECS, "")) == BUNDLED


@pytest.mark.parametrize(
    "variable", ["WEIR_FLEET", "WEIR_MODELS", "WEIR_ENCODERS", "WEIR_REMOTE_TARGETS"]
)
def test_a_choice_of_models_leaves_out_the_bundled_encoder(variable: str) -> None:
    settings = Settings.from_environment({variable: "small=/models/small"})

    assert settings.models.encoders.keys() == ({"small"} if variable == "WEIR_ENCODERS" else set())


def test_the_bundled_encoder_starts_with_its_first_request() -> None:
    [model, encoder] = fleet_of_models(BUNDLED).models

    assert (encoder.name, encoder.embeds) == ("demo-embedding", True)
    assert (encoder.versions[0].replica_count_min, encoder.versions[0].replica_count_max) == (0, 1)
    assert model.versions[0].replica_count_min == 1


def test_every_variable_has_its_own_name() -> None:
    assert len(SPECS) == len(list(settings_of(Settings)))
    assert all(name.startswith("WEIR_") for name in SPECS)


def test_a_value_is_replaced_by_the_name_of_its_variable() -> None:
    settings = Settings.of(queue_order="arrival", home=Path("/h"))

    assert settings == replace(Settings(), queue=QueueSettings(order="arrival"), home=Path("/h"))
    with pytest.raises(TypeError, match="no setting is named listen_address"):
        settings.having(listen_address="127.0.0.1:1")


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_read_from_its_variable(name: str) -> None:
    default: Any = SPECS[name].default
    value = (
        not default
        if isinstance(default, bool)
        else default + 1
        if isinstance(default, int)
        else default / 2
    )

    settings = Settings.from_environment({name: str(value)})

    assert settings.to_environment()[name] == str(value)
    assert settings.having(**{short(SPECS[name]): default}) == BUNDLED, "and nothing else"


@pytest.mark.parametrize("text", ["x", "1e", "nan", "inf", "-1", "1" * 30, "１x"])
def test_a_bad_number_is_refused_by_name(text: str) -> None:
    for name in NUMBERS:
        with pytest.raises(SettingInvalid, match=name):
            Settings.from_environment({name: text})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return an engine that is just its settings."""
    monkeypatch.setattr("api.fleet.fleet.torch_memory_bytes", lambda *_: 0)
    monkeypatch.setattr("api.fleet.fleet.TorchEngine", lambda settings, opener: settings)
    monkeypatch.setattr("api.fleet.fleet.TensorRtEngine", lambda settings, share: settings)


def built(settings: Settings) -> Any:
    """Return the engine of the model that `WEIR_MODELS` calls `a`."""
    assert settings.engine.backend != "remote"
    kind, directory = settings.engine.backend, settings.models.directories["a"]
    return engine_plan(settings, kind, "a", directory, open_worker).build({})


@pytest.mark.parametrize(
    "name", [name for name in NUMBERS if name.endswith("_S") and name not in MAY_BE_ZERO]
)
def test_no_time_is_zero(name: str) -> None:
    with pytest.raises(SettingInvalid, match=name):
        Settings.from_environment({name: "0"})


@pytest.mark.usefixtures("bare")
def test_the_interpreter_of_the_worker_must_exist(tmp_path: Path) -> None:
    settings = Settings.of(models={"a": tmp_path}, engine="tensorrt")

    assert built(settings.having(tensorrt_python=sys.executable)).python == sys.executable
    with pytest.raises(SettingInvalid, match="WEIR_TENSORRT_PYTHON='/nowhere': must be the path"):
        built(settings.having(tensorrt_python="/nowhere"))


@pytest.mark.parametrize("text", ["demo", "=dir", "name=", "a=b,c", ",=", "a=b,=d"])
def test_models_are_pairs(text: str) -> None:
    with pytest.raises(SettingInvalid, match="WEIR_MODELS"):
        Settings.from_environment({"WEIR_MODELS": text})


def test_a_removed_setting_names_its_replacement() -> None:
    with pytest.raises(SettingInvalid, match=r"WEIR_QUEUE_WEIGHTS is not.*`weir org weight"):
        Settings.from_environment({"WEIR_QUEUE_WEIGHTS": f"{uuid.UUID(int=1)}=4"})


def test_models_may_have_equals_signs_in_their_path() -> None:
    settings = Settings.from_environment({"WEIR_MODELS": "a=/x/y=z,b=rel"})

    assert settings.models.directories == {"a": Path("/x/y=z"), "b": Path("rel")}


@pytest.mark.parametrize("name", ["WEIR_ENGINE_DTYPE", "WEIR_ENGINE_DEVICE"])
def test_a_word_that_is_no_choice_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(
        SettingInvalid, match=f"{name}='int4': must be one of .*{SPECS[name].default}"
    ):
        Settings.from_environment({name: "int4"})


@pytest.mark.usefixtures("bare")
def test_type_and_device_reach_the_engines() -> None:
    settings = Settings.from_environment(
        {"WEIR_ENGINE_DTYPE": "float32", "WEIR_ENGINE_DEVICE": "cuda", "WEIR_MODELS": "a=/x"}
    )

    engine = built(settings)

    assert (engine.compute_dtype, engine.device) == ("float32", "cuda")


@pytest.mark.usefixtures("bare")
def test_the_type_of_the_kv_cache_reaches_engines_on_a_cpu_only() -> None:
    settings = {"WEIR_ENGINE_KV_DTYPE": "int8", "WEIR_MODELS": "a=/x"}

    assert built(Settings.from_environment(settings)).kv_dtype == "int8"

    on_gpu = Settings.from_environment(settings | {"WEIR_ENGINE_DEVICE": "cuda"})
    with pytest.raises(SettingInvalid, match="WEIR_ENGINE_KV_DTYPE='int8': has no kernels on"):
        built(on_gpu)


@pytest.mark.usefixtures("bare")
def test_a_gpu_has_other_defaults() -> None:
    """A replica has a GPU alone, whose free memory is its KV cache."""
    cpu, gpu = (
        Settings.of(engine_device=device, models={"a": Path("/x")}) for device in ("cpu", "cuda")
    )

    on_cpu, on_gpu = built(cpu), built(gpu)
    plan = engine_plan(gpu, "torch", "a", Path("/x"), open_worker)

    assert (on_cpu.compute_dtype, on_cpu.kv_cache_bytes) == ("float32", 1 << 30)
    assert (on_gpu.compute_dtype, on_gpu.kv_cache_bytes) == ("bfloat16", None)
    assert on_gpu.step_token_count_max > on_cpu.step_token_count_max
    environment = {"CUDA_VISIBLE_DEVICES": "3"}
    engine: Any = plan.build(environment)
    assert plan.gpu_count == 1
    assert engine.environment is environment


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("stored", "is_native", "computed"),
    [
        ("bfloat16", True, "bfloat16"),
        ("bfloat16", False, "float32"),
        ("float16", True, "float32"),
        ("float32", True, "float32"),
    ],
)
def test_a_checkpoint_in_bfloat16_is_computed_in_it_by_native_kernels(
    stored: str, is_native: bool, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 has more bits of precision than bfloat16."""
    matrix = torch.ones(8, 8, dtype=getattr(torch, stored))
    save_file({"a": matrix, "norm": torch.ones(8)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(loader, "is_expected", lambda: is_native)

    assert compute_dtype(Settings(), tmp_path) == computed
    assert compute_dtype(Settings.of(engine_dtype="int8"), tmp_path) == "int8"


@pytest.mark.usefixtures("bare")
def test_int8_is_refused_on_a_gpu() -> None:
    settings = Settings.of(engine_dtype="int8", engine_device="cuda", models={"a": Path("/x")})

    with pytest.raises(SettingInvalid, match=r"WEIR_ENGINE_DTYPE='int8'.*cuda: set bfloat16"):
        built(settings)


@pytest.mark.usefixtures("bare")
def test_a_simulated_engine_is_requested_by_name_and_announced() -> None:
    settings = {"WEIR_MODELS": "a=/x", "WEIR_SIMULATED_TIME_SCALE": "0"}

    plain = built(Settings.from_environment(settings))
    with capture_logs() as logs:
        simulated = built(Settings.from_environment(settings | {"WEIR_ENGINE_DEVICE": "simulated"}))

    assert plain.simulation is None
    assert simulated.simulation.time_scale == 0
    assert [(each["event"], each["log_level"]) for each in logs] == [
        ("engine_simulated", "warning")
    ]


@pytest.mark.usefixtures("bare")
def test_tensorrt_gets_its_sizes() -> None:
    environment = {
        "WEIR_ENGINE": "tensorrt",
        "WEIR_MODELS": "a=/x",
        "WEIR_TENSORRT_TENSOR_PARALLEL": "8",
        "WEIR_TENSORRT_EXPERT_PARALLEL": "4",
        "WEIR_TENSORRT_ABORT": "never",
    }

    settings = Settings.from_environment(environment)
    options = built(settings).options

    assert (options.tensor_parallel_size, options.expert_parallel_size) == (8, 4)
    assert not options.abort_running


@pytest.mark.parametrize("values", CASES)
def test_a_child_process_reads_the_same_settings(values: dict[str, Any]) -> None:
    settings = Settings.of(**values)

    assert Settings.from_environment(settings.to_environment()) == settings


def test_unrelated_variables_are_ignored() -> None:
    assert Settings.from_environment({"WEIR_NONSENSE": "x", "PATH": "/bin"}) == BUNDLED


def test_the_journal_is_in_the_home() -> None:
    assert Settings.of(home=Path("/h")).journal_directory == Path("/h/journal")


def test_the_letterhead_is_read_line_by_line() -> None:
    settings = Settings.from_environment(
        {
            "WEIR_ISSUER_NAME": "Weir Operations GmbH",
            "WEIR_ISSUER_ADDRESS": "Brückenstraße 12 | 10179 Berlin||",
            "WEIR_ISSUER_TAX_ID": "DE 1",
        }
    )

    assert settings.issuer.build() == Issuer(
        "Weir Operations GmbH", ("Brückenstraße 12", "10179 Berlin"), "DE 1"
    )
    assert Settings.from_environment(settings.to_environment()) == settings
    assert Settings().issuer.build() == Issuer()


def test_a_letterhead_that_could_not_be_drawn_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "outlines.otf").write_bytes(b"OTTO....")
    for environment, named in (
        ({"WEIR_ISSUER_NAME": "株式会社"}, "WEIR_INVOICE_FONT"),
        ({"WEIR_ISSUER_PAYMENT": "Łódź"}, "WEIR_ISSUER_PAYMENT"),
        (
            {"WEIR_ISSUER_ADDRESS": "|".join("abcdefghijk")},
            "WEIR_ISSUER_ADDRESS must have at most 10",
        ),
        ({"WEIR_INVOICE_FONT": str(tmp_path / "outlines.otf")}, "WEIR_INVOICE_FONT"),
        ({"WEIR_INVOICE_FONT_BOLD": str(tmp_path / "gone.ttf")}, "WEIR_INVOICE_FONT_BOLD"),
    ):
        with pytest.raises(SettingInvalid, match=named):
            Settings.from_environment(environment).issuer.build()
    for bad in ("two\nlines", "x" * 1001):
        with pytest.raises(SettingInvalid, match="WEIR_ISSUER_NAME"):
            Settings.from_environment({"WEIR_ISSUER_NAME": bad})


def test_forms_of_tool_calls_are_read_by_model() -> None:
    settings = Settings.from_environment({"WEIR_TOOL_CALL_FORMATS": "small=hermes,large=llama"})

    assert settings.models.tool_call_formats == {
        "small": CallFormat.HERMES,
        "large": CallFormat.LLAMA,
    }
    assert Settings.from_environment(settings.to_environment()) == settings
    for wrong in ("small", "=hermes", "small=json", "small=qwen"):
        with pytest.raises(SettingInvalid, match="one of hermes, llama, mistral"):
            Settings.from_environment({"WEIR_TOOL_CALL_FORMATS": wrong})


def test_a_stack_with_its_own_database_has_a_sample_issuer_unless_one_is_set() -> None:
    sample = with_issuer(Settings()).issuer.build()
    own = Settings.of(issuer_name="Weir Operations GmbH")

    assert sample.missing == ()
    assert "SAMPLE" in sample.name
    assert with_issuer(own) == own
