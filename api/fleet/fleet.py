"""What a process serves: engines and the names that they go by, from `WEIR_FLEET` or, without one, from `WEIR_MODELS`.

It is one of the places of the API that know concrete engines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import grpc
import structlog

from api.core.settings import SettingInvalid, Settings, bundled_models
from api.fleet.fleet_file import EngineKind, Fleet, FleetModel, FleetTarget, FleetVersion, read_fleet
from inference.adapters.remote_settings import RemoteSettings, Target, TlsFiles, parse_target
from inference.adapters.tensorrt_engine import TensorRtEngine, TensorRtOptions, TensorRtSettings
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.capabilities import combined
from inference.core.options import CostModel
from inference.encoder.engine import EncoderSettings, TorchEncoder
from inference.engine import Encoder, Engine
from inference.native.packed_file import PackedPlace
from inference.routing.encoder_set import EncoderReplica, EncoderSet
from inference.routing.memory import HOST_BYTES, BudgetTooSmall, MemoryBudget, Resident, stored_bytes, torch_memory_bytes
from inference.routing.on_demand import OnDemandEncoder, OnDemandEngine, SlotTerms
from inference.routing.placement import POLICIES, LeastLoaded
from inference.routing.replica import BreakerLimits, Replica
from inference.routing.replica_set import ReplicaSet
from inference.routing.router import VERSION_MARK, Catalog, Share
from inference.routing.scaling import ScaledReplicaSet, Scaler
from inference.workers.process import HostOpener, open_host

log = structlog.get_logger(__name__)

FETCH_TIMEOUT_S = 30.0  # for a tokenizer of some ten MB; a server that loads its model does not answer yet


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
    settings: Settings, kind: EngineKind, name: str, directory: Path, opener: HostOpener
) -> tuple[Callable[[], Engine], int]:
    """How an engine is built, and how much memory it takes. Raises: CheckpointInvalid, SettingInvalid."""
    match kind:
        case "tensorrt":
            tensorrt = tensorrt_settings(settings, name, directory)
            return lambda: TensorRtEngine(tensorrt), stored_bytes(directory)
        case "torch" | "simulated":
            own = replace(settings, engine_device="simulated") if kind == "simulated" else settings
            torch = torch_settings(own, name, directory)
            if torch.simulation is not None:
                return lambda: TorchEngine(torch, opener), HOST_BYTES  # no weights, no keys and values
            return lambda: TorchEngine(torch, opener), torch_memory_bytes(directory, torch.compute_dtype, torch.kv_cache_bytes)
    raise SettingInvalid(f"WEIR_FLEET: {name!r} has `engine: {kind}`, which this version of Weir cannot run")


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
    packed = PackedPlace(str(settings.home / "packed"), settings.packed_weights_bytes)
    return TorchEngineSettings(
        directory=directory,
        name=name,
        compute_dtype=settings.engine_dtype,
        device=settings.engine_device,
        kv_cache_bytes=settings.kv_cache_bytes,
        torch_thread_count=settings.engine_thread_count,
        packed=None if settings.packed_weights == "off" else packed,
    )


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


@dataclass(frozen=True, slots=True)
class Serving:
    """engines: by the names that they serve. encoders: models that embed. catalog, encoder_catalog: what can be asked for."""

    engines: dict[str, Engine]
    encoders: dict[str, Encoder]
    catalog: Catalog
    encoder_catalog: Catalog


def build_serving(settings: Settings, opener: HostOpener = open_host) -> Serving:
    """One set of replicas per version of a model. opener: where the torch engines' hosts come from.

    Raises: CheckpointInvalid naming the file, SettingInvalid.
    """
    if settings.lora_adapters:
        remedy = "merge each adapter into its checkpoint and serve that as a model of WEIR_MODELS"
        raise SettingInvalid(f"WEIR_LORA_ADAPTERS={settings.lora_adapters!r}: no engine applies LoRA adapters: {remedy}")
    fleet = fleet_of_file(settings) if settings.fleet_file else fleet_of_models(settings)
    yard = Yard(settings, MemoryBudget(fleet.memory_bytes or settings.engine_memory_bytes or None), opener)
    engines: dict[str, Engine] = {}
    encoders: dict[str, Encoder] = {}
    shares: dict[str, list[Share]] = {}
    encoder_shares: dict[str, list[Share]] = {}
    for model in fleet.models:
        for version in model.versions:
            served = f"{model.name}{VERSION_MARK}{version.version}" if version.version else model.name
            if model.embeds:
                encoders[served] = yard.build_encoders(version, served)
            else:
                engines[served] = yard.build_set(model, version, served)
            share = Share(version.version, served, version.weight)
            (encoder_shares if model.embeds else shares).setdefault(model.name, []).append(share)
    try:  # what is kept warm, and each slot beside it
        yard.budget.check(yard.slots)
    except BudgetTooSmall as error:
        in_file, alone = "memory_bytes of WEIR_FLEET, or WEIR_ENGINE_MEMORY_BYTES", settings.engine_memory_bytes
        setting = in_file if settings.fleet_file else f"WEIR_ENGINE_MEMORY_BYTES={alone}"
        remedy = f"allow at least {error.needed_bytes:,}, or lower WEIR_KV_CACHE_BYTES"
        raise SettingInvalid(f"{setting}: {error}; {remedy}") from error
    catalog = Catalog(shares, aliases_within(fleet.aliases, shares), fleet.regions, settings.region)
    return Serving(engines, encoders, catalog, Catalog(encoder_shares, aliases_within(fleet.aliases, encoder_shares)))


def fleet_of_file(settings: Settings) -> Fleet:
    """Raises: SettingInvalid."""
    named = settings.encoders or settings.remote_targets or settings.remote_encoders
    if dict(settings.models) != bundled_models() or named:
        others = "WEIR_MODELS, WEIR_ENCODERS, WEIR_REMOTE_TARGETS and WEIR_REMOTE_ENCODERS"
        raise SettingInvalid(f"WEIR_FLEET excludes {others}: name all models in the file")
    fleet = read_fleet(Path(settings.fleet_file))
    if settings.region and settings.region not in fleet.regions:
        known = ", ".join(fleet.regions) or "none"
        raise SettingInvalid(f"WEIR_REGION={settings.region!r}: must be a region of WEIR_FLEET; there are: {known}")
    return fleet


def fleet_of_models(settings: Settings) -> Fleet:
    """Models without versions, from the settings that name them. Raises: SettingInvalid."""
    if settings.region:
        raise SettingInvalid("WEIR_REGION needs WEIR_FLEET: only that file says which regions there are")
    if settings.max_replicas < max(settings.min_replicas, 1):
        raise SettingInvalid(f"WEIR_MAX_REPLICAS={settings.max_replicas}: must be at least WEIR_MIN_REPLICAS")
    generating = settings.models.keys() | settings.remote_targets.keys()
    for variable, named in (("WEIR_ENCODERS", settings.encoders), ("WEIR_REMOTE_ENCODERS", settings.remote_encoders)):
        if taken := sorted(named.keys() & generating):
            raise SettingInvalid(f"{variable}: {', '.join(taken)} is a model that generates: give the encoder another name")
    far, here = settings.remote_encoders, settings.encoders
    encoders = [
        *(model_here(settings, name, "encoder", directory) for name, directory in here.items() if name not in far),
        *(model_there(name, "remote-encoder", target, here.get(name)) for name, target in far.items()),
    ]
    if settings.engine_backend != "remote":
        models = [model_here(settings, name, settings.engine_backend, directory) for name, directory in settings.models.items()]
        return Fleet((*models, *encoders))
    if not settings.remote_targets:
        raise SettingInvalid("WEIR_ENGINE=remote needs WEIR_REMOTE_TARGETS, as in model=vllm://host:port")
    if settings.models != bundled_models() and (untargeted := sorted(set(settings.models) - set(settings.remote_targets))):
        raise SettingInvalid(f"WEIR_MODELS names {', '.join(untargeted)}, and WEIR_REMOTE_TARGETS does not say where that runs")
    models = [model_there(name, "remote", target, settings.models.get(name)) for name, target in settings.remote_targets.items()]
    return Fleet((*models, *encoders))


def model_here(settings: Settings, name: str, engine: EngineKind, directory: Path) -> FleetModel:
    """A model with as many replicas on this machine as the settings say."""
    least, most = settings.min_replicas, settings.max_replicas
    return FleetModel(name, (FleetVersion("", engine, directory, replica_count_min=least, replica_count_max=most),))


def model_there(name: str, engine: EngineKind, target: str, directory: Path | None) -> FleetModel:
    """A model on one server."""
    return FleetModel(name, (FleetVersion("", engine, directory, targets=(FleetTarget(target),)),))


def aliases_within(aliases: Mapping[str, str], shares: Mapping[str, Sequence[Share]]) -> dict[str, str]:
    """Those of these models and of their versions."""
    return {alias: target for alias, target in aliases.items() if target.partition(VERSION_MARK)[0] in shares}


class Yard:
    """Builds replicas. slots: those that share this machine's memory, under one budget."""

    def __init__(self, settings: Settings, budget: MemoryBudget, opener: HostOpener) -> None:
        self.budget = budget
        self.slots: list[Resident] = []
        self._settings = settings
        self._opener = opener

    def build_set(self, model: FleetModel, version: FleetVersion, served: str) -> ReplicaSet:
        """The replicas of one version. Raises: CheckpointInvalid, SettingInvalid."""
        replicas = self._remote_replicas(version, served) if version.engine == "remote" else self._local_replicas(version, served)
        capabilities = combined(replica.engine.model.capabilities for replica in replicas)
        info = replace(replicas[0].engine.model, name=served, capabilities=capabilities)
        least, wait_s = version.replica_count_min, 0.0 if self._is_lone(version) else model.recovery_wait_s
        policy = POLICIES[model.policy]() if len(replicas) > 1 else LeastLoaded()  # which looks at nothing that one alone has
        if len(replicas) == 1 or least >= version.replica_count_max:
            return ReplicaSet(info, replicas, policy, warm_count=least, recovery_wait_s=wait_s)
        return ScaledReplicaSet(info, replicas, policy, scaler=Scaler(least, self._idle_timeout_s(version)), recovery_wait_s=wait_s)

    def _is_lone(self, version: FleetVersion) -> bool:
        """Whether there is nowhere else to go: a loss is told at once, and an engine that loses sequences is not left alone."""
        return not self._settings.fleet_file and max(len(version.targets), version.replica_count_max) == 1

    def _breaker(self, version: FleetVersion) -> BreakerLimits | None:
        return BreakerLimits(failure_count_max=sys.maxsize) if self._is_lone(version) else None

    def build_encoders(self, version: FleetVersion, served: str) -> EncoderSet:
        """The replicas of one version of a model that embeds. Raises: CheckpointInvalid, SettingInvalid."""
        found: list[EncoderReplica] = []
        for target in version.targets:
            wanted = remote_settings(self._settings, served, target.address, version.directory)
            from inference.adapters.remote_encoder import RemoteEncoder

            found.append(EncoderReplica(target.address, RemoteEncoder(wanted)))
        for index in range(0 if version.targets else version.replica_count_max):
            assert version.directory is not None, "only those of remote engines may be left out"
            build, memory_bytes = encoder_plan(self._settings, served, version.directory)
            slot = OnDemandEncoder(build, self._terms(version, index, memory_bytes), self.budget)
            self.slots.append(slot)
            found.append(EncoderReplica(f"{served}#{index}", slot))
        warm_count = len(found) if version.targets else version.replica_count_min
        return EncoderSet(replace(found[0].encoder.model, name=served), found, warm_count=warm_count)

    def _terms(self, version: FleetVersion, index: int, memory_bytes: int) -> SlotTerms:
        """Of the replica of this number. memory_bytes: by its checkpoint."""
        is_warm = index < version.replica_count_min
        return SlotTerms(self._idle_timeout_s(version), keep_warm=is_warm, memory_bytes=version.memory_bytes or memory_bytes)

    def _idle_timeout_s(self, version: FleetVersion) -> float:
        return self._settings.model_idle_timeout_s if version.idle_timeout_s is None else version.idle_timeout_s

    def _remote_replicas(self, version: FleetVersion, served: str) -> list[Replica]:
        """One for each server; all are kept connected, since a connection costs next to nothing."""
        settings = self._settings
        found = []
        for target in version.targets:
            wanted = remote_settings(settings, served, target.address, version.directory)
            from inference.adapters.remote_engine import RemoteEngine  # after it was found that what this needs is installed

            engine = RemoteEngine(wanted)
            found.append(Replica(target.address, engine, target.region or settings.region, self._breaker(version)))
        return found

    def _local_replicas(self, version: FleetVersion, served: str) -> list[Replica]:
        """Those that run on this machine: the first ones kept warm, the others started when they are wanted."""
        assert version.directory is not None, "only those of remote engines may be left out"
        build, memory_bytes = engine_plan(self._settings, version.engine, served, version.directory, self._opener)
        found = []
        for index in range(version.replica_count_max):
            slot = OnDemandEngine(build, self._terms(version, index, memory_bytes), self.budget)
            self.slots.append(slot)
            found.append(Replica(f"{served}#{index}", slot, version.region or self._settings.region, self._breaker(version)))
        return found
