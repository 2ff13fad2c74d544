"""Construction of a process's engines, as named by `WEIR_FLEET` or, without it, by `WEIR_MODELS`.

One of the few modules of the API that know concrete engines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc
import structlog

from api.core.settings import Settings, bundled_encoders, bundled_models
from api.fleet.fleet_file import (
    WORD,
    EngineKind,
    Fleet,
    FleetModel,
    FleetTarget,
    FleetVersion,
    read_fleet,
)
from common.gpus import GpusUnknown, read_gpus, visible_gpus
from common.settings import SettingInvalid
from inference.adapters.remote_settings import (
    KeyFile,
    KeyUnusable,
    RemoteSettings,
    Service,
    Target,
    TlsFiles,
    parse_target,
)
from inference.adapters.tensorrt_adapters import REPORT_COMMAND, Adapter, check_report, read_adapter
from inference.adapters.tensorrt_engine import TensorRtEngine
from inference.adapters.tensorrt_settings import VERSION as TENSORRT_VERSION
from inference.adapters.tensorrt_settings import TensorRtOptions, TensorRtSettings, with_config
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.core.options import ComputeDtype, CostModel
from inference.encoder.engine import EncoderSettings, TorchEncoder
from inference.engine import Encoder, Engine
from inference.native import loader
from inference.native.packed_file import PackedTarget
from inference.routing.encoder_set import EncoderReplica, EncoderSet
from inference.routing.memory import (
    HOST_BYTES,
    BudgetTooSmall,
    GpusTooFew,
    GpuTooSmall,
    MemoryBudget,
    Needs,
    Resident,
    is_stored_in_bfloat16,
    stored_bytes,
    torch_memory_bytes,
)
from inference.routing.on_demand import ManagedEncoder, ManagedEngine, ManagedTerms
from inference.routing.placement import POLICIES, LeastLoaded
from inference.routing.replica import BreakerLimits, Replica
from inference.routing.replica_set import ReplicaSet
from inference.routing.router import VERSION_MARK, Catalog, Share
from inference.routing.scaling import ScaledReplicaSet, Scaler
from inference.workers.process import WorkerOpener, open_worker

log = structlog.get_logger(__name__)

# Memory of a GPU above which another process uses it; drivers and displays use less.
GPU_USED_BYTES_MAX = 1 << 30
ADAPTER_MARK = ":"  # between the names of a model and its adapter
# Seconds for a tokenizer of some 10 MB; a server that loads its model does not answer.
FETCH_TIMEOUT_S = 30.0
CPU_KV_CACHE_BYTES = 1 << 30
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048  # a GPU's products need more rows


def encoder_plan(
    settings: Settings, name: str, directory: Path
) -> tuple[Callable[[], Encoder], int]:
    """Create a factory of an encoder; estimate its memory in bytes. Raises: CheckpointInvalid."""
    options = EncoderSettings(
        directory=directory,
        name=name,
        # In bfloat16 vectors would have an error of 8 bits, and encoders are small.
        compute_dtype="float32" if settings.engine.dtype == "auto" else settings.engine.dtype,
        device="cuda" if settings.engine.device == "cuda" else "cpu",
        torch_thread_count=settings.engine.thread_count,
        batch_token_count_max=settings.models.encoder_batch_tokens,
    )
    memory_bytes = torch_memory_bytes(directory, options.compute_dtype, kv_cache_bytes=0)
    return lambda: TorchEncoder(options), memory_bytes


def named_gpus(fleet: Fleet) -> tuple[str, ...]:
    """Collect the ids of the GPUs that the versions of a fleet name, each once."""
    named = (gpu for model in fleet.models for each in model.versions for gpu in each.gpus)
    return tuple(dict.fromkeys(named))


def memory_of_gpus(ids: Sequence[str]) -> dict[str, int]:
    """Read the memory size of each GPU, in bytes. Unknown GPUs are left out.

    Logs a warning for a GPU whose memory other programs use.
    """
    try:
        found = read_gpus(ids)
    except GpusUnknown as error:
        if ids:
            log.info("gpu_memory_unknown", reason=str(error))
        return {}
    for each, gpu in found.items():
        if gpu.used_bytes > GPU_USED_BYTES_MAX:
            log.warning("gpu_memory_in_use", gpu=each, name=gpu.name, used_bytes=gpu.used_bytes)
    return {each: gpu.memory_bytes for each, gpu in found.items()}


# Factory of an engine that is not started, from the environment of its worker, read at each start.
Build = Callable[[Mapping[str, str]], Engine]


class EnginePlan(NamedTuple):
    """Factory of an engine, with the resources that the engine needs.

    `memory_bytes` is for the whole engine. `gpu_count` is the number of GPUs for its exclusive use,
    `shard_count` how many of them split the weights. Both are 0 without GPUs.
    """

    build: Build
    memory_bytes: int
    gpu_count: int = 0
    shard_count: int = 0


def engine_plan(
    settings: Settings,
    kind: EngineKind,
    name: str,
    directory: Path,
    opener: WorkerOpener,
    engine_config: Mapping[str, Any] | None = None,
) -> EnginePlan:
    """Plan an engine of this kind for a model. Raises: CheckpointInvalid, SettingInvalid."""
    match kind:
        case "tensorrt":
            adapters = adapters_of(settings, name)
            tensorrt = replace(tensorrt_settings(settings, name, directory), adapters=adapters)
            try:
                tensorrt = with_config(tensorrt, engine_config or {})
            except ValueError as error:
                raise SettingInvalid(
                    f"WEIR_FLEET: model {name!r}: engine_config: {error}"
                ) from error

            def build(environment: Mapping[str, str]) -> Engine:
                return TensorRtEngine(replace(tensorrt, environment=environment))

            weights_bytes = stored_bytes(directory)
            return EnginePlan(build, weights_bytes, tensorrt.gpu_count, tensorrt.shard_count)
        case "torch" | "simulated":
            own = settings.having(engine_device="simulated") if kind == "simulated" else settings
            torch = torch_settings(own, name, directory)
            if torch.simulation is not None:
                # Simulated engines have neither weights nor a KV cache.
                return EnginePlan(lambda _: TorchEngine(torch, opener), HOST_BYTES)
            on_gpu = torch.device == "cuda"
            kv_cache_bytes = 0 if on_gpu else torch.kv_cache_bytes or 0
            memory_bytes = torch_memory_bytes(directory, torch.compute_dtype, kv_cache_bytes)

            def build_torch(environment: Mapping[str, str]) -> Engine:
                return TorchEngine(replace(torch, environment=environment), opener)

            return EnginePlan(build_torch, memory_bytes, int(on_gpu))
    raise SettingInvalid(
        f"WEIR_FLEET: {name!r} has `engine: {kind}`, which this version of Weir cannot run"
    )


def tensorrt_settings(settings: Settings, name: str, directory: Path) -> TensorRtSettings:
    """Build the TensorRT-LLM settings of a model. Raises: SettingInvalid."""
    if (python := settings.tensorrt.python) and not os.access(python, os.X_OK):
        raise SettingInvalid(
            f"WEIR_TENSORRT_PYTHON={python!r}: must be the path of a Python interpreter that has"
            " TensorRT-LLM and Weir, such as /usr/bin/python3 of NVIDIA's image"
        )
    try:
        options = TensorRtOptions(
            kv_cache_dtype=settings.tensorrt.kv_cache_dtype,
            tensor_parallel_size=settings.tensorrt.tensor_parallel,
            pipeline_parallel_size=settings.tensorrt.pipeline_parallel,
            expert_parallel_size=settings.tensorrt.expert_parallel or None,
            kv_cache_memory_fraction=settings.tensorrt.kv_cache_fraction,
            abort_running=settings.tensorrt.abort != "never",
            abort_prefill=settings.tensorrt.abort == "always",
        )
    except ValueError as error:
        raise SettingInvalid(f"WEIR_TENSORRT_*: {error}") from error
    return TensorRtSettings(
        directory=directory,
        name=name,
        options=options,
        running_sequence_count_max=settings.tensorrt.batch_max,
        waiting_sequence_count_max=settings.requests.per_process_max,
        python=settings.tensorrt.python,
    )


def compute_dtype(settings: Settings, directory: Path) -> ComputeDtype:
    """Choose the data type in which the torch engine computes a model.

    On CPUs, `auto` is bfloat16 if the checkpoint is and native kernels are expected. Without them
    torch computes, which is slower in bfloat16 on most processors, so `auto` is float32.
    """
    if settings.engine.dtype != "auto":
        return settings.engine.dtype
    if settings.engine.device == "cuda":
        return "bfloat16"
    if loader.is_expected() and is_stored_in_bfloat16(directory):
        return "bfloat16"
    return "float32"


def torch_settings(settings: Settings, name: str, directory: Path) -> TorchEngineSettings:
    """Build a model's settings for the torch engine, real or simulated. Raises: SettingInvalid."""
    if settings.engine.device == "simulated":
        log.warning("engine_simulated", model=name, time_scale=settings.engine.simulated_time_scale)
        return TorchEngineSettings(
            directory=directory,
            name=name,
            step_token_count_max=8192,  # TensorRT-LLM's default
            running_sequence_count_max=512,
            # Load tests exercise the code in front of the engine.
            waiting_sequence_count_max=settings.requests.per_process_max,
            torch_thread_count=1,
            simulation=CostModel(time_scale=settings.engine.simulated_time_scale),
        )
    on_gpu = settings.engine.device == "cuda"
    dtype = compute_dtype(settings, directory)
    if on_gpu and dtype == "int8":
        raise SettingInvalid(
            "WEIR_ENGINE_DTYPE='int8': has no kernels on WEIR_ENGINE_DEVICE=cuda: set bfloat16"
        )
    if on_gpu and settings.engine.kv_dtype not in ("auto", dtype):
        raise SettingInvalid(
            f"WEIR_ENGINE_KV_DTYPE={settings.engine.kv_dtype!r}: has no kernels on"
            " WEIR_ENGINE_DEVICE=cuda: set auto"
        )
    packed = PackedTarget(str(settings.home / "packed"), settings.engine.packed_weights_bytes)
    return TorchEngineSettings(
        directory=directory,
        name=name,
        compute_dtype=dtype,
        device=settings.engine.device,
        kv_cache_bytes=settings.engine.kv_cache_bytes or (None if on_gpu else CPU_KV_CACHE_BYTES),
        step_token_count_max=GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS,
        torch_thread_count=settings.engine.thread_count,
        kv_dtype=settings.engine.kv_dtype,
        draft_token_count_max=settings.engine.draft_token_count_max,
        packed=None if settings.engine.packed_weights == "off" else packed,
    )


def remote_settings(
    settings: Settings, name: str, found: FleetTarget, directory: Path | None = None
) -> RemoteSettings:
    """Build the settings of a model on a remote server.

    `directory` has the model's small files, such as the tokenizer; with None, they come from
    WEIR_MODELS or the server. Raises: SettingInvalid.
    """
    if find_spec("smg_grpc_proto") is None:
        raise SettingInvalid(
            "WEIR_ENGINE=remote needs the package smg-grpc-proto, in a clone of the repository: "
            "pip install -e sdk/python -e '.[remote]'"
        )
    try:
        target, tls = parse_target(found.address), settings.remote.tls()
    except ValueError as error:
        raise SettingInvalid(f"WEIR_REMOTE_TARGETS, WEIR_REMOTE_TLS_*: {error}") from error
    key = None
    if found.key_file is not None:
        header = found.key_header or settings.remote.key_header
        try:
            key = KeyFile(found.key_file, header)
            key.header()
        except KeyUnusable as error:
            raise SettingInvalid(f"the key of {name} for {target}: {error}") from error
        except ValueError as error:
            raise SettingInvalid(f"WEIR_REMOTE_KEY_HEADER {error}, not {header!r:.80}") from error
        if tls is None and target.service is not Service.OPENAI_HTTPS:
            log.warning("remote_key_sent_unencrypted", model=name, target=str(target))
    return RemoteSettings(
        directory=directory
        or settings.models.directories.get(name)
        or fetched_directory(settings, name, target, tls, key),
        name=name,
        target=target,
        tls=tls,
        key=key,
        share_prefixes=settings.remote.share_prefixes,
        context_window_tokens_max=settings.remote.context_tokens or None,
        running_sequence_count_max=settings.remote.batch_max,
        waiting_sequence_count_max=settings.requests.per_process_max,
        first_token_timeout_s=settings.remote.first_token_s,
        inter_token_timeout_s=settings.remote.inter_token_s,
        probe_interval_s=settings.remote.probe_s,
    )


def fetched_directory(
    settings: Settings, name: str, target: Target, tls: TlsFiles | None, key: KeyFile | None
) -> Path:
    """Fetch the model's small files from its server.

    If it does not answer, keep the earlier ones. Raises SettingInvalid if there are none.
    """
    from inference.adapters.remote_dialects import ServerUnfit, quoted
    from inference.adapters.remote_files import fetch_model_files

    directory = settings.home / "remote" / f"model-{quote(name, safe='')}"
    try:
        fetch_model_files(target, tls, key, directory, FETCH_TIMEOUT_S)
    except (ServerUnfit, grpc.RpcError) as error:
        reason = str(error)
        if not isinstance(error, ServerUnfit):
            reason = f"{error.code().name}: {quoted(error.details())}"
        if not directory.exists():
            raise SettingInvalid(
                f"WEIR_REMOTE_TARGETS: {target} does not return {name}'s tokenizer ({reason}): "
                "start it first, or name the model's directory in WEIR_MODELS"
            ) from error
        log.warning("remote_tokenizer_kept", model=name, target=str(target), reason=reason)
    return directory


@dataclass(frozen=True, slots=True)
class Serving:
    """Backends of a process, by served name: `engines` generate, `encoders` embed.

    `catalog` lists the names that clients can request.
    """

    engines: dict[str, Engine]
    encoders: dict[str, Encoder]
    catalog: Catalog


def build_serving(settings: Settings, opener: WorkerOpener = open_worker) -> Serving:
    """Build the backends: one set of replicas for each version of a model.

    `opener` starts the worker processes. Raises: SettingInvalid; CheckpointInvalid naming the file.
    """
    fleet = fleet_of_file(settings) if settings.models.fleet_file else fleet_of_models(settings)
    gpus = fleet.gpus or visible_gpus() or named_gpus(fleet)
    memory_bytes = fleet.memory_bytes or settings.replicas.memory_bytes or None
    builder = ReplicaBuilder(
        settings, MemoryBudget(memory_bytes, gpus=gpus, gpu_memory=memory_of_gpus(gpus)), opener
    )
    engines: dict[str, Engine] = {}
    encoders: dict[str, Encoder] = {}
    shares: dict[str, list[Share]] = {}
    for model in fleet.models:
        for version in model.versions:
            mark = f"{VERSION_MARK}{version.version}" if version.version else ""
            served = f"{model.name}{mark}"
            if model.embeds:
                encoders[served] = builder.build_encoders(version, served)
            else:
                engines[served] = builder.build_set(model, version, served)
            share = Share(version.version, served, version.weight)
            shares.setdefault(model.name, []).append(share)
    add_adapters(settings, engines, shares, fleet.aliases)
    try:  # warm replicas, with any other one beside them
        builder.budget.check(builder.managed)
    except GpusTooFew as error:
        raise SettingInvalid(
            f"gpus of WEIR_FLEET, or CUDA_VISIBLE_DEVICES: {error}; lower its replicas, or its"
            " tensor_parallel_size"
        ) from error
    except GpuTooSmall as error:
        raise SettingInvalid(
            f"gpus of WEIR_FLEET, or CUDA_VISIBLE_DEVICES: {error}; raise its tensor_parallel_size,"
            " or set its memory_bytes if its files hold more than it loads"
        ) from error
    except BudgetTooSmall as error:
        setting = f"WEIR_ENGINE_MEMORY_BYTES={settings.replicas.memory_bytes}"
        if settings.models.fleet_file:
            setting = "memory_bytes of WEIR_FLEET, or WEIR_ENGINE_MEMORY_BYTES"
        remedy = f"allow at least {error.needed_bytes:,}, or lower WEIR_KV_CACHE_BYTES"
        raise SettingInvalid(f"{setting}: {error}; {remedy}") from error
    catalog = Catalog(shares, fleet.aliases, fleet.regions, settings.models.region)
    return Serving(engines, encoders, catalog)


def add_adapters(
    settings: Settings,
    engines: Mapping[str, Engine],
    shares: dict[str, list[Share]],
    taken: Collection[str],
) -> None:
    """Add the LoRA adapters of each engine to the models that clients can request.

    `taken` are names that adapters must not have. Raises: SettingInvalid.
    """
    taken = {*taken, *shares}
    unused = dict(settings.tensorrt.lora_adapters)
    for model, versions in list(shares.items()):
        for share in versions:
            engine = engines.get(share.served)  # None for an encoder
            for adapter in engine.model.adapters if engine is not None else ():
                name = f"{model}{ADAPTER_MARK}{adapter}"
                if name in taken:
                    raise SettingInvalid(
                        f"WEIR_LORA_ADAPTERS: {name!r} is also a model or an alias: give the"
                        " adapter another name"
                    )
                shares.setdefault(name, []).append(replace(share, adapter=adapter))
                del unused[f"{share.served}{ADAPTER_MARK}{adapter}"]
    if unused:
        raise SettingInvalid(
            f"WEIR_LORA_ADAPTERS: {min(unused)!r} must be model:adapter or"
            " model@version:adapter, with a model whose engine is `tensorrt`: others apply no"
            " adapters"
        )


def adapters_of(settings: Settings, served: str) -> tuple[Adapter, ...]:
    """Read the LoRA adapters of a model or version. Raises: SettingInvalid, CheckpointInvalid."""
    found = []
    for key, directory in settings.tensorrt.lora_adapters.items():
        name, _, adapter = key.rpartition(ADAPTER_MARK)
        if name != served:
            continue
        if not WORD.fullmatch(adapter):
            raise SettingInvalid(
                f"WEIR_LORA_ADAPTERS: {key!r}: the adapter's name must match {WORD.pattern}"
            )
        found.append(read_adapter(adapter, directory))
    if found and not settings.tensorrt.lora_report:
        raise SettingInvalid(
            "WEIR_LORA_ADAPTERS needs WEIR_LORA_REPORT, the file with a report that adapters take"
            f" effect: run `{REPORT_COMMAND}` on this machine"
        )
    if found:
        try:
            check_report(Path(settings.tensorrt.lora_report), TENSORRT_VERSION)
        except ValueError as error:
            raise SettingInvalid(
                f"WEIR_LORA_REPORT={settings.tensorrt.lora_report!r}: {error}"
            ) from error
    return tuple(found)


def fleet_of_file(settings: Settings) -> Fleet:
    """Read the fleet file and check it against the other settings. Raises: SettingInvalid."""
    named = settings.models.encoders or settings.remote.targets or settings.remote.encoders
    if dict(settings.models.directories) != bundled_models() or named:
        excluded = "WEIR_MODELS, WEIR_ENCODERS, WEIR_REMOTE_TARGETS and WEIR_REMOTE_ENCODERS"
        raise SettingInvalid(f"WEIR_FLEET excludes {excluded}: name all models in the file")
    fleet = read_fleet(Path(settings.models.fleet_file))
    region = settings.models.region
    if region and region not in fleet.regions:
        known = ", ".join(fleet.regions) or "none"
        raise SettingInvalid(
            f"WEIR_REGION={region!r}: must be a region of WEIR_FLEET; there are: {known}"
        )
    return fleet


def fleet_of_models(settings: Settings) -> Fleet:
    """Build a fleet without versions from `WEIR_MODELS` and the like. Raises: SettingInvalid."""
    if settings.models.region:
        raise SettingInvalid("WEIR_REGION requires WEIR_FLEET, which lists the regions")
    if settings.replicas.count_max < max(settings.replicas.count_min, 1):
        raise SettingInvalid(
            f"WEIR_MAX_REPLICAS={settings.replicas.count_max}: must be at least WEIR_MIN_REPLICAS"
        )
    generating = settings.models.directories.keys() | settings.remote.targets.keys()
    for variable, named in (
        ("WEIR_ENCODERS", settings.models.encoders),
        ("WEIR_REMOTE_ENCODERS", settings.remote.encoders),
    ):
        if taken := sorted(named.keys() & generating):
            raise SettingInvalid(
                f"{variable}: {', '.join(taken)} is a model that generates: give the encoder"
                " another name"
            )
    remote, local = settings.remote.encoders, settings.models.encoders
    keyed = settings.remote.key_files.keys()
    if unknown := sorted(keyed - remote.keys() - settings.remote.targets.keys()):
        raise SettingInvalid(
            f"WEIR_REMOTE_KEY_FILES names {', '.join(unknown)}: add them to WEIR_REMOTE_TARGETS or"
            " WEIR_REMOTE_ENCODERS"
        )
    encoders = [
        local_model(settings, name, "encoder", local[name]) for name in local if name not in remote
    ] + [
        remote_model(settings, name, "remote-encoder", target, local.get(name))
        for name, target in remote.items()
    ]
    if settings.engine.backend != "remote":
        models = [
            local_model(settings, name, settings.engine.backend, directory)
            for name, directory in settings.models.directories.items()
        ]
        return Fleet((*models, *encoders))
    if not settings.remote.targets:
        raise SettingInvalid(
            "WEIR_ENGINE=remote needs WEIR_REMOTE_TARGETS, as in model=vllm://host:port"
        )
    if settings.models.directories != bundled_models() and (
        untargeted := sorted(set(settings.models.directories) - set(settings.remote.targets))
    ):
        raise SettingInvalid(
            f"WEIR_MODELS names {', '.join(untargeted)}: add them to WEIR_REMOTE_TARGETS"
        )
    models = [
        remote_model(settings, name, "remote", target, settings.models.directories.get(name))
        for name, target in settings.remote.targets.items()
    ]
    return Fleet((*models, *encoders))


def local_model(settings: Settings, name: str, engine: EngineKind, directory: Path) -> FleetModel:
    """Build a model with local replicas, as many as the settings request.

    The bundled encoder starts on demand, since most people who try the demo do not use it.
    """
    least = 0 if directory in bundled_encoders().values() else settings.replicas.count_min
    version = FleetVersion(
        "",
        engine,
        directory,
        replica_count_min=least,
        replica_count_max=settings.replicas.count_max,
    )
    return FleetModel(name, (version,))


def remote_model(
    settings: Settings, name: str, engine: EngineKind, address: str, directory: Path | None
) -> FleetModel:
    """Build a model that runs on one remote server."""
    target = FleetTarget(address, key_file=settings.remote.key_files.get(name))
    return FleetModel(name, (FleetVersion("", engine, directory, targets=(target,)),))


def assign_gpus(environment: dict[str, str], gpus: tuple[str, ...]) -> None:
    """Restrict a worker's environment to these GPUs. If empty, the worker sees all."""
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


class ReplicaBuilder:
    """Builder of replicas. `managed` lists the on-demand engines, which share a memory budget."""

    def __init__(self, settings: Settings, budget: MemoryBudget, opener: WorkerOpener) -> None:
        self.budget = budget
        self.managed: list[Resident] = []
        self._settings = settings
        self._opener = opener

    def build_set(self, model: FleetModel, version: FleetVersion, served: str) -> ReplicaSet:
        """Build the replicas of one version. Raises: CheckpointInvalid, SettingInvalid."""
        replicas = (
            self._remote_replicas(version, served)
            if version.engine == "remote"
            else self._local_replicas(version, served)
        )
        info = replace(replicas[0].engine.model, name=served)
        count_min = version.replica_count_min
        wait_s = 0.0 if self._is_lone(version) else model.recovery_wait_s
        # The cheapest policy suffices for one replica.
        policy = POLICIES[model.policy]() if len(replicas) > 1 else LeastLoaded()
        if len(replicas) == 1 or count_min >= version.replica_count_max:
            return ReplicaSet(info, replicas, policy, warm_count=count_min, recovery_wait_s=wait_s)
        return ScaledReplicaSet(
            info,
            replicas,
            policy,
            scaler=Scaler(count_min, self._idle_timeout_s(version)),
            recovery_wait_s=wait_s,
        )

    def _is_lone(self, version: FleetVersion) -> bool:
        """Return whether the model has one replica: its failures need no circuit breaker."""
        return (
            not self._settings.models.fleet_file
            and max(len(version.targets), version.replica_count_max) == 1
        )

    def _breaker(self, version: FleetVersion) -> BreakerLimits | None:
        return BreakerLimits(failure_count_max=sys.maxsize) if self._is_lone(version) else None

    def build_encoders(self, version: FleetVersion, served: str) -> EncoderSet:
        """Build the replicas of a version of an embedding model.

        Raises: CheckpointInvalid, SettingInvalid.
        """
        replicas: list[EncoderReplica] = []
        for target in version.targets:
            options = remote_settings(self._settings, served, target, version.directory)
            if options.target.service.is_http:
                raise SettingInvalid(
                    f"{target.address}: embedding models are not supported over HTTP, use"
                    " vllm://host:port"
                )
            from inference.adapters.remote_encoder import RemoteEncoder

            replicas.append(EncoderReplica(target.address, RemoteEncoder(options)))
        for index in range(0 if version.targets else version.replica_count_max):
            assert version.directory is not None, "only those of remote engines may be left out"
            build, memory_bytes = encoder_plan(self._settings, served, version.directory)
            terms = ManagedTerms(
                self._idle_timeout_s(version), self._needs(version, index, memory_bytes)
            )
            managed = ManagedEncoder(build, terms, self.budget)
            self.managed.append(managed)
            replicas.append(EncoderReplica(f"{served}#{index}", managed))
        warm_count = len(replicas) if version.targets else version.replica_count_min
        return EncoderSet(
            replace(replicas[0].encoder.model, name=served), replicas, warm_count=warm_count
        )

    def _needs(self, version: FleetVersion, index: int, memory_bytes: int) -> Needs:
        """Build the needs of a replica without GPUs. `memory_bytes` is estimated from its files."""
        return Needs(
            version.memory_bytes or memory_bytes, is_pinned=index < version.replica_count_min
        )

    def _idle_timeout_s(self, version: FleetVersion) -> float:
        return (
            self._settings.replicas.idle_timeout_s
            if version.idle_timeout_s is None
            else version.idle_timeout_s
        )

    def _remote_replicas(self, version: FleetVersion, served: str) -> list[Replica]:
        """Build one replica per server. All stay connected, since connections cost little."""
        settings = self._settings
        replicas = []
        for target in version.targets:
            options = remote_settings(settings, served, target, version.directory)
            if version.share_prefixes:
                options = replace(options, share_prefixes=True)
            # Imported late: the package was checked above.
            from inference.adapters.remote_engine import RemoteEngine

            engine = RemoteEngine(options)
            replicas.append(
                Replica(
                    target.address,
                    engine,
                    target.region or settings.models.region,
                    self._breaker(version),
                )
            )
        return replicas

    def _local_replicas(self, version: FleetVersion, served: str) -> list[Replica]:
        """Build local replicas: the first `replica_count_min` stay warm, others start on demand."""
        assert version.directory is not None, "only those of remote engines may be left out"
        plan = engine_plan(
            self._settings,
            version.engine,
            served,
            version.directory,
            self._opener,
            version.engine_config,
        )
        replicas = []
        for index in range(version.replica_count_max):
            environment: dict[str, str] = {}  # of the replica's worker, set before each start
            needs = self._needs(version, index, plan.memory_bytes)
            needs = replace(
                needs,
                gpu_count=plan.gpu_count,
                gpu_memory_bytes=needs.memory_bytes // plan.shard_count if plan.shard_count else 0,
                gpus=version.gpus,
            )
            terms = ManagedTerms(
                self._idle_timeout_s(version), needs, partial(assign_gpus, environment)
            )
            managed = ManagedEngine(partial(plan.build, environment), terms, self.budget)
            self.managed.append(managed)
            replicas.append(
                Replica(
                    f"{served}#{index}",
                    managed,
                    version.region or self._settings.models.region,
                    self._breaker(version),
                )
            )
        return replicas
