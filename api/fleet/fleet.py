"""Construction of a process's engines, as named by `WEIR_FLEET` or, without it, by `WEIR_MODELS`.

One of the few modules of the API that know concrete engines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import grpc
import structlog

from api.core.settings import Settings, bundled_encoders, bundled_models
from api.fleet.fleet_file import (
    ENCODERS,
    WORD,
    EngineKind,
    Fleet,
    FleetModel,
    FleetTarget,
    FleetVersion,
    read_fleet,
)
from api.fleet.launcher_reader import FleetLauncher
from api.fleet.launching import LaunchedVersion
from api.fleet.target_names import Addresses
from common.gpus import GpusUnknown, read_gpus, visible_gpus
from common.settings import SettingInvalid
from inference.adapters.launched_replica import LaunchedReplica
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
    is_stored_in_bfloat16,
    stored_bytes,
    torch_memory_bytes,
)
from inference.routing.on_demand import ManagedEncoder, ManagedEngine, ManagedTerms
from inference.routing.placement import POLICIES, LeastLoaded, PlacementPolicy
from inference.routing.replica import BreakerLimits, Replica
from inference.routing.replica_set import ReplicaSet
from inference.routing.router import VERSION_MARK, Catalog, Share
from inference.routing.scaling import ScaledReplicaSet, Scaler
from inference.text.tokenizer import Tokenizer
from inference.workers.process import Sharing, WorkerOpener, open_worker
from inference.workers.reservations import Reservations
from inference.workers.sharing import DirectoryUnusable, EngineDirectory

log = structlog.get_logger(__name__)

# Memory of a GPU above which another process uses it; drivers and displays use less.
GPU_USED_BYTES_MAX = 1 << 30
ADAPTER_MARK = ":"  # between the names of a model and its adapter
# Seconds for a tokenizer of some 10 MB; a server that loads its model does not answer.
FETCH_TIMEOUT_S = 30.0
CPU_KV_CACHE_BYTES = 1 << 30
NO_ADDRESSES: Addresses = MappingProxyType({})
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


class Build(Protocol):
    """Factory of an engine that is not started."""

    def __call__(
        self, environment: Mapping[str, str], share: Sharing = lambda start: start, /
    ) -> Engine:
        """Build the engine. `environment` is that of its worker, read at each start; `share` turns
        the opener of its worker into one that shares it with other processes.
        """


class EnginePlan(NamedTuple):
    """Factory of an engine, with the resources that the engine needs.

    `settings` are all that its workers differ in. `memory_bytes` is for the whole engine.
    `gpu_count` is the number of GPUs for its exclusive use, `shard_count` how many of them split
    the weights. Both are 0 without GPUs.
    """

    build: Build
    settings: object
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

            def build(
                environment: Mapping[str, str], share: Sharing = lambda start: start, /
            ) -> Engine:
                return TensorRtEngine(replace(tensorrt, environment=environment), share)

            return EnginePlan(
                build,
                tensorrt,
                stored_bytes(directory),
                tensorrt.gpu_count,
                tensorrt.shard_count,
            )
        case "torch" | "simulated":
            own = settings.having(engine_device="simulated") if kind == "simulated" else settings
            torch = torch_settings(own, name, directory)

            def build_torch(
                environment: Mapping[str, str], share: Sharing = lambda start: start, /
            ) -> Engine:
                return TorchEngine(replace(torch, environment=environment), share(opener))

            if torch.simulation is not None:
                # Simulated engines have neither weights nor a KV cache.
                return EnginePlan(build_torch, torch, HOST_BYTES)
            on_gpu = torch.device == "cuda"
            kv_cache_bytes = 0 if on_gpu else torch.kv_cache_bytes or 0
            memory_bytes = torch_memory_bytes(directory, torch.compute_dtype, kv_cache_bytes)
            return EnginePlan(build_torch, torch, memory_bytes, int(on_gpu))
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
    packed = PackedTarget(str(settings.packed_directory), settings.engine.packed_weights_bytes)
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


Location = tuple[FleetTarget, str] | int  # server and its address, or number of a local replica


def locations_of(version: FleetVersion, addresses: Addresses) -> list[Location]:
    """List the locations of a version's replicas; a name with several addresses has several."""
    if not version.targets:
        return list(range(version.replica_count_max))
    return [
        (target, address)
        for target in version.targets
        for address in addresses.get(target.address) or ("",)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PartTerms:
    """Version of a model for this process: what its set of replicas follows.

    `members` has its replicas by location. `launched` are those whose servers a launcher starts;
    None if none does. `is_plain` is True if the fleet comes from `WEIR_MODELS` and the like.
    """

    served: str
    model: FleetModel
    version: FleetVersion
    members: Mapping[Location, Replica | EncoderReplica]
    idle_timeout_s: float
    is_plain: bool
    launched: LaunchedVersion | None = None

    @property
    def warm_count(self) -> int:
        """Number of replicas that stay loaded; all remote ones stay connected."""
        return len(self.members) if self.version.targets else self.version.replica_count_min

    @property
    def recovery_wait_s(self) -> float:
        """Wait of a sequence for another replica: none if the model can have no other."""
        return 0.0 if self.is_lone else self.model.recovery_wait_s

    @property
    def is_lone(self) -> bool:
        """True if the model has one replica, whose failures need no circuit breaker."""
        return self.is_plain and len(self.members) == 1

    @property
    def breaker_limits(self) -> BreakerLimits:
        """Limits of the circuit breakers of its replicas."""
        return BreakerLimits(failure_count_max=sys.maxsize) if self.is_lone else BreakerLimits()

    @property
    def policy(self) -> type[PlacementPolicy]:
        """Policy that places its sequences; the cheapest suffices for one replica."""
        return POLICIES[self.model.policy] if len(self.members) > 1 else LeastLoaded

    @property
    def replicas(self) -> list[Replica]:
        """Replicas of a model that generates."""
        return [each for each in self.members.values() if isinstance(each, Replica)]

    @property
    def encoders(self) -> list[EncoderReplica]:
        """Replicas of an embedding model."""
        return [each for each in self.members.values() if isinstance(each, EncoderReplica)]

    def managed(self) -> Iterator[tuple[ManagedEngine | ManagedEncoder, bool]]:
        """Yield its engines that hold memory, each with whether it is to stay loaded."""
        for index, member in enumerate(self.members.values()):
            if isinstance(member.backend, ManagedEngine | ManagedEncoder):
                yield member.backend, index < self.version.replica_count_min


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Set of replicas of one version, with the terms that it is to follow."""

    terms: PartTerms
    backend: ReplicaSet | EncoderSet

    def adjust(self) -> None:
        """Let the running set follow the terms: replicas, counts, timeouts, policy."""
        terms, backend = self.terms, self.backend
        for managed, is_pinned in terms.managed():
            managed.change_terms(idle_timeout_s=terms.idle_timeout_s, is_pinned=is_pinned)
        if isinstance(backend, EncoderSet):
            backend.become(terms.encoders, terms.warm_count)
            return
        for replica in terms.replicas:
            replica.limit(terms.breaker_limits)
        if isinstance(backend, ScaledReplicaSet):
            backend.scaler.min_count = terms.version.replica_count_min
            backend.scaler.idle_timeout_s = terms.idle_timeout_s
        backend.become(terms.replicas, terms.warm_count)
        backend.place_by(terms.policy, terms.recovery_wait_s)


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """Models and engines of a process: the parts of its fleet by served name.

    `engines` generate, `encoders` embed, by served name. `catalog` lists the names that clients can
    request, `tokenizers` has that of each served name. `budget` is what all engines may take.
    """

    fleet: Fleet
    parts: Mapping[str, Part]
    catalog: Catalog
    tokenizers: Mapping[str, Tokenizer]
    budget: BudgetTerms

    @property
    def engines(self) -> dict[str, Engine]:
        return {
            name: part.backend
            for name, part in self.parts.items()
            if isinstance(part.backend, ReplicaSet)
        }

    @property
    def encoders(self) -> dict[str, Encoder]:
        return {
            name: part.backend
            for name, part in self.parts.items()
            if isinstance(part.backend, EncoderSet)
        }

    @property
    def launched(self) -> list[LaunchedVersion]:
        """Versions whose servers a launcher starts, within the pools of the fleet."""
        found = [part.terms.launched for part in self.parts.values()]
        return [each for each in found if each is not None]


class BudgetTerms(NamedTuple):
    """Memory and GPUs of this machine that a fleet may use."""

    memory_bytes: int | None
    gpus: tuple[str, ...]
    gpu_memory: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedResident:
    """Engine that is to hold memory. Implements `Resident`, to check a fleet before it runs."""

    name: str
    needs: Needs
    is_leaving: bool = False

    def idle_since_s(self) -> float | None:
        """Implement `Resident.idle_since_s`."""
        return None

    def evict(self) -> None:
        """Implement `Resident.evict`."""


def build_serving(settings: Settings, opener: WorkerOpener = open_worker) -> Serving:
    """Build the backends of the fleet that the settings name.

    `opener` starts the worker processes. Raises: SettingInvalid; CheckpointInvalid naming the file.
    """
    fleet, is_plain = fleet_of_settings(settings)
    return FleetBuilder(settings, opener).build(fleet, is_plain=is_plain)


def fleet_of_settings(settings: Settings) -> tuple[Fleet, bool]:
    """Read the fleet of the settings, and whether it comes from `WEIR_MODELS` and the like.

    Raises: SettingInvalid.
    """
    if settings.models.fleet_file:
        return fleet_of_file(settings), False
    return fleet_of_models(settings), True


def runs_on(before: PartTerms, after: PartTerms) -> bool:
    """Return whether replicas that were built for one version can serve another as they are."""

    def engine(version: FleetVersion) -> tuple[Any, ...]:
        return (
            version.engine,
            version.directory,
            version.region,
            version.memory_bytes,
            version.engine_config,
            version.gpus,
            version.share_prefixes,
            version.launcher,
        )

    return engine(before.version) == engine(after.version)


def built_set(terms: PartTerms) -> ReplicaSet | EncoderSet:
    """Build the set of a version from its replicas."""
    if encoders := terms.encoders:
        info = replace(encoders[0].encoder.model, name=terms.served)
        return EncoderSet(info, encoders, warm_count=terms.warm_count)
    replicas, policy, wait_s = terms.replicas, terms.policy(), terms.recovery_wait_s
    info = replace(replicas[0].engine.model, name=terms.served)
    if terms.version.targets:
        return ReplicaSet(info, replicas, policy, recovery_wait_s=wait_s)
    scaler = Scaler(terms.version.replica_count_min, terms.idle_timeout_s)
    return ScaledReplicaSet(info, replicas, policy, scaler=scaler, recovery_wait_s=wait_s)


def load_tokenizers(
    parts: Iterable[Part], settings: Settings, running: Serving | None
) -> dict[str, Tokenizer]:
    """Load the tokenizer of each served name, unless `running` has it.

    Raises: SettingInvalid, CheckpointInvalid.
    """
    backends = {part.terms.served: part.backend for part in parts}
    formats = settings.models.tool_call_formats
    if unknown := sorted(formats.keys() - backends.keys()):
        raise SettingInvalid(
            f"WEIR_TOOL_CALL_FORMATS: no model is named {', '.join(unknown)}; known are"
            f" {', '.join(backends)}"
        )
    tokenizers = {}
    for name, backend in backends.items():
        before = None if running is None else running.parts.get(name)
        if running is not None and before is not None and before.backend is backend:
            tokenizers[name] = running.tokenizers[name]
            continue
        tokenizer = Tokenizer(Path(backend.model.directory), formats.get(name))
        tokenizer.check_fits(backend.model.vocabulary_size)
        if faults := tokenizer.template_faults():
            log.warning("chat_template_refuses", model=name, conversations=faults)
        tokenizers[name] = tokenizer
    return tokenizers


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
    check_region(settings, fleet)
    return fleet


def check_region(settings: Settings, fleet: Fleet) -> None:
    """Check that the fleet has the region of this process. Raises: SettingInvalid."""
    region, of_database = settings.models.region, settings.database.region
    if of_database not in ("", region):
        raise SettingInvalid(
            f"WEIR_DATABASE_REGION={of_database!r}: all processes of such a database are in its"
            f" region: set WEIR_REGION={of_database}, or leave it out"
        )
    if region and region not in fleet.regions:
        known = ", ".join(fleet.regions) or "none"
        raise SettingInvalid(
            f"WEIR_REGION={region!r}: must be a region of WEIR_FLEET; there are: {known}"
        )


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
        directory.absolute(),
        replica_count_min=least,
        replica_count_max=settings.replicas.count_max,
    )
    return FleetModel(name, (version,))


def remote_model(
    settings: Settings, name: str, engine: EngineKind, address: str, directory: Path | None
) -> FleetModel:
    """Build a model that runs on one remote server."""
    target = FleetTarget(address, key_file=settings.remote.key_files.get(name))
    if directory is not None:
        directory = directory.absolute()
    return FleetModel(name, (FleetVersion("", engine, directory, targets=(target,)),))


def assign_gpus(environment: dict[str, str], gpus: tuple[str, ...]) -> None:
    """Restrict a worker's environment to these GPUs. If empty, the worker sees all."""
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def engine_directory(settings: Settings) -> EngineDirectory:
    """Open the directory of this machine's engine workers. Raises: SettingInvalid."""
    path = settings.engine_directory
    try:
        return EngineDirectory(path)
    except (DirectoryUnusable, OSError) as error:
        raise SettingInvalid(
            f"WEIR_ENGINE_DIRECTORY={str(path)!r}: {error}; name a directory on a local disk that"
            " only this user can write"
        ) from error


class FleetBuilder:
    """Builder of the parts of a fleet. Its engines share one `budget` of memory and GPUs."""

    def __init__(self, settings: Settings, opener: WorkerOpener) -> None:
        """`opener` starts worker processes. Raises: SettingInvalid."""
        self._directory = engine_directory(settings)
        self.budget = MemoryBudget(reservations=Reservations(self._directory))
        self._settings = settings
        self._opener = opener

    def build(
        self,
        fleet: Fleet,
        running: Serving | None = None,
        addresses: Addresses = NO_ADDRESSES,
        *,
        is_plain: bool = False,
    ) -> Serving:
        """Build what a fleet needs beside what `running` has of it. Starts and changes nothing.

        `addresses` are those of targets with several. Can run in a thread. Raises:
        CheckpointInvalid, SettingInvalid.
        """
        settings = self._settings
        check_region(settings, fleet)
        gpus = fleet.gpus or visible_gpus() or named_gpus(fleet)
        budget = BudgetTerms(
            fleet.memory_bytes or settings.replicas.memory_bytes or None,
            gpus,
            memory_of_gpus(gpus),
        )
        parts: dict[str, Part] = {}
        shares: dict[str, list[Share]] = {}
        for model in fleet.models:
            for version in model.versions:
                mark = f"{VERSION_MARK}{version.version}" if version.version else ""
                served = f"{model.name}{mark}"
                terms = PartTerms(
                    served, model, version, {}, self._idle_timeout_s(version), is_plain
                )
                before = running.parts.get(served) if running is not None else None
                parts[served] = self._part(terms, before, locations_of(version, addresses))
                share = Share(version.version, served, version.weight)
                shares.setdefault(model.name, []).append(share)
        catalog = Catalog(
            shares,
            fleet.aliases,
            fleet.regions,
            settings.models.region,
            {model.name: model.fallback for model in fleet.models if model.fallback},
        )
        tokenizers = load_tokenizers(parts.values(), settings, running)
        serving = Serving(fleet, parts, catalog, tokenizers, budget)
        add_adapters(settings, serving.engines, shares, fleet.aliases)
        self._check_budget(serving)
        return serving

    def use(self, serving: Serving) -> None:
        """Let the budget follow a fleet that is to run from now on."""
        self.budget.resize(*serving.budget)
        managed = [each for part in serving.parts.values() for each, _ in part.terms.managed()]
        self.budget.check(managed)
        self.budget.poll()

    def _check_budget(self, serving: Serving) -> None:
        """Check that each engine fits: warm replicas, with any other one beside them.

        Raises: SettingInvalid.
        """
        settings = self._settings
        planned = [
            PlannedResident(managed.name, replace(managed.needs, is_pinned=is_pinned))
            for part in serving.parts.values()
            for managed, is_pinned in part.terms.managed()
        ]
        total_bytes, gpus, gpu_memory = serving.budget
        try:
            MemoryBudget(total_bytes, gpus=gpus, gpu_memory=gpu_memory).check(planned)
        except GpusTooFew as error:
            raise SettingInvalid(
                f"gpus of WEIR_FLEET, or CUDA_VISIBLE_DEVICES: {error}; lower its replicas, or its"
                " tensor_parallel_size"
            ) from error
        except GpuTooSmall as error:
            raise SettingInvalid(
                f"gpus of WEIR_FLEET, or CUDA_VISIBLE_DEVICES: {error}; raise its"
                " tensor_parallel_size, or set its memory_bytes if its files hold more than it"
                " loads"
            ) from error
        except BudgetTooSmall as error:
            setting = f"WEIR_ENGINE_MEMORY_BYTES={settings.replicas.memory_bytes}"
            if settings.models.fleet_file or serving.fleet.memory_bytes:
                setting = "memory_bytes of WEIR_FLEET, or WEIR_ENGINE_MEMORY_BYTES"
            remedy = f"allow at least {error.needed_bytes:,}, or lower WEIR_KV_CACHE_BYTES"
            raise SettingInvalid(f"{setting}: {error}; {remedy}") from error

    def _part(self, terms: PartTerms, before: Part | None, locations: Sequence[Location]) -> Part:
        """Build the part of a version, with the replicas of `before` that it can keep."""
        version, served = terms.version, terms.served
        if before is not None and not runs_on(before.terms, terms):
            before = None
        if version.launcher is not None:
            earlier = None if before is None else before.terms.launched
            terms = replace(
                terms, launched=self._launched(version, version.launcher, served, earlier)
            )
        present = before.terms.members if before is not None else {}
        build_local = None
        members: dict[Location, Replica | EncoderReplica] = {}
        for location in locations:
            if location in present:
                members[location] = present[location]
            elif not isinstance(location, int):
                members[location] = self._remote(version, served, *location)
            elif terms.launched is not None:
                _, engine = terms.launched.members[location]
                region = version.region or self._settings.models.region
                # A server that a launcher starts elsewhere is where the version says.
                known = region if terms.launched.is_local else version.region
                name = f"{served}#{location}"
                members[location] = Replica(name, engine, region, known_region=known)
            else:
                build_local = build_local or self._local(version, served)
                members[location] = build_local(location)
        terms = replace(terms, members=members)
        if before is None:
            for replica in terms.replicas:
                replica.limit(terms.breaker_limits)
        return Part(terms, before.backend if before is not None else built_set(terms))

    def _idle_timeout_s(self, version: FleetVersion) -> float:
        return (
            self._settings.replicas.idle_timeout_s
            if version.idle_timeout_s is None
            else version.idle_timeout_s
        )

    def _launched(
        self,
        version: FleetVersion,
        launcher: FleetLauncher,
        served: str,
        before: LaunchedVersion | None,
    ) -> LaunchedVersion:
        """Build the engines whose servers a launcher starts, beside those that `before` has."""
        settings = self._settings
        # The address is known once the server runs; only its kind matters now.
        unknown = str(Target(launcher.service, "launched:1"))
        target = FleetTarget(unknown, version.region, launcher.key_file, launcher.key_header)
        options = remote_settings(settings, served, target, version.directory)
        if version.share_prefixes:
            options = replace(options, share_prefixes=True)
        # Imported late: the package was checked above.
        from inference.adapters.remote_launched import LaunchedEngine

        found = LaunchedVersion(
            served,
            launcher.build(settings.home) if before is None else before.launcher,
            launcher.terms,
            is_local=launcher.is_local,
            ends_with_service=launcher.is_local and not launcher.keep_running,
            source=launcher,
        )
        if before is not None:
            found.members += before.members[: version.replica_count_max]
        for number in range(len(found.members), version.replica_count_max):
            launched = LaunchedReplica(served, number)
            build = partial(LaunchedEngine, options, launched)
            managed = ManagedEngine(build, self._terms(version, number, Needs()))
            found.members.append((launched, managed))
        return found

    def _terms(self, version: FleetVersion, index: int, needs: Needs) -> ManagedTerms:
        """Build the terms of a local replica. `needs` are estimated from its files."""
        return ManagedTerms(
            self._idle_timeout_s(version),
            replace(
                needs,
                memory_bytes=version.memory_bytes or needs.memory_bytes,
                is_pinned=index < version.replica_count_min,
            ),
        )

    def _remote(
        self, version: FleetVersion, served: str, target: FleetTarget, address: str
    ) -> Replica | EncoderReplica:
        """Build the replica of a server. It stays connected, since connections cost little.

        `address` is one of several that the target's name has; empty if it has one.
        """
        settings = self._settings
        options = remote_settings(settings, served, target, version.directory)
        name = target.address
        if address:
            found = replace(options.target, address=address, name=options.target.address)
            options, name = replace(options, target=found), f"{name}#{address.rpartition(':')[0]}"
        # Imported late: the package was checked above.
        if version.engine in ENCODERS:
            if options.target.service.is_http:
                raise SettingInvalid(
                    f"{target.address}: embedding models are not supported over HTTP, use"
                    " vllm://host:port"
                )
            from inference.adapters.remote_encoder import RemoteEncoder

            return EncoderReplica(name, RemoteEncoder(options), target.region)
        from inference.adapters.remote_engine import RemoteEngine

        if version.share_prefixes:
            options = replace(options, share_prefixes=True)
        region = target.region or settings.models.region
        return Replica(name, RemoteEngine(options), region, known_region=target.region)

    def _local(
        self, version: FleetVersion, served: str
    ) -> Callable[[int], Replica | EncoderReplica]:
        """Return a function that builds the replica of a number.

        The first `replica_count_min` stay warm, others start on demand.
        """
        assert version.directory is not None, "only those of remote engines may be left out"
        settings, directory = self._settings, version.directory
        if version.engine in ENCODERS:
            build_encoder, memory_bytes = encoder_plan(settings, served, directory)

            def encoder(index: int) -> EncoderReplica:
                name = f"{served}#{index}"
                needs = Needs(memory_bytes, replica=self._directory.private(name))
                terms = self._terms(version, index, needs)
                managed = ManagedEncoder(build_encoder, terms, self.budget)
                return EncoderReplica(name, managed, version.region or settings.models.region)

            return encoder
        plan = engine_plan(
            settings, version.engine, served, directory, self._opener, version.engine_config
        )
        needs = Needs(plan.memory_bytes, plan.gpu_count, gpus=version.gpus)

        def engine(index: int) -> Replica:
            environment: dict[str, str] = {}  # of the replica's worker, set before each start
            region = version.region or settings.models.region
            shared = self._directory.replica(f"{served}#{index}", plan.settings, region)
            terms = self._terms(version, index, replace(needs, replica=shared))
            if plan.shard_count:
                gpu_bytes = terms.needs.memory_bytes // plan.shard_count
                terms = replace(terms, needs=replace(terms.needs, gpu_memory_bytes=gpu_bytes))
            terms = replace(terms, place=partial(assign_gpus, environment))
            build = partial(plan.build, environment, shared.opener)
            managed = ManagedEngine(build, terms, self.budget)
            return Replica(f"{served}#{index}", managed, region)

        return engine
