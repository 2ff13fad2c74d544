"""Reader of the keys under `launcher` in a fleet file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml
from weir_cli.yaml_files import Keys, StrictReader

from api.fleet.launch_plan import LaunchTerms
from common.settings import one_of, positive, truth, whole
from inference.adapters.remote_settings import TARGET_FORM, Service, key_header, parse_target
from inference.launchers import command, kubernetes, process
from inference.launchers.command import CommandLauncher, CommandTerms
from inference.launchers.kubernetes import KubernetesLauncher, KubernetesTerms
from inference.launchers.launcher import Launcher, check_placeholders, filled
from inference.launchers.process import ProcessLauncher, ProcessTerms
from inference.launchers.vllm_sleep import SleepTerms

UNITS_MAX = 4096
COST_MAX = Decimal(1_000_000)  # per hour of one replica
TIMEOUT_S_MAX = 86_400.0
PROCESS_ADDRESS = "vllm://127.0.0.1:{port}"
UNKNOWN_ADDRESS = "vllm://unknown:1"  # in place of a missing one, which is an error
OF_POOL = ("pool", "units", "sleeping_units", "cost_per_hour", "stop_after_s")
OF_ALL = ("kind", "key_file", "key_header", "start_timeout_s", "state_directory", *OF_POOL)
OF_PROCESS = ("command", "address", "environment", "stop_timeout_s", "sleep", "keep_running")
SCRIPTS = ("start", "stop", "sleep", "wake", "status")
OF_COMMAND = (*SCRIPTS, "address", "service", "environment", "stop_timeout_s")
OBJECT = ("group", "version", "resource", "namespace", "name")
OF_KUBERNETES = (*OBJECT, "address", "count", "field", "kubeconfig", "stop_timeout_s")
OF_KIND: Mapping[str, tuple[str, ...]] = {
    "process": OF_PROCESS,
    "command": OF_COMMAND,
    "kubernetes": OF_KUBERNETES,
}
OBJECT_NAME = re.compile(
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
)  # of Kubernetes objects and groups
FIELD = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
COUNT_MAX = 1000
KINDS: Mapping[type, str] = {
    ProcessTerms: "process",
    CommandTerms: "command",
    KubernetesTerms: "kubernetes",
}


@dataclass(frozen=True, slots=True)
class FleetLauncher:
    """Launcher of a version. `service` is the kind of its servers.

    With `keep_running`, servers of this machine stay when Weir ends.
    """

    service: Service
    servers: ProcessTerms | CommandTerms | KubernetesTerms
    terms: LaunchTerms
    keep_running: bool = False
    key_file: Path | None = None
    key_header: str = ""
    state_directory: Path | None = None

    @property
    def is_local(self) -> bool:
        """True if its servers run on the machine of the process that starts them."""
        return isinstance(self.servers, ProcessTerms)

    @property
    def can_have_several(self) -> bool:
        """True if its replicas have addresses of their own."""
        if isinstance(self.servers, ProcessTerms):
            return "{" in self.servers.address
        return "{number}" in self.servers.address or not self.servers.address

    def values(self) -> dict[str, Any]:
        """Convert to the keys of a fleet file, with absolute paths and without defaults."""
        servers, terms = self.servers, self.terms
        found: dict[str, Any] = {"kind": KINDS[type(servers)]}
        for each in (*fields(servers), *fields(terms)):
            source = servers if hasattr(servers, each.name) else terms
            value = getattr(source, each.name)
            if value not in (default_of(each), ""):
                found[each.name] = plain(value)
        found.pop("can_sleep", None)
        if found.get("address"):
            found.pop("service", None)
        if self.keep_running:
            found["keep_running"] = True
        for name in ("key_file", "key_header", "state_directory"):
            if value := getattr(self, name):
                found[name] = plain(value)
        return found

    def build(self, home: Path) -> Launcher:
        """Build the launcher. Its files are in `home` unless it has a `state_directory`."""
        directory = self.state_directory or home / "launched"
        match self.servers:
            case ProcessTerms():
                return ProcessLauncher(self.servers, directory)
            case CommandTerms():
                return CommandLauncher(self.servers, directory)
            case KubernetesTerms():
                return KubernetesLauncher(self.servers)


class ValueReader(StrictReader):
    """Reader of YAML nodes with defaults for missing or invalid values."""

    def __init__(self, base: Path | None) -> None:
        """Relative paths start at `base`; with None they are errors."""
        super().__init__()
        self._base = base

    def path_of(self, keys: Keys, location: str, name: str) -> Path | None:
        """Parse the path of a file or directory; None if it is missing."""
        found = self.value_of(keys, location, name, word, "")
        if not found:
            return None
        if self._base is None and not Path(found).is_absolute():
            message = "must be absolute: it is a path on the machines of the servers"
            self.wrong(keys[name], f"{location}.{name}", message)
        return (self._base or Path("/")) / found

    def refuse(self, keys: Keys, location: str, names: Iterable[str], message: str) -> None:
        """Report an error for each of these keys that the file has."""
        for name in names:
            if name in keys:
                self.wrong(keys[name], f"{location}.{name}", message)

    def launcher(
        self, node: yaml.Node | None, location: str, pools: Iterable[str]
    ) -> FleetLauncher | None:
        """Parse a launcher. `pools` are known names."""
        if node is None:
            return None
        kind = "process"
        if isinstance(node, yaml.MappingNode):
            named = {key.value: value for key, value in node.value}
            kind = self.value(named.get("kind"), f"{location}.kind", one_of(*OF_KIND), kind)
        keys = self.mapping(node, location, (*OF_ALL, *OF_KIND[kind]))
        self.require(node, location, keys, "kind")
        key_file = self.path_of(keys, location, "key_file")
        header = self.value_of(keys, location, "key_header", key_header, "")
        if header and key_file is None:
            self.wrong(node, f"{location}.key_header", "needs a key_file")
        state_directory = self.path_of(keys, location, "state_directory")
        service: Service
        servers: ProcessTerms | CommandTerms | KubernetesTerms
        can_sleep = False
        match kind:
            case "process":
                service, servers, can_sleep = self._process(node, keys, location)
            case "command":
                service, servers, can_sleep = self._command(node, keys, location)
            case _:
                service, servers = self._kubernetes(node, keys, location)
        return FleetLauncher(
            service,
            servers,
            self._terms(node, keys, location, pools, can_sleep=can_sleep),
            self.value_of(keys, location, "keep_running", truth, False),
            key_file,
            header,
            state_directory,
        )

    def _terms(
        self, node: yaml.Node, keys: Keys, location: str, pools: Iterable[str], *, can_sleep: bool
    ) -> LaunchTerms:
        pool = self.value_of(keys, location, "pool", word, "")
        if pool and pool not in pools:
            known = ", ".join(pools) or "none"
            remedy = f"is not a pool of this file; there are: {known}"
            self.wrong(keys["pool"], f"{location}.pool", remedy)
        if not pool:
            self.refuse(keys, location, ("units", "sleeping_units"), "needs a pool")
        if not can_sleep:
            reason = "is for servers that sleep: add `sleep`, or leave it out"
            self.refuse(keys, location, ("sleeping_units", "stop_after_s"), reason)
        units = self.value_of(keys, location, "units", whole(1, UNITS_MAX), 1)
        sleeping = self.value_of(keys, location, "sleeping_units", whole(0, UNITS_MAX), 0)
        if sleeping > units:
            self.wrong(node, f"{location}.sleeping_units", f"must be at most units, {units}")
        return LaunchTerms(
            pool,
            units,
            sleeping,
            self.value_of(keys, location, "cost_per_hour", cost, Decimal(0)),
            can_sleep,
            self.value_of(keys, location, "stop_after_s", positive(TIMEOUT_S_MAX), 0.0),
        )

    def _process(
        self, node: yaml.Node, keys: Keys, location: str
    ) -> tuple[Service, ProcessTerms, bool]:
        if "command" not in keys:
            self.wrong(node, f"{location}.command", "is missing: list the words of the command")
        allowed = process.PLACEHOLDERS
        address = self._address(keys, location, allowed, PROCESS_ADDRESS)
        sleep = None
        if "sleep" in keys:
            at = f"{location}.sleep"
            inner = self.mapping(keys["sleep"], at, ("url", "level"))
            self.require(keys["sleep"], at, inner, "url")
            url = self.value_of(inner, at, "url", url_with(allowed), "http://127.0.0.1")
            sleep = SleepTerms(url, self.value_of(inner, at, "level", whole(1, 2), 1))
        terms = ProcessTerms(
            self._words(keys, location, "command", allowed),
            address,
            self._environment(keys, location, allowed),
            self._timeout_s(keys, location, "start_timeout_s", 600.0),
            self._timeout_s(keys, location, "stop_timeout_s", 30.0),
            sleep,
        )
        return service_of(address, allowed), terms, sleep is not None

    def _command(
        self, node: yaml.Node, keys: Keys, location: str
    ) -> tuple[Service, CommandTerms, bool]:
        for name in ("start", "stop"):
            if name not in keys:
                self.wrong(node, f"{location}.{name}", "is missing: list the words of the command")
        if ("sleep" in keys) != ("wake" in keys):
            self.wrong(node, f"{location}.sleep", "needs `wake`, and `wake` needs `sleep`")
        allowed = command.PLACEHOLDERS
        address = self._address(keys, location, allowed, "")
        if address and "service" in keys:
            self.wrong(keys["service"], f"{location}.service", "is part of `address`: leave it out")
        named = self.value_of(keys, location, "service", one_of(*Service), Service.VLLM.value)
        service = service_of(address, allowed) if address else Service(named)
        scripts: dict[str, Any] = {
            name: self._words(keys, location, name, allowed) for name in SCRIPTS
        }
        terms = CommandTerms(
            **scripts,
            address=address,
            service=service,
            environment=self._environment(keys, location, allowed),
            start_timeout_s=self._timeout_s(keys, location, "start_timeout_s", 600.0),
            stop_timeout_s=self._timeout_s(keys, location, "stop_timeout_s", 60.0),
        )
        return service, terms, bool(terms.sleep)

    def _kubernetes(
        self, node: yaml.Node, keys: Keys, location: str
    ) -> tuple[Service, KubernetesTerms]:
        self.require(node, location, keys, *OBJECT[1:], "address")
        allowed = kubernetes.PLACEHOLDERS
        address = self._address(keys, location, allowed, UNKNOWN_ADDRESS)
        if "{number}" in address and "count" in keys:
            reason = "is for an address of all pods: leave it out, or {number} in the address"
            self.wrong(keys["count"], f"{location}.count", reason)
        named = {
            name: self.value_of(keys, location, name, matching(OBJECT_NAME), "") for name in OBJECT
        }
        terms = KubernetesTerms(
            named["group"],
            named["version"],
            named["resource"],
            named["namespace"],
            named["name"],
            address,
            count=self.value_of(keys, location, "count", whole(1, COUNT_MAX), 1),
            field=self.value_of(keys, location, "field", matching(FIELD), ""),
            kubeconfig=self.path_of(keys, location, "kubeconfig"),
            start_timeout_s=self._timeout_s(keys, location, "start_timeout_s", 600.0),
            stop_timeout_s=self._timeout_s(keys, location, "stop_timeout_s", 60.0),
        )
        return service_of(address, allowed), terms

    def _address(self, keys: Keys, location: str, allowed: frozenset[str], default: str) -> str:
        def parse(text: str) -> str:
            service_of(check_placeholders(text, allowed), allowed)
            return text

        return self.value_of(keys, location, "address", parse, default)

    def _words(
        self, keys: Keys, location: str, name: str, allowed: frozenset[str]
    ) -> tuple[str, ...]:
        """Parse the words of a command line."""
        node, at = keys.get(name), f"{location}.{name}"
        if node is None:
            return ()
        nodes = self.items(node, at)
        if isinstance(node, yaml.SequenceNode) and not nodes:
            self.wrong(node, at, "is empty: list the words of the command")

        def parse(text: str) -> str:
            return check_placeholders(text, allowed)

        return tuple(
            self.value(each, f"{at}[{index}]", parse, "") for index, each in enumerate(nodes)
        )

    def _environment(self, keys: Keys, location: str, allowed: frozenset[str]) -> dict[str, str]:
        node, at = keys.get("environment"), f"{location}.environment"
        found = {} if node is None else self.mapping(node, at)

        def parse(text: str) -> str:
            return check_placeholders(text, allowed)

        return {name: self.value(each, f"{at}.{name}", parse, "") for name, each in found.items()}

    def _timeout_s(self, keys: Keys, location: str, name: str, default: float) -> float:
        return self.value_of(keys, location, name, positive(TIMEOUT_S_MAX), default)


def default_of(each: Field[Any]) -> Any:
    """Return the default of a field of a dataclass; MISSING if it has none."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def plain(value: Any) -> Any:
    """Convert a value to one that YAML can hold."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Service):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, SleepTerms):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    """Build a parser of texts that match a pattern."""

    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"must match {pattern.pattern}")
        return text

    return parse


def word(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def cost(value: str) -> Decimal:
    """Parse a price per hour. Raises: ValueError."""
    try:
        found = Decimal(value)
    except InvalidOperation:
        found = Decimal("nan")
    if not (math.isfinite(found) and 0 <= found <= COST_MAX):
        raise ValueError(f"must be a number from 0 to {COST_MAX:,}")
    return found


def service_of(address: str, allowed: frozenset[str]) -> Service:
    """Find the kind of server in an address with placeholders. Raises: ValueError."""
    try:
        return parse_target(filled(address, dict.fromkeys(allowed, 1))).service
    except ValueError:
        raise ValueError(TARGET_FORM) from None


def url_with(allowed: frozenset[str]) -> Callable[[str], str]:
    """Build a parser of URLs with placeholders."""

    def parse(text: str) -> str:
        if not text.startswith(("http://", "https://")):
            raise ValueError("must be a URL such as http://127.0.0.1:{port}")
        return check_placeholders(text, allowed).rstrip("/")

    return parse
