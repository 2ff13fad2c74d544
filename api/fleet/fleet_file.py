"""Parser of the file that `WEIR_FLEET` names: models, versions, replicas, aliases, regions.

All errors of a file are reported together, each with its line, its place in the file and what to
do. Unknown keys are errors. Defaults are those of the classes here; `docs/reference/fleet.md`
explains the keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml
from weir_cli.yaml_files import FileError, Keys, NotYaml, compose, similar_name
from yaml.constructor import SafeConstructor

from api.core.settings import Settings
from api.fleet.endpoint_slices import SlicesTerms
from api.fleet.launch_plan import Pool
from api.fleet.launcher_reader import (
    OBJECT_NAME,
    UNITS_MAX,
    FleetLauncher,
    ValueReader,
    matching,
    word,
)
from common.settings import SettingInvalid, number, one_of, truth, whole
from inference.adapters.remote_settings import TARGET_FORM, Service, key_header, parse_target

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B|)")
UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)
}
EngineKind = Literal["torch", "tensorrt", "remote", "encoder", "remote-encoder", "simulated"]
ENCODERS = ("encoder", "remote-encoder")
REMOTE = ("remote", "remote-encoder")
Policy = Literal["prefix_aware", "least_loaded", "round_robin"]
# Name of a model or an alias; `@` separates versions.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
GPU = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[0-9a-fA-F/-]+")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a version or a region
# Replicas per version; each is a process, or a connection of every api process.
REPLICA_COUNT_MAX = 256
WEIGHT_MAX = 1e6
IDLE_TIMEOUT_S_MAX = 7 * 86_400.0
RECOVERY_WAIT_S_MAX = 600.0
FALLBACK_COUNT_MAX = 4  # models to try for one request
RECOVERY_WAIT_S = 10.0  # enough to restart the process of a small model
OF_LOCAL_ENGINES = ("replicas", "idle_timeout_s", "memory_bytes", "region")
OF_GPU_ENGINES = ("engine_config", "gpus")
OF_GENERATING = ("policy", "recovery_wait_s", "fallback")
OF_REMOTE = ("targets", "share_prefixes", "launcher")  # all but the first: to generate
OF_TARGET = ("address", "region", "key_file", "key_header", "endpoint_slices")
OF_LAUNCHED = ("replicas", "idle_timeout_s", "region")
OF_VERSION = {"engine", "directory", "weight", *OF_REMOTE, *OF_LOCAL_ENGINES, *OF_GPU_ENGINES}

UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


def size(value: str) -> int:
    """Parse a size such as `24GiB`, and return it in bytes. Raises: ValueError."""
    found = SIZE.fullmatch(value)
    if found is None:
        raise ValueError("must be a number of bytes, such as 24GiB")
    return int(float(found[1]) * UNITS[found[2]])


def gpu(value: str) -> str:
    """Validate the number or UUID of a GPU. Raises: ValueError."""
    if not GPU.fullmatch(value):
        raise ValueError("must be the number or the UUID of a GPU")
    return value


def target(value: str) -> str:
    """Parse the address of a remote engine and return it in canonical notation.

    Raises: ValueError.
    """
    try:
        return str(parse_target(value))
    except ValueError:
        raise ValueError(TARGET_FORM) from None


@dataclass(frozen=True, slots=True)
class FleetTarget:
    """Remote engine: its address, its region, and the file with its API key.

    `key_header` is the header that carries the key; if empty, WEIR_REMOTE_KEY_HEADER names it. With
    `slices`, it stands for the ready endpoints of a Kubernetes service at the port of its address.
    """

    address: str
    region: str = ""
    key_file: Path | None = None
    key_header: str = ""
    slices: SlicesTerms | None = None


@dataclass(frozen=True, slots=True)
class FleetVersion:
    """Version of a model, or the whole model if `version` is empty.

    `directory` has the checkpoint, or a remote engine's tokenizer; None: fetch it from the server.
    `region` applies to local replicas. `replica_count_min` of them stay warm; the others start
    under load and stop after `idle_timeout_s` (0: never; None: WEIR_MODEL_IDLE_TIMEOUT_S).
    `targets` are remote engines, one replica each. `memory_bytes` is per replica; 0: estimate it
    from the checkpoint. `engine_config` has TensorRT-LLM's options, as for `trtllm-serve --config`.
    `gpus` are the ids that its replicas may use; empty: any. `share_prefixes` lets tenants share
    the prefix caches of its remote engines; if False, WEIR_REMOTE_SHARE_PREFIXES decides.
    `launcher` starts its remote engines, which then have no `targets`.
    """

    version: str
    engine: EngineKind
    directory: Path | None
    weight: float = 1.0
    region: str = ""
    replica_count_min: int = 1
    replica_count_max: int = 1
    targets: tuple[FleetTarget, ...] = ()
    idle_timeout_s: float | None = None
    memory_bytes: int = 0
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    share_prefixes: bool = False
    launcher: FleetLauncher | None = None


@dataclass(frozen=True, slots=True)
class FleetModel:
    """Model with its versions.

    `policy` routes requests between replicas. A sequence whose replica fails waits up to
    `recovery_wait_s` seconds for another one. A request that the model cannot take goes to the
    first of `fallback` that can: models, or versions as `name@version`.
    """

    name: str
    versions: tuple[FleetVersion, ...]
    policy: Policy = "prefix_aware"
    recovery_wait_s: float = RECOVERY_WAIT_S
    fallback: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Name of the model, and of its versions as `name@version`."""
        versions = [f"{self.name}@{each.version}" for each in self.versions if each.version]
        return [self.name, *versions]

    @property
    def embeds(self) -> bool:
        """True if this is an embedding model."""
        return self.versions[0].engine in ENCODERS


@dataclass(frozen=True, slots=True)
class Fleet:
    """Contents of a fleet file.

    `regions` has the fallback regions of each region. `memory_bytes` limits all local replicas
    together; None: no limit. `gpus` are the ids of the GPUs to use; empty: all that are visible.
    `pools` limit the replicas that launchers start.
    """

    models: tuple[FleetModel, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory_bytes: int | None = None
    gpus: tuple[str, ...] = ()
    pools: Mapping[str, Pool] = field(default_factory=dict)


def model_names(settings: Settings) -> tuple[list[str], list[str]]:
    """List the names of generating models and of embedding models. Raises: SettingInvalid."""
    if not settings.models.fleet_file:
        return list(settings.models.directories), list(settings.models.encoders)
    models = read_fleet(Path(settings.models.fleet_file)).models
    return [model.name for model in models if not model.embeds], [
        model.name for model in models if model.embeds
    ]


def read_fleet(path: Path) -> Fleet:
    """Read and parse a fleet file. Raises SettingInvalid, which lists all errors by line."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingInvalid(f"WEIR_FLEET={str(path)!r}: cannot be read: {error}") from error
    return parse_fleet(content, path.absolute())


def parse_fleet(content: str, path: Path) -> Fleet:
    """Parse the content of a fleet file. Relative directories start at the folder of `path`.

    Raises: SettingInvalid.
    """
    try:
        return parse_document(content, path.parent, reads_files=True)
    except FleetInvalid as invalid:
        errors = "\n  ".join(
            f"line {each.line}: {each.location or 'the file'}: {each.message}"
            for each in invalid.errors
        )
        raise SettingInvalid(f"WEIR_FLEET={str(path)!r}:\n  {errors}") from invalid


class FleetInvalid(ValueError):
    """A fleet document has errors, sorted by line."""

    def __init__(self, errors: Sequence[FileError]) -> None:
        super().__init__("; ".join(each.message for each in errors))
        self.errors = errors


def parse_document(content: str, base: Path | None, *, reads_files: bool = False) -> Fleet:
    """Parse a fleet document. Relative paths start at `base`; without it they are errors.

    With `reads_files`, `engine_config` may name a file, which is read here. Raises: FleetInvalid.
    """
    try:
        root = compose(content)
    except NotYaml as broken:
        raise FleetInvalid([FileError(broken.line, "", str(broken))]) from broken
    reader = FleetReader(base, reads_files=reads_files)
    fleet = reader.fleet(root)
    if reader.errors:
        raise FleetInvalid(sorted(reader.errors))
    return fleet


class FleetReader(ValueReader):
    """Converts the YAML nodes of a fleet file to its classes, and collects all errors."""

    def __init__(self, base: Path | None, *, reads_files: bool = True) -> None:
        """For the arguments see `parse_document`."""
        super().__init__(base)
        self._reads_files = reads_files
        self._regions: frozenset[str] = frozenset()
        self._pools: dict[str, Pool] = {}
        self._fallbacks: dict[str, list[yaml.Node]] = {}  # by model

    def named(
        self, node: yaml.Node | None, location: str, pattern: re.Pattern[str], what: str
    ) -> Keys:
        """Read a mapping whose keys are names that the file defines; empty if it is missing."""
        found = {} if node is None else self.mapping(node, location)
        for name, value in found.items():
            if not pattern.fullmatch(name):
                self.wrong(
                    value,
                    f"{location}.{name}",
                    f"cannot be the name of {what}: it must match {pattern.pattern}",
                )
        if node is not None and not found:
            self.wrong(node, location, f"is empty: name {what}, or leave it out")
        return found

    def fleet(self, root: yaml.Node | None) -> Fleet:
        known = ("models", "aliases", "regions", "memory_bytes", "gpus", "pools")
        keys = self.mapping(root, "", known)
        regions = self.regions(keys.get("regions"))
        self._pools = self.pools(keys.get("pools"))
        if "models" not in keys:
            self.wrong(root, "models", "is missing: name at least one model")
        nodes = self.named(keys.get("models"), "models", NAME, "a model")
        models = tuple(self.model(name, node, f"models.{name}") for name, node in nodes.items())
        self.check_fallbacks(models)
        return Fleet(
            models=models,
            aliases=self.aliases(keys.get("aliases"), models),
            regions=regions,
            memory_bytes=self.value(keys.get("memory_bytes"), "memory_bytes", size, None),
            gpus=self.gpus(keys.get("gpus"), "gpus"),
            pools=self._pools,
        )

    def pools(self, node: yaml.Node | None) -> dict[str, Pool]:
        """Parse the pools of launched replicas, each with its maximum of units."""
        found = {}
        for name, each in self.named(node, "pools", WORD, "a pool").items():
            keys = self.mapping(each, f"pools.{name}", ("max",))
            self.require(each, f"pools.{name}", keys, "max")
            most = self.value_of(keys, f"pools.{name}", "max", whole(1, UNITS_MAX), 1)
            found[name] = Pool(most)
        return found

    def gpus(self, node: yaml.Node | None, location: str) -> tuple[str, ...]:
        """Parse a list of GPU ids: numbers or UUIDs, as in `CUDA_VISIBLE_DEVICES`."""
        nodes = [] if node is None else self.items(node, location)
        found = tuple(
            self.value(each, f"{location}[{index}]", gpu, "") for index, each in enumerate(nodes)
        )
        if node is not None and (not found or len(set(found)) < len(found)):
            self.wrong(node, location, "must name at least one GPU, each once")
        return found

    def regions(self, node: yaml.Node | None) -> dict[str, tuple[str, ...]]:
        """Parse the regions, each with the list of its fallback regions."""
        nodes = self.named(node, "regions", WORD, "a region")
        self._regions = frozenset(nodes)
        found = {}
        for name, each in nodes.items():
            location = f"regions.{name}"
            fallbacks = tuple(
                self.region(other, f"{location}[{index}]")
                for index, other in enumerate(self.items(each, location))
            )
            if name in fallbacks or len(set(fallbacks)) < len(fallbacks):
                self.wrong(each, location, "must name other regions, each once")
            found[name] = fallbacks
        return found

    def model(self, name: str, node: yaml.Node, location: str) -> FleetModel:
        has_versions = isinstance(node, yaml.MappingNode) and any(
            key.value == "versions" for key, _ in node.value
        )
        allowed = {"versions"} if has_versions else OF_VERSION - {"weight"}
        keys = self.mapping(node, location, sorted({*OF_GENERATING, *allowed}))
        if has_versions:
            nodes = self.named(keys["versions"], f"{location}.versions", WORD, "a version")
            versions = tuple(
                self.named_version(version, each, f"{location}.versions.{version}")
                for version, each in nodes.items()
            )
            if versions and not sum(version.weight for version in versions) > 0:
                self.wrong(
                    keys["versions"],
                    f"{location}.versions",
                    "must have at least one version with a weight above 0",
                )
        else:
            versions = (self.version("", keys, node, location),)
        if versions and len({version.engine in ENCODERS for version in versions}) > 1:
            self.wrong(node, location, "must have versions that all generate, or that all embed")
        if versions and versions[0].engine in ENCODERS:
            reason = "is for models that generate: leave it out here"
            self.refuse(keys, location, OF_GENERATING, reason)
        policy = self.value_of(keys, location, "policy", one_of(*get_args(Policy)), "prefix_aware")
        wait = number(0, RECOVERY_WAIT_S_MAX)
        return FleetModel(
            name=name,
            versions=versions,
            policy=cast(Policy, policy),
            recovery_wait_s=self.value_of(keys, location, "recovery_wait_s", wait, RECOVERY_WAIT_S),
            fallback=self.fallback(name, keys.get("fallback"), f"{location}.fallback"),
        )

    def fallback(self, model: str, node: yaml.Node | None, location: str) -> tuple[str, ...]:
        """Parse the fallback of a model; `check_fallbacks` checks the names."""
        if node is None:
            return ()
        self._fallbacks[model] = nodes = self.items(node, location)
        if not 1 <= len(nodes) <= FALLBACK_COUNT_MAX:
            reason = f"must name 1 to {FALLBACK_COUNT_MAX} models: shorten it, or leave it out"
            self.wrong(node, location, reason)
        return tuple(
            self.value(each, f"{location}[{index}]", word, "") for index, each in enumerate(nodes)
        )

    def check_fallbacks(self, models: tuple[FleetModel, ...]) -> None:
        """Check that fallbacks are models that generate, each named once, without a cycle."""
        owners = {name: model for model in models for name in model.names}
        known = {name for name, model in owners.items() if not model.embeds}
        next_of = {
            model.name: {owners[name].name for name in model.fallback if name in owners}
            for model in models
        }
        for model in models:
            for index, node in enumerate(self._fallbacks.get(model.name, ())):
                name, location = model.fallback[index], f"models.{model.name}.fallback[{index}]"
                if name in model.fallback[:index]:
                    self.wrong(node, location, f"names {name!r} again: name each model once")
                elif name and name not in known:
                    near = similar_name(name, known, len(self.errors))
                    hint = f"; did you mean {near!r}?" if near else ""
                    what = "a model that generates, or its version as name@version"
                    self.wrong(node, location, f"must name {what}, not {name!r}{hint}")
                elif name and (path := path_to(model.name, owners[name].name, next_of)):
                    cycle = ", ".join((model.name, *path))
                    reason = f"leads back to {model.name!r} ({cycle}): name a model that does not"
                    self.wrong(node, location, reason)

    def named_version(self, version: str, node: yaml.Node, location: str) -> FleetVersion:
        return self.version(
            version, self.mapping(node, location, sorted(OF_VERSION)), node, location
        )

    def version(self, version: str, keys: Keys, node: yaml.Node, location: str) -> FleetVersion:
        get = keys.get
        kinds = get_args(EngineKind)
        engine = cast(EngineKind, self.value_of(keys, location, "engine", one_of(*kinds), "torch"))
        if "directory" not in keys and engine not in REMOTE:
            self.wrong(node, f"{location}.directory", "is missing: name that of the checkpoint")
        count_min, count_max = self.replicas(get("replicas"), f"{location}.replicas")
        targets = self.targets(get("targets"), f"{location}.targets")
        launcher = self.launcher(get("launcher"), f"{location}.launcher", self._pools)
        if launcher is not None and engine == "remote":
            reason = "is for servers that run anyway: leave it out, or leave out `launcher`"
            self.refuse(keys, location, ("targets",), reason)
            reason = "is for engines on this machine: leave it out here"
            self.refuse(keys, location, set(OF_LOCAL_ENGINES) - set(OF_LAUNCHED), reason)
            if count_max > 1 and not launcher.can_have_several:
                reason = "must have a max of 1: its launcher has one address, without {number}"
                self.wrong(get("replicas"), f"{location}.replicas", reason)
        elif engine in REMOTE:
            count_min = count_max = max(len(targets), 1)
            if not targets:
                self.wrong(
                    get("targets") or node,
                    f"{location}.targets",
                    "is missing: name the vllm://host:port of each remote engine",
                )
            reason = "is for engines that Weir starts itself: leave it out here"
            self.refuse(keys, location, OF_LOCAL_ENGINES, reason)
        used = OF_REMOTE if engine == "remote" else OF_REMOTE[:1] if engine in REMOTE else ()
        unused = [name for name in OF_REMOTE if name not in used]
        reason = "is for remote engines: leave it out, or say `engine: remote`"
        self.refuse(keys, location, unused, reason)
        if engine != "tensorrt":
            reason = "is for TensorRT-LLM: leave it out, or say `engine: tensorrt`"
            self.refuse(keys, location, ["engine_config"], reason)
        if engine not in ("tensorrt", "torch"):
            reason = (
                "is for engines on this machine's GPUs: leave it out, or say `engine: tensorrt`"
                " or `engine: torch`"
            )
            self.refuse(keys, location, ["gpus"], reason)
        return FleetVersion(
            version=version,
            engine=engine,
            directory=self.path_of(keys, location, "directory"),
            weight=self.value_of(keys, location, "weight", number(0, WEIGHT_MAX), 1.0),
            region=self.region(get("region"), f"{location}.region"),
            replica_count_min=count_min,
            replica_count_max=count_max,
            targets=targets,
            idle_timeout_s=self.value_of(
                keys, location, "idle_timeout_s", number(0, IDLE_TIMEOUT_S_MAX), None
            ),
            memory_bytes=self.value_of(keys, location, "memory_bytes", size, 0),
            engine_config=self.engine_config(get("engine_config"), f"{location}.engine_config"),
            gpus=self.gpus(get("gpus"), f"{location}.gpus"),
            share_prefixes=self.value_of(keys, location, "share_prefixes", truth, False),
            launcher=launcher,
        )

    def engine_config(self, node: yaml.Node | None, location: str) -> dict[str, Any]:
        """Read the options of an engine: a mapping, or the path of a YAML file that has one."""
        if node is None:
            return {}
        root: yaml.Node | None = node
        if isinstance(node, yaml.ScalarNode) and not self._reads_files:
            self.wrong(node, location, "write its entries here: only a server's own file names one")
            return {}
        if isinstance(node, yaml.ScalarNode):
            assert self._base is not None, "files are read for a file, which has a folder"
            path = self._base / node.value
            try:
                root = compose(path.read_text(encoding="utf-8"))
            except NotYaml as error:
                self.wrong(node, location, f"{path}: line {error.line}: {error}")
                return {}
            except (OSError, UnicodeDecodeError) as error:
                self.wrong(node, location, f"{path} cannot be read: {error}")
                return {}
        try:
            found = None if root is None else SafeConstructor().construct_document(root)
        except yaml.YAMLError as error:
            self.wrong(node, location, f"cannot be read: {error}")
            return {}
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            self.wrong(node, location, "write a mapping, or the path of a file with one")
            return {}
        return found

    def replicas(self, node: yaml.Node | None, location: str) -> tuple[int, int]:
        if node is None:
            return 1, 1
        keys = self.mapping(node, location, ("min", "max"))
        count_min = self.value_of(keys, location, "min", whole(0, REPLICA_COUNT_MAX), 1)
        count_max = self.value_of(
            keys, location, "max", whole(1, REPLICA_COUNT_MAX), max(count_min, 1)
        )
        if count_max < count_min:
            self.wrong(
                node,
                location,
                f"must have a max of at least its min, which is {count_min}, not {count_max}",
            )
        return count_min, count_max

    def targets(self, node: yaml.Node | None, location: str) -> tuple[FleetTarget, ...]:
        """Parse a list of remote engines, each an address like `vllm://host:port` or a mapping."""
        found = []
        for index, each in enumerate([] if node is None else self.items(node, location)):
            at = f"{location}[{index}]"
            if isinstance(each, yaml.ScalarNode):
                found.append(FleetTarget(self.value(each, at, target, "")))
                continue
            keys = self.mapping(each, at, OF_TARGET)
            if "address" not in keys:
                self.wrong(each, f"{at}.address", f"is missing: {TARGET_FORM}")
            address = self.value_of(keys, at, "address", target, "")
            region = self.region(keys.get("region"), f"{at}.region")
            path = self.path_of(keys, at, "key_file")
            header = self.value_of(keys, at, "key_header", key_header, "")
            if header and path is None:
                self.wrong(each, f"{at}.key_header", "needs a key_file")
            slices = self.slices(keys.get("endpoint_slices"), f"{at}.endpoint_slices")
            if slices is not None and address.startswith(f"{Service.OPENAI_HTTPS}:"):
                reason = "is not for openai+https: the certificates of pods have no common name"
                self.wrong(each, f"{at}.endpoint_slices", reason)
            found.append(FleetTarget(address, region, path, header, slices))
        if len({each.address for each in found}) < len(found):
            self.wrong(node, location, "must name each address once")
        return tuple(found)

    def slices(self, node: yaml.Node | None, location: str) -> SlicesTerms | None:
        """Parse the service whose endpoints a target stands for; None if the node is missing."""
        if node is None:
            return None
        keys = self.mapping(node, location, ("namespace", "service", "kubeconfig"))
        for name in ("namespace", "service"):
            if name not in keys and isinstance(node, yaml.MappingNode):
                self.wrong(node, f"{location}.{name}", "is missing: it names a Kubernetes service")
        return SlicesTerms(
            self.value_of(keys, location, "namespace", matching(OBJECT_NAME), ""),
            self.value_of(keys, location, "service", matching(OBJECT_NAME), ""),
            self.path_of(keys, location, "kubeconfig"),
        )

    def aliases(self, node: yaml.Node | None, models: tuple[FleetModel, ...]) -> dict[str, str]:
        """Parse the aliases. Each names a model or one of its versions."""
        names = {model.name for model in models}
        known = {name for model in models for name in model.names}
        found = {}
        for alias, each in self.named(node, "aliases", NAME, "an alias").items():
            location = f"aliases.{alias}"
            target = self.value(each, location, word, "")
            if alias in names:
                self.wrong(each, location, "is the name of a model: give the alias another one")
            if target and target not in known:
                near = similar_name(target, known, len(self.errors))
                hint = f"; did you mean {near!r}?" if near else ""
                self.wrong(
                    each,
                    location,
                    f"must name a model, or a version as name@version, not {target!r}{hint}",
                )
            found[alias] = target
        return found

    def region(self, node: yaml.Node | None, location: str) -> str:
        """Parse the name of a region that the file defines. Empty if the node is missing."""
        name = self.value(node, location, word, "")
        if name and name not in self._regions:
            known = ", ".join(sorted(self._regions))
            remedy = (
                f"the regions are {known}" if known else "list the regions under `regions` first"
            )
            self.wrong(node, location, f"{name!r} is not a region of this file: {remedy}")
        return name


def path_to(end: str, start: str, next_of: Mapping[str, Collection[str]]) -> list[str]:
    """Find a path of names from `start` to `end`, both included; empty if there is none."""
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop()
        if path[-1] == end:
            return path
        for name in sorted(set(next_of.get(path[-1], ())) - seen):
            seen.add(name)
            paths.append([*path, name])
    return []
