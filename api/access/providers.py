"""Parser of the file that `WEIR_SIGN_IN` names: identity providers, and the roles of their groups.

All errors of a file are reported together, each with its line, its place and what to do.
`docs/reference/sign-in.md` explains the keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from weir_cli.yaml_files import Keys, NotYaml, StrictReader, compose

from api.core.addresses import is_local
from common.settings import SettingInvalid, number, one_of
from metering.tenants.members import MEMBER_ROLES
from metering.tenants.sign_in import GroupRule, SessionTerms

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,100}")
TEXT_CHARS_MAX = 255
PROVIDERS_MAX, RULES_MAX = 20, 1000
SECRET_BYTES_MAX = 4096
SCOPES = ("openid", "email", "profile")
SESSION_HOURS, SESSION_HOURS_MAX = 12.0, 24.0 * 30
# Uses are noted once a minute, so a shorter time would end sessions in use
IDLE_MINUTES, IDLE_MINUTES_MIN, IDLE_MINUTES_MAX = 60.0, 5.0, 60.0 * 24 * 30
OF_PROVIDER = (
    *("issuer", "client_id", "client_secret_file", "title", "scopes", "email_domains"),
    *("groups_claim", "groups", "session_hours", "idle_minutes"),
)
OF_RULE = ("group", "organization", "role", "project")


@dataclass(frozen=True, slots=True)
class Provider:
    """Identity provider with which persons sign in, as this server is registered there.

    Without `client_secret_file`, the server is a public client: PKCE alone protects the code.
    `email_domains` are those whose addresses the provider vouches for, even if it does not say that
    it verified them; empty: all that it verified.
    `groups_claim` has the names of the groups of a person, for `rules`.
    """

    name: str
    issuer: str
    client_id: str
    client_secret_file: Path | None = None
    title: str = ""
    scopes: tuple[str, ...] = SCOPES
    email_domains: tuple[str, ...] = ()
    groups_claim: str = "groups"
    rules: tuple[GroupRule, ...] = ()
    session_hours: float = SESSION_HOURS
    idle_minutes: float = IDLE_MINUTES

    @property
    def terms(self) -> SessionTerms:
        return SessionTerms(
            timedelta(hours=self.session_hours), timedelta(minutes=self.idle_minutes)
        )

    def client_secret(self) -> str:
        """Read the secret, which may be renewed without a restart. Raises: OSError, ValueError."""
        if self.client_secret_file is None:
            return ""
        with self.client_secret_file.open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1).strip()
        if not 0 < len(content) <= SECRET_BYTES_MAX:
            raise ValueError(f"{self.client_secret_file} must have 1 to {SECRET_BYTES_MAX} bytes")
        return content.decode()


@dataclass(frozen=True, slots=True)
class SignInFile:
    """Contents of the file. `url` is the address of the console, without a slash at its end."""

    url: str = ""
    providers: tuple[Provider, ...] = field(default=())

    def provider(self, name: str) -> Provider | None:
        return next((each for each in self.providers if each.name == name), None)


def read_sign_in(path: Path) -> SignInFile:
    """Read and parse the file. Raises SettingInvalid, which lists all errors by line."""
    try:
        root = compose(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingInvalid(f"WEIR_SIGN_IN={str(path)!r}: cannot be read: {error}") from error
    except NotYaml as broken:
        problem = f"line {broken.line}: {broken}"
        raise SettingInvalid(f"WEIR_SIGN_IN={str(path)!r}: {problem}") from broken
    reader = SignInReader(path.absolute().parent)
    found = reader.file(root)
    if reader.errors:
        errors = "\n  ".join(
            f"line {each.line}: {each.location or 'the file'}: {each.message}"
            for each in sorted(reader.errors)
        )
        raise SettingInvalid(f"WEIR_SIGN_IN={str(path)!r}:\n  {errors}")
    return found


def text(value: str) -> str:
    """Validate a text. Raises: ValueError."""
    if not 1 <= len(value) <= TEXT_CHARS_MAX or not value.isprintable():
        raise ValueError(f"must have 1 to {TEXT_CHARS_MAX} printable characters")
    return value


def web_address(value: str) -> str:
    """Validate an address of https; http is allowed on this machine only. Raises: ValueError."""
    parts = urlsplit(text(value))
    is_own = parts.scheme == "http" and is_local(f"{parts.hostname}:0")
    if not value.isascii() or not (parts.scheme == "https" or is_own) or not parts.hostname:
        raise ValueError("must be a URL of https, or of http on this machine")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("must not have a user, a query or a fragment")
    return value


def console_address(value: str) -> str:
    """Validate the address of the console. Raises: ValueError."""
    if not web_address(value).rstrip("/").endswith("/console"):
        raise ValueError("must be the address of the console, such as https://weir.example/console")
    return value.rstrip("/")


def scope(value: str) -> str:
    if not SCOPE.fullmatch(value):
        raise ValueError("must be the name of a scope, without spaces and quotes")
    return value


def domain(value: str) -> str:
    if "@" in value or not text(value).isascii():
        raise ValueError("must be a domain, such as example.com")
    return value.lower()


class SignInReader(StrictReader):
    """Converts the YAML nodes of the file to its classes, and collects all errors."""

    def __init__(self, base: Path) -> None:
        """Relative paths start at `base`."""
        super().__init__()
        self._base = base

    def file(self, root: yaml.Node | None) -> SignInFile:
        keys = self.mapping(root, "", ("url", "providers"))
        self.require(root, "", keys, "url", "providers")
        url = self.value_of(keys, "", "url", console_address, "")
        nodes = {}
        if "providers" in keys:
            nodes = self.mapping(keys["providers"], "providers")
            if not 1 <= len(nodes) <= PROVIDERS_MAX:
                reason = f"must name 1 to {PROVIDERS_MAX} providers"
                self.wrong(keys["providers"], "providers", reason)
        providers = [self._provider(name, node) for name, node in nodes.items()]
        issuers = [each.issuer for each in providers]
        for (name, node), issuer in zip(nodes.items(), issuers, strict=True):
            # Two would take turns to end each other's memberships
            if issuer and issuers.count(issuer) > 1:
                self.wrong(node, f"providers.{name}.issuer", "is that of another provider too")
        return SignInFile(url, tuple(providers))

    def _provider(self, name: str, node: yaml.Node) -> Provider:
        location = f"providers.{name}"
        if not NAME.fullmatch(name):
            self.wrong(node, location, f"the name must match {NAME.pattern}")
        keys = self.mapping(node, location, OF_PROVIDER)
        self.require(node, location, keys, "issuer", "client_id")
        hours = number(0.1, SESSION_HOURS_MAX)
        minutes = number(IDLE_MINUTES_MIN, IDLE_MINUTES_MAX)
        scopes = self._list(keys, location, "scopes", scope) or SCOPES
        if "openid" not in scopes:
            self.wrong(keys.get("scopes"), f"{location}.scopes", "must have openid")
        return Provider(
            name=name,
            issuer=self.value_of(keys, location, "issuer", web_address, ""),
            client_id=self.value_of(keys, location, "client_id", text, ""),
            client_secret_file=self.value_of(
                keys, location, "client_secret_file", self._file, None
            ),
            title=self.value_of(keys, location, "title", text, name),
            scopes=scopes,
            email_domains=self._list(keys, location, "email_domains", domain),
            groups_claim=self.value_of(keys, location, "groups_claim", text, "groups"),
            rules=self._rules(keys.get("groups"), f"{location}.groups"),
            session_hours=self.value_of(keys, location, "session_hours", hours, SESSION_HOURS),
            idle_minutes=self.value_of(keys, location, "idle_minutes", minutes, IDLE_MINUTES),
        )

    def _rules(self, node: yaml.Node | None, location: str) -> tuple[GroupRule, ...]:
        nodes = [] if node is None else self.items(node, location)
        if len(nodes) > RULES_MAX:
            self.wrong(node, location, f"must have at most {RULES_MAX} entries")
        return tuple(self._rule(each, f"{location}[{at}]") for at, each in enumerate(nodes))

    def _rule(self, node: yaml.Node, location: str) -> GroupRule:
        keys = self.mapping(node, location, OF_RULE)
        self.require(node, location, keys, "group", "organization", "role")
        return GroupRule(
            group=self.value_of(keys, location, "group", text, ""),
            organization=self.value_of(keys, location, "organization", text, ""),
            role=self.value_of(keys, location, "role", one_of(*MEMBER_ROLES), ""),
            project=self.value_of(keys, location, "project", text, ""),
        )

    def _file(self, value: str) -> Path:
        path = self._base / text(value)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        return path

    def _list(
        self, keys: Keys, location: str, name: str, parse: Callable[[str], str]
    ) -> tuple[str, ...]:
        where = f"{location}.{name}"
        nodes = self.items(keys[name], where) if name in keys else []
        found = [self.scalar(each, f"{where}[{at}]", parse) for at, each in enumerate(nodes)]
        return tuple(each for each in found if each is not None)
