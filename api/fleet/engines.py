"""The engines that a process serves, built from its settings. One of the places of the API that know concrete engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import grpc
import structlog

from api.core.setting_values import SettingInvalid
from api.core.settings import Settings, bundled_models
from inference.adapters.remote_settings import RemoteSettings, Target, TlsFiles, parse_target
from inference.adapters.tensorrt_engine import TensorRtEngine
from inference.adapters.tensorrt_settings import TensorRtOptions, TensorRtSettings
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.core.cost_model import CostModel
from inference.encoder.engine import TorchEncoder
from inference.encoder.settings import EncoderSettings
from inference.engine import Encoder, Engine
from inference.native.packed_file import PackedPlace
from inference.routing.memory import HOST_BYTES, BudgetTooSmall, MemoryBudget, Resident, stored_bytes, torch_memory_bytes
from inference.routing.on_demand import OnDemandEncoder, OnDemandEngine, SlotTerms
from inference.workers.process import HostOpener, open_host

log = structlog.get_logger(__name__)

FETCH_TIMEOUT_S = 30.0  # for a tokenizer of some ten MB; a server that loads its model does not answer yet


def build_engines(settings: Settings, opener: HostOpener = open_host, budget: MemoryBudget | None = None) -> dict[str, Engine]:
    """One engine per model. opener: where the torch engines' hosts come from. budget: whose they are.

    Raises: CheckpointInvalid naming the file, SettingInvalid.
    """
    if settings.engine_backend == "remote":
        return build_remote_engines(settings)
    budget = budget or MemoryBudget()
    return {name: build_slot(settings, budget, name, directory, opener) for name, directory in settings.models.items()}


def check_budget(budget: MemoryBudget, slots: Iterable[Resident], setting: str) -> None:
    """Whether what is kept warm fits, and each slot beside it. setting: what to change. Raises: SettingInvalid."""
    try:
        budget.check(slots)
    except BudgetTooSmall as error:
        remedy = f"allow at least {error.needed_bytes:,}, or lower WEIR_KV_CACHE_BYTES"
        raise SettingInvalid(f"{setting}: {error}; {remedy}") from error


def build_slot(
    settings: Settings,
    budget: MemoryBudget,
    name: str,
    directory: Path,
    opener: HostOpener = open_host,
) -> OnDemandEngine:
    """A model's place for an engine, which runs while it is wanted. Raises: CheckpointInvalid, SettingInvalid."""
    assert settings.engine_backend != "remote", "nothing of those runs here"
    build, memory_bytes = engine_plan(settings, settings.engine_backend, name, directory, opener)
    terms = SlotTerms(settings.model_idle_timeout_s, keep_warm=settings.min_replicas > 0, memory_bytes=memory_bytes)
    return OnDemandEngine(build, terms, budget)


def check_encoder_names(settings: Settings) -> None:
    """Raises: SettingInvalid for a name that a model which generates has."""
    generating = settings.models.keys() | settings.remote_targets.keys()
    for variable, encoders in (("WEIR_ENCODERS", settings.encoders), ("WEIR_REMOTE_ENCODERS", settings.remote_encoders)):
        if taken := sorted(encoders.keys() & generating):
            raise SettingInvalid(f"{variable}: {', '.join(taken)} is a model that generates: give the encoder another name")


def build_encoders(settings: Settings, budget: MemoryBudget) -> dict[str, OnDemandEncoder]:
    """One encoder per model that embeds on this machine. Raises: CheckpointInvalid naming the file."""
    here = {name: directory for name, directory in settings.encoders.items() if name not in settings.remote_encoders}
    return {name: build_encoder(settings, budget, name, directory) for name, directory in here.items()}


def build_remote_encoders(settings: Settings) -> dict[str, Encoder]:
    """One encoder per model of WEIR_REMOTE_ENCODERS. Raises: CheckpointInvalid, SettingInvalid."""
    return {name: build_remote_encoder(settings, name, target) for name, target in settings.remote_encoders.items()}


def build_encoder(settings: Settings, budget: MemoryBudget, name: str, directory: Path) -> OnDemandEncoder:
    """The place for a model that embeds, which runs while it is wanted. Raises: CheckpointInvalid naming the file."""
    build, memory_bytes = encoder_plan(settings, name, directory)
    terms = SlotTerms(settings.model_idle_timeout_s, keep_warm=settings.min_replicas > 0, memory_bytes=memory_bytes)
    return OnDemandEncoder(build, terms, budget)


def encoder_plan(settings: Settings, name: str, directory: Path) -> tuple[Callable[[], Encoder], int]:
    """How an encoder is built, and how much memory it takes. Raises: CheckpointInvalid naming the file."""
    options = EncoderSettings(
        directory=directory,
        name=name,
        compute_dtype=settings.engine_dtype,
        device="cuda" if settings.engine_device == "cuda" else "cpu",
        torch_thread_count=settings.engine_thread_count,
        batch_token_count_max=settings.encoder_batch_tokens,
    )
    memory_bytes = torch_memory_bytes(directory, options.compute_dtype, kv_cache_bytes=0)
    return lambda: TorchEncoder(options), memory_bytes


def engine_plan(
    settings: Settings,
    backend: Literal["torch", "tensorrt"],
    name: str,
    directory: Path,
    opener: HostOpener,
) -> tuple[Callable[[], Engine], int]:
    """How an engine is built, and how much memory it takes. Raises: CheckpointInvalid, SettingInvalid."""
    if backend == "torch":
        torch = torch_settings(settings, name, directory)
        if torch.simulation is not None:
            return lambda: TorchEngine(torch, opener), HOST_BYTES  # no weights, no keys and values
        return lambda: TorchEngine(torch, opener), torch_memory_bytes(directory, torch.compute_dtype, torch.kv_cache_bytes)
    tensorrt = tensorrt_settings(settings, name, directory)
    return lambda: TensorRtEngine(tensorrt), stored_bytes(directory)


def tensorrt_settings(settings: Settings, name: str, directory: Path) -> TensorRtSettings:
    """How to run a model on TensorRT-LLM. Raises: SettingInvalid."""
    try:
        options = TensorRtOptions(
            kv_cache_dtype=settings.tensorrt_kv_cache_dtype,
            tensor_parallel_size=settings.tensorrt_tensor_parallel,
            pipeline_parallel_size=settings.tensorrt_pipeline_parallel,
            expert_parallel_size=settings.tensorrt_expert_parallel or None,
            kv_cache_memory_fraction=settings.tensorrt_kv_cache_fraction,
            abort_running=settings.tensorrt_abort != "never",
            abort_prefill=settings.tensorrt_abort == "always",
        )
    except ValueError as error:
        raise SettingInvalid(f"WEIR_TENSORRT_*: {error}") from error
    return TensorRtSettings(
        directory=directory,
        name=name,
        options=options,
        running_sequence_count_max=settings.tensorrt_batch_max,
        waiting_sequence_count_max=settings.requests_per_process_max,
    )


def torch_settings(settings: Settings, name: str, directory: Path) -> TorchEngineSettings:
    """How to run a model, or, for load tests, how to act as if it ran."""
    if settings.engine_device == "simulated":
        log.warning("engine_simulated", model=name, time_scale=settings.simulated_time_scale)
        return TorchEngineSettings(
            directory=directory,
            name=name,
            step_token_count_max=8192,  # TensorRT-LLM's default
            running_sequence_count_max=512,
            waiting_sequence_count_max=settings.requests_per_process_max,  # what is to be tested stands before the engine
            torch_thread_count=1,
            simulation=CostModel(time_scale=settings.simulated_time_scale),
        )
    return TorchEngineSettings(
        directory=directory,
        name=name,
        compute_dtype=settings.engine_dtype,
        device=settings.engine_device,
        kv_cache_bytes=settings.kv_cache_bytes,
        torch_thread_count=settings.engine_thread_count,
        packed=packed_place(settings),
    )


def packed_place(settings: Settings) -> PackedPlace | None:
    """Where packed weights are kept, if anywhere."""
    if settings.packed_weights == "off":
        return None
    return PackedPlace(str(settings.home / "packed"), settings.packed_weights_bytes)


def build_remote_engines(settings: Settings) -> dict[str, Engine]:
    """One engine per model of WEIR_REMOTE_TARGETS. Raises: CheckpointInvalid, SettingInvalid."""
    if not settings.remote_targets:
        raise SettingInvalid("WEIR_ENGINE=remote needs WEIR_REMOTE_TARGETS, as in model=vllm://host:port")
    if settings.models != bundled_models() and (untargeted := sorted(set(settings.models) - set(settings.remote_targets))):
        raise SettingInvalid(f"WEIR_MODELS names {', '.join(untargeted)}, and WEIR_REMOTE_TARGETS does not say where that runs")
    return {name: build_remote_engine(settings, name, target) for name, target in settings.remote_targets.items()}


def build_remote_engine(settings: Settings, name: str, target: str, directory: Path | None = None) -> Engine:
    """One engine for one server. Raises: CheckpointInvalid, SettingInvalid."""
    wanted = remote_settings(settings, name, target, directory)
    from inference.adapters.remote_engine import RemoteEngine

    return RemoteEngine(wanted)


def build_remote_encoder(settings: Settings, name: str, target: str, directory: Path | None = None) -> Encoder:
    """One server that embeds. Raises: CheckpointInvalid, SettingInvalid."""
    wanted = remote_settings(settings, name, target, directory or settings.encoders.get(name))
    from inference.adapters.remote_encoder import RemoteEncoder

    return RemoteEncoder(wanted)


def remote_settings(settings: Settings, name: str, target_text: str, directory: Path | None = None) -> RemoteSettings:
    """How to use a server. directory: of the model's small files; None where WEIR_MODELS or the server itself has them.

    Raises: SettingInvalid.
    """
    if find_spec("smg_grpc_proto") is None:
        raise SettingInvalid(
            "WEIR_ENGINE=remote needs the package smg-grpc-proto, in a clone of the repository: "
            "pip install -e sdk/python -e '.[remote]'"
        )
    try:
        target, tls = parse_target(target_text), tls_files(settings)
    except ValueError as error:
        raise SettingInvalid(f"WEIR_REMOTE_TARGETS, WEIR_REMOTE_TLS_*: {error}") from error
    return RemoteSettings(
        directory=directory or settings.models.get(name) or fetched_directory(settings, name, target, tls),
        name=name,
        target=target,
        tls=tls,
        share_prefixes=settings.remote_share_prefixes,
        context_window_tokens_max=settings.remote_context_tokens or None,
        running_sequence_count_max=settings.remote_batch_max,
        waiting_sequence_count_max=settings.requests_per_process_max,
        first_token_timeout_s=settings.remote_first_token_s,
        inter_token_timeout_s=settings.remote_inter_token_s,
        probe_interval_s=settings.remote_probe_s,
    )


def tls_files(settings: Settings) -> TlsFiles | None:
    """The certificates; None without an authority. Raises: ValueError for parts that say nothing alone."""
    certificate, key = settings.remote_tls_certificate, settings.remote_tls_key
    if not settings.remote_tls_ca:
        if certificate or key or settings.remote_tls_name:
            raise ValueError("WEIR_REMOTE_TLS_CA is not set: without an authority there is no TLS")
        return None
    return TlsFiles(
        Path(settings.remote_tls_ca),
        Path(certificate) if certificate else None,
        Path(key) if key else None,
        settings.remote_tls_name,
    )


def fetched_directory(settings: Settings, name: str, target: Target, tls: TlsFiles | None) -> Path:
    """The model's small files from its server; those of the last time if it does not answer. Raises: SettingInvalid."""
    from inference.adapters.remote_connection import fetch_model_files
    from inference.adapters.remote_dialects import ServerUnfit

    directory = settings.home / "remote" / f"model-{quote(name, safe='')}"
    try:
        fetch_model_files(target, tls, directory, FETCH_TIMEOUT_S)
    except (ServerUnfit, grpc.RpcError) as error:
        said = str(error) if isinstance(error, ServerUnfit) else f"{error.code().name}: {error.details()}"
        if not directory.exists():
            raise SettingInvalid(
                f"WEIR_REMOTE_TARGETS: {target} does not give {name}'s tokenizer ({said}): "
                "start it first, or name the model's directory in WEIR_MODELS"
            ) from error
        log.warning("remote_tokenizer_kept", model=name, target=str(target), reason=said)
    return directory
