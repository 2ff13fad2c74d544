"""The file that `WEIR_FLEET` names: models, their versions and replicas, aliases, regions. Read once, and strictly.

Every mistake of a file is told at once, with its line, its place and the remedy. What is left out has the default that stands with
it here; what is unknown is a mistake. `docs/reference/fleet.md` explains the keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import yaml
from weir_yaml import Keys, NotYaml, StrictReader, Value, compose

from api.core.settings import SettingInvalid, Settings, number, one_of, whole

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B|)")
UNITS: dict[str, int] = {"": 1, "B": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
EngineKind = Literal["torch", "tensorrt", "remote", "encoder", "remote-encoder", "simulated"]
ENCODERS = ("encoder", "remote-encoder")
Policy = Literal["prefix_aware", "least_loaded", "round_robin"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")  # of a model or an alias; `@` is kept for versions
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a version or a region
REPLICA_COUNT_MAX = 256  # of one version: each is a process, or a connection, of every api process
WEIGHT_MAX = 1e6
IDLE_TIMEOUT_S_MAX = 7 * 86_400.0
RECOVERY_WAIT_S_MAX = 600.0
RECOVERY_WAIT_S = 10.0  # seconds: a small model's process is back by then
OF_LOCAL_ENGINES = ("replicas", "idle_timeout_s", "memory_bytes", "region")
OF_VERSION = {"engine", "directory", "weight", "targets", *OF_LOCAL_ENGINES}

UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


def text(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def size(value: str) -> int:
    """Parser of a number of bytes."""
    found = SIZE.fullmatch(value)
    if found is None:
        raise ValueError("must be a number of bytes, such as 24GiB")
    return int(float(found[1]) * UNITS[found[2]])


def target(value: str) -> str:
    """Parser of a remote engine's address: service and host:port."""
    service, _, address = value.partition("://")
    host, _, port = address.rpartition(":")
    if service not in ("trtllm", "vllm") or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError("must be trtllm://host:port or vllm://host:port")
    return value


@dataclass(frozen=True, slots=True)
class FleetTarget:
    """A remote engine: its service and where it listens, and the region that it is in."""

    address: str
    region: str = ""


@dataclass(frozen=True, slots=True)
class FleetVersion:
    """One version of a model. version: empty where the model has just one.

    directory: of the checkpoint; of a remote engine that of its tokenizer, or None for what the server gives. region: of replicas
    on this machine. replica_count_min: kept warm; the others are started under load. targets: of a remote engine, one replica each.
    idle_timeout_s: after which replicas beyond the least are stopped, 0 for never; None for WEIR_MODEL_IDLE_TIMEOUT_S.
    memory_bytes: what one replica takes of the budget; 0 for what its checkpoint tells.
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


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model: its versions, how its replicas share the work, and how long a sequence that lost its replica waits for another."""

    name: str
    versions: tuple[FleetVersion, ...]
    policy: Policy = "prefix_aware"
    recovery_wait_s: float = RECOVERY_WAIT_S

    @property
    def embeds(self) -> bool:
        """Whether it turns texts into vectors."""
        return self.versions[0].engine in ENCODERS


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is served. regions: where the requests of each may go beside it. memory_bytes: of all local replicas; None: no limit."""

    models: tuple[FleetModel, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory_bytes: int | None = None


def model_names(settings: Settings) -> tuple[list[str], list[str]]:
    """Own names of all models that are served, those that embed apart: what can be priced. Raises: SettingInvalid."""
    if not settings.fleet_file:
        return list(settings.models), list(settings.encoders)
    models = read_fleet(Path(settings.fleet_file)).models
    return [model.name for model in models if not model.embeds], [model.name for model in models if model.embeds]


def read_fleet(path: Path) -> Fleet:
    """Raises: SettingInvalid with every mistake of the file, by line and place."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingInvalid(f"WEIR_FLEET={str(path)!r}: cannot be read: {error}") from error
    return parse_fleet(content, path)


def parse_fleet(content: str, path: Path) -> Fleet:
    """The same of a text. path: for messages, and for the directories that are relative to it."""
    try:
        root = compose(content)
    except NotYaml as broken:
        raise SettingInvalid(f"WEIR_FLEET={str(path)!r}: line {broken.line}: {broken}") from broken
    reader = FleetReader(path.parent)
    fleet = reader.fleet(root)
    if reader.mistakes:
        told = "\n  ".join(f"line {each.line}: {each.place or 'the file'}: {each.message}" for each in sorted(reader.mistakes))
        raise SettingInvalid(f"WEIR_FLEET={str(path)!r}:\n  {told}")
    return fleet


class FleetReader(StrictReader):
    """Reads the nodes of a fleet file."""

    def __init__(self, base: Path) -> None:
        """base: what relative directories are relative to."""
        super().__init__()
        self._base = base
        self._regions: frozenset[str] = frozenset()

    def named(self, node: yaml.Node | None, place: str, pattern: re.Pattern[str], what: str) -> Keys:
        """The values of keys that are names of the file's own; none of what is not there."""
        found = {} if node is None else self.mapping(node, place)
        for name, value in found.items():
            if not pattern.fullmatch(name):
                self.wrong(value, f"{place}.{name}", f"cannot be the name of {what}: it must match {pattern.pattern}")
        if node is not None and not found:
            self.wrong(node, place, f"is empty: name {what}, or leave it out")
        return found

    def value(self, node: yaml.Node | None, place: str, parse: Callable[[str], Value], default: Value) -> Value:
        """A single value; the default of what is not there, and of what is wrong."""

        def parsed(text: str) -> Value:
            try:
                return parse(text)
            except ValueError as error:
                raise ValueError(f"{error}, not {text[:64]!r}") from None

        found = None if node is None else self.scalar(node, place, parsed)
        return default if found is None else found

    def fleet(self, root: yaml.Node | None) -> Fleet:
        keys = self.mapping(root, "", ("models", "aliases", "regions", "memory_bytes"))
        regions = self.regions(keys.get("regions"))
        if "models" not in keys:
            self.wrong(root, "models", "is missing: name at least one model")
        nodes = self.named(keys.get("models"), "models", NAME, "a model")
        models = tuple(self.model(name, node, f"models.{name}") for name, node in nodes.items())
        return Fleet(
            models=models,
            aliases=self.aliases(keys.get("aliases"), models),
            regions=regions,
            memory_bytes=self.value(keys.get("memory_bytes"), "memory_bytes", size, None),
        )

    def regions(self, node: yaml.Node | None) -> dict[str, tuple[str, ...]]:
        """Regions with their fallbacks, which are regions too."""
        nodes = self.named(node, "regions", WORD, "a region")
        self._regions = frozenset(nodes)
        found = {}
        for name, each in nodes.items():
            place = f"regions.{name}"
            others = tuple(self.region(other, f"{place}[{index}]") for index, other in enumerate(self.items(each, place)))
            if name in others or len(set(others)) < len(others):
                self.wrong(each, place, "must name other regions, each once")
            found[name] = others
        return found

    def model(self, name: str, node: yaml.Node, place: str) -> FleetModel:
        has_versions = isinstance(node, yaml.MappingNode) and any(key.value == "versions" for key, _ in node.value)
        of_it = {"versions"} if has_versions else OF_VERSION - {"weight"}
        keys = self.mapping(node, place, sorted({"policy", "recovery_wait_s", *of_it}))
        if has_versions:
            nodes = self.named(keys["versions"], f"{place}.versions", WORD, "a version")
            versions = tuple(self.several(version, each, f"{place}.versions.{version}") for version, each in nodes.items())
            if versions and not sum(version.weight for version in versions) > 0:
                self.wrong(keys["versions"], f"{place}.versions", "must have at least one version with a weight above 0")
        else:
            versions = (self.version("", keys, node, place),)
        if versions and len({version.engine in ENCODERS for version in versions}) > 1:
            self.wrong(node, place, "must have versions that all generate, or that all embed")
        for key in ("policy", "recovery_wait_s") if versions and versions[0].engine in ENCODERS else ():
            if key in keys:
                self.wrong(keys[key], f"{place}.{key}", "is for models that generate: leave it out here")
        wait = number(0, RECOVERY_WAIT_S_MAX)
        return FleetModel(
            name=name,
            versions=versions,
            policy=cast(Policy, self.value(keys.get("policy"), f"{place}.policy", one_of(*get_args(Policy)), "prefix_aware")),
            recovery_wait_s=self.value(keys.get("recovery_wait_s"), f"{place}.recovery_wait_s", wait, RECOVERY_WAIT_S),
        )

    def several(self, version: str, node: yaml.Node, place: str) -> FleetVersion:
        return self.version(version, self.mapping(node, place, sorted(OF_VERSION)), node, place)

    def version(self, version: str, keys: Keys, node: yaml.Node, place: str) -> FleetVersion:
        get = keys.get
        engine = cast(EngineKind, self.value(get("engine"), f"{place}.engine", one_of(*get_args(EngineKind)), "torch"))
        if "directory" not in keys:
            self.wrong(node, f"{place}.directory", "is missing: name that of the checkpoint, or of a remote model's tokenizer")
        least, most = self.replicas(get("replicas"), f"{place}.replicas")
        targets = self.targets(get("targets"), f"{place}.targets")
        if engine in ("remote", "remote-encoder"):
            least = most = max(len(targets), 1)
            if not targets:
                self.wrong(
                    get("targets") or node,
                    f"{place}.targets",
                    "is missing: name the vllm://host:port of each remote engine",
                )
            for key in keys.keys() & OF_LOCAL_ENGINES:
                self.wrong(keys[key], f"{place}.{key}", "is for engines that Weir starts itself: leave it out here")
        elif "targets" in keys:
            self.wrong(keys["targets"], f"{place}.targets", "is for remote engines: leave it out, or say `engine: remote`")
        if engine in ENCODERS and ("region" in keys or any(each.region for each in targets)):
            self.wrong(node, f"{place}.region", "is for models that generate: requests that embed name no region")
        return FleetVersion(
            version=version,
            engine=engine,
            directory=self._base / self.value(get("directory"), f"{place}.directory", text, ""),
            weight=self.value(get("weight"), f"{place}.weight", number(0, WEIGHT_MAX), 1.0),
            region=self.region(get("region"), f"{place}.region"),
            replica_count_min=least,
            replica_count_max=most,
            targets=targets,
            idle_timeout_s=self.value(get("idle_timeout_s"), f"{place}.idle_timeout_s", number(0, IDLE_TIMEOUT_S_MAX), None),
            memory_bytes=self.value(get("memory_bytes"), f"{place}.memory_bytes", size, 0),
        )

    def replicas(self, node: yaml.Node | None, place: str) -> tuple[int, int]:
        if node is None:
            return 1, 1
        keys = self.mapping(node, place, ("min", "max"))
        least = self.value(keys.get("min"), f"{place}.min", whole(0, REPLICA_COUNT_MAX), 1)
        most = self.value(keys.get("max"), f"{place}.max", whole(1, REPLICA_COUNT_MAX), max(least, 1))
        if most < least:
            self.wrong(node, place, f"must have a max of at least its min, which is {least}, not {most}")
        return least, most

    def targets(self, node: yaml.Node | None, place: str) -> tuple[FleetTarget, ...]:
        """Remote engines, each as `vllm://host:port`, or with `address` and `region`."""
        found = []
        for index, each in enumerate([] if node is None else self.items(node, place)):
            at = f"{place}[{index}]"
            if isinstance(each, yaml.ScalarNode):
                found.append(FleetTarget(self.value(each, at, target, "")))
                continue
            keys = self.mapping(each, at, ("address", "region"))
            if "address" not in keys:
                self.wrong(each, f"{at}.address", "is missing: give trtllm://host:port or vllm://host:port")
            place_of = self.value(keys.get("address"), f"{at}.address", target, "")
            found.append(FleetTarget(place_of, self.region(keys.get("region"), f"{at}.region")))
        if len({each.address for each in found}) < len(found):
            self.wrong(node, place, "must name each address once")
        return tuple(found)

    def aliases(self, node: yaml.Node | None, models: tuple[FleetModel, ...]) -> dict[str, str]:
        """Other names, each of a model or of a version."""
        known = {model.name for model in models}
        known |= {f"{model.name}@{version.version}" for model in models for version in model.versions if version.version}
        found = {}
        for alias, each in self.named(node, "aliases", NAME, "an alias").items():
            place = f"aliases.{alias}"
            target = self.value(each, place, text, "")
            if any(alias == model.name for model in models):
                self.wrong(each, place, "is the name of a model: give the alias another one")
            if target and target not in known:
                near = difflib.get_close_matches(target, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.wrong(each, place, f"must name a model, or a version as name@version, not {target!r}{hint}")
            found[alias] = target
        return found

    def region(self, node: yaml.Node | None, place: str) -> str:
        """The name of a region that the file knows; empty if there is none."""
        name = self.value(node, place, text, "")
        if name and name not in self._regions:
            known = ", ".join(sorted(self._regions))
            remedy = f"the regions are {known}" if known else "list the regions under `regions` first"
            self.wrong(node, place, f"{name!r} is no region of this file: {remedy}")
        return name
