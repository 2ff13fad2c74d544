"""The configuration file of `weir apply`: YAML from and to the JSON mapping of the contract.

By the tables below, a file becomes the JSON mapping of `weir.v1.Configuration`, and back. The
reader reports every error with line and place, and keeps the line of every place, so that the
server's findings are reported by line too. Values are parsed by their field's type instead of
YAML's: a project may be named `no`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import yaml
from weir_client import BillingProfile

from weir_cli.document_fields import (
    Json,
    Scalar,
    Section,
    Sections,
    Texts,
    Words,
    amount,
    count,
    dimension,
    entries,
    limit,
    moment,
    price,
    selector,
    text,
    thousandths,
    tier,
    truth,
)
from weir_cli.terms import TERMS
from weir_cli.texts import WINDOW_MINUTES_MAX, percents_text
from weir_cli.yaml_files import FileError, NotYaml, StrictReader, compose, joined

VERSION = "1"
LEEWAY_S_MAX, LIFETIME_S_MAX = 300, 86_400
QUOTA = Section(
    {
        "dimension": dimension("dimension"),
        "model": text("model"),
        "for_new_keys": truth("for_new_keys"),
        "for_each": selector("for_each"),
        "end_user": text("end_user"),
        "label": text("label"),
        "window_minutes": count("window_minutes", WINDOW_MINUTES_MAX),
        "limit": limit("limit_value"),
        **entries(TERMS["quota"]),
        "override_limit": limit("override_limit_value"),
        "override_until": moment("override_end_time"),
        "override_reason": text("override_reason"),
    },
    required=("dimension", "limit"),
)

QUOTAS = Sections("quotas", QUOTA, prune="prune_quotas")
KEY = Section(
    {
        "name": text("name"),
        "prefix": text("prefix"),
        **entries(TERMS["key"]),
        "expires": moment("expire_time"),
        "quotas": QUOTAS,
    },
    required=("name",),
)

PROJECT = Section(
    {"name": text("name"), "quotas": QUOTAS, "keys": Sections("keys", KEY, prune="prune_keys")},
    required=("name",),
)

BILLING_PROFILE = Section(
    {
        field.name: Words(field.name) if field.name == "emails" else text(field.name)
        for field in fields(BillingProfile)
    },
    required=(),
)

RESALE_PRICE = Section(
    {
        "model": text("model"),
        **entries(TERMS["resale price"]),
        "effective": moment("effective_time"),
    },
    required=(),
)

MEMBER = Section(
    {"email": text("email"), "role": text("role"), "project": text("project")},
    required=("email", "role"),
)

TOKEN_ISSUER = Section(
    {
        "issuer": text("issuer"),
        "audience": text("audience"),
        "projects": Words("projects"),
        "keys": text("keys"),
        "leeway_s": count("leeway_s", LEEWAY_S_MAX, 0),
        "lifetime_max_s": count("lifetime_max_s", LIFETIME_S_MAX),
        **entries(TERMS["token issuer"]),
        "allowed_networks": Words("allowed_networks"),
        "group": text("group"),
    },
    required=("issuer", "audience", "projects"),
)

ORGANIZATION = Section(
    {
        "name": text("name"),
        "currency": text("currency_code"),
        "queue_weight": thousandths("queue_weight_milli"),
        "region": text("region"),
        "billing_profile": Sections("billing_profile", BILLING_PROFILE, is_list=False),
        "resale_prices": Sections("resale_prices", RESALE_PRICE, prune="prune_resale_prices"),
        "quotas": QUOTAS,
        "projects": Sections("projects", PROJECT),
        "members": Sections("members", MEMBER, prune="prune_members"),
        "token_issuers": Sections("token_issuers", TOKEN_ISSUER, prune="prune_token_issuers"),
    },
    required=("name",),
)

PRICE = Section(
    {
        "model": text("model"),
        "currency": text("currency_code"),
        **entries(TERMS["price"]),
        "organization": text("organization"),
        "effective": moment("effective_time"),
    },
    required=("model", "input", "cached_input", "output"),
)

DOCUMENT = Section(
    {"organizations": Sections("organizations", ORGANIZATION), "prices": Sections("prices", PRICE)},
    required=(),
)

SELECTOR = {
    "model": text("selector.model"),
    "token_kind": text("selector.token_kind"),
    "tier": tier("selector.tier"),
}

ALLOWANCE = Section({**SELECTOR, "tokens": count("token_count")}, required=("tokens",))
STEP = Section(
    {
        "up_to": count("up_to_token_count"),
        "price": price("price_picos"),
        "share": thousandths("price_milli"),
    },
    required=(),
)

TIERED_PRICE = Section(
    {**SELECTOR, "kind": text("kind"), "steps": Sections("steps", STEP)}, required=("kind", "steps")
)
PLAN = Section(
    {
        "name": text("name"),
        "currency": text("currency_code"),
        "allowances": Sections("allowances", ALLOWANCE),
        "tiered_prices": Sections("tiered_prices", TIERED_PRICE),
        "commitment": amount("commitment_picos"),
        "organizations": Words("organizations"),
    },
    required=("name",),
)

PROPOSAL = Section(
    {"prices": Sections("prices", PRICE), "plans": Sections("plans", PLAN)}, required=()
)

# Sections by the kinds of objects in the server's response.
SECTIONS = {
    "organization": ORGANIZATION,
    "billing_profile": BILLING_PROFILE,
    "project": PROJECT,
    "key": KEY,
    "quota": QUOTA,
    "price": PRICE,
    "resale_price": RESALE_PRICE,
    "member": MEMBER,
    "invitation": MEMBER,
    "token_issuer": TOKEN_ISSUER,
}


def shown_field(kind: str, name: str, value: Json, quota: Mapping[str, Json]) -> tuple[str, str]:
    """Convert a field of the API to the file's key and the text to show."""
    for key, entry in SECTIONS[kind].keys.items():
        if entry.name == name:
            if isinstance(entry, Words) and entry.are_percentages:
                return key, "default" if value is None else percents_text(value)
            if value is None:
                return key, "—"
            if not isinstance(entry, Scalar):
                return key, ", ".join(map(str, value))
            shown = entry.show(value, quota)
            return key, shown.replace("_", ",") if entry.tag in ("float", "int") else shown
    return name, str(value)


@dataclass(slots=True)
class Document:
    """Parsed file. `lines` maps each path in the API message to its line and place in the file."""

    configuration: dict[str, Json] = field(default_factory=dict)
    errors: list[FileError] = field(default_factory=list)
    lines: dict[str, tuple[int, str]] = field(default_factory=dict)

    def error_at(self, path: str, message: str) -> FileError:
        """Locate an error that the server found, at the nearest known place of the file."""
        found = path
        while found not in self.lines and found:
            found = found[: max(found.rfind("."), found.rfind("["), 0)]
        line, location = self.lines.get(found, (1, ""))
        return FileError(line, location, message)


def read_document(content: str, *, prune: bool, section: Section = DOCUMENT) -> Document:
    """Parse a file whose root has the keys of `section`.

    With `prune`, the server removes objects that are absent from the file's lists; lists that the
    file does not have are left alone.
    """
    reader = Reader(prune)
    document = Document(errors=reader.errors, lines=reader.lines)
    try:
        root = compose(content)
        if root is None:
            reader.wrong(
                None,
                "",
                f"the file is empty: begin with `{next(iter(section.keys))}:` or see `weir export`",
            )
        else:
            document.configuration = reader.section(root, section, "", "", is_root=True)
    except NotYaml as broken:
        reader.errors.append(FileError(broken.line, "", str(broken)))
    document.errors.sort(key=lambda error: error.line)
    return document


class Reader(StrictReader):
    """Parser that converts the nodes of a file by the tables. `lines` is as in `Document`."""

    def __init__(self, prune: bool) -> None:
        super().__init__()
        self.lines: dict[str, tuple[int, str]] = {}
        self._prune = prune

    def section(
        self, node: yaml.Node, section: Section, path: str, location: str, *, is_root: bool = False
    ) -> dict[str, Json]:
        """Convert a mapping to the API's names. `path` is its API path, `location` its place."""
        self._enter(node, path, location)
        nodes = self.mapping(node, location, [*section.keys, *(["version"] if is_root else [])])
        if not isinstance(node, yaml.MappingNode):
            return {}
        if (
            is_root
            and (version := nodes.pop("version", None)) is not None
            and version.value != VERSION
        ):
            self.wrong(version, "version", f"the supported version is {VERSION}")
        self.require(node, location, nodes, *section.required)
        texts = {
            key: each.value for key, each in nodes.items() if isinstance(each, yaml.ScalarNode)
        }
        found: dict[str, Json] = {}
        for key, value in nodes.items():
            entry = section.keys[key]
            at, shown = joined(path, entry.name), joined(location, key)
            if not (isinstance(entry, Sections) and not entry.is_list):
                self._enter(value, at, shown)
            match entry:
                case Scalar():
                    if (
                        scalar := self.scalar(value, shown, partial(_read, entry, texts))
                    ) is not None:
                        outer, _, name = entry.name.rpartition(".")
                        (found.setdefault(outer, {}) if outer else found)[name] = scalar
                case Words():
                    words = self._words(value, shown, numeric=entry.are_percentages)
                    found[entry.name] = {"values": words} if entry.are_percentages else words
                case Sections(is_list=False):
                    found[entry.name] = self.section(value, entry.section, at, shown)
                case Sections():
                    found[entry.name] = [
                        self.section(each, entry.section, f"{at}[{index}]", f"{shown}[{index}]")
                        for index, each in enumerate(self.items(value, shown))
                    ]
                    if entry.prune and self._prune:
                        found[entry.prune] = True
        return found

    def _words(self, node: yaml.Node, location: str, *, numeric: bool) -> list[str]:
        remedy = (
            "whole percentages, such as [50, 80, 100]; `[]` for none"
            if numeric
            else "words, such as [inference, admin]"
        )
        fits = str.isdecimal if numeric else bool
        parts = node.value if isinstance(node, yaml.SequenceNode) else None
        if parts is None or not all(
            isinstance(each, yaml.ScalarNode) and fits(each.value) for each in parts
        ):
            self.wrong(node, location, f"write a list of {remedy}")
            return []
        return [each.value for each in parts]

    def _enter(self, node: yaml.Node, path: str, location: str) -> None:
        self.lines[path] = (node.start_mark.line + 1, location)


def _read(entry: Scalar, texts: Texts, given: str) -> Json:
    return entry.read(given, texts)


def write_document(configuration: Mapping[str, Json]) -> str:
    """Format a configuration as a file. Default values are left out."""
    node = mapping_node(configuration, DOCUMENT)
    node.value.insert(0, (scalar_node("version"), scalar_node(VERSION, "int")))
    written: str = yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True, width=132)
    return written


def mapping_node(values: Mapping[str, Json], section: Section) -> yaml.MappingNode:
    pairs: list[tuple[yaml.Node, yaml.Node]] = []
    for key, entry in section.keys.items():
        if entry.name not in values and key not in section.required:
            continue
        value = values.get(entry.name, 0)  # the JSON mapping omits zeros
        match entry:
            case Scalar():
                pairs.append((scalar_node(key), scalar_node(entry.show(value, values), entry.tag)))
            case Words():
                words = value.get("values", []) if entry.are_percentages else value
                nodes = [
                    scalar_node(str(word), "int" if entry.are_percentages else "str")
                    for word in words
                ]
                pairs.append((scalar_node(key), sequence_node(nodes, flow=True)))
            case Sections(is_list=False):
                pairs.append((scalar_node(key), mapping_node(value, entry.section)))
            case Sections():
                pairs.append(
                    (
                        scalar_node(key),
                        sequence_node([mapping_node(each, entry.section) for each in value]),
                    )
                )
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)


def sequence_node(nodes: list[Any], *, flow: bool = False) -> yaml.SequenceNode:
    return yaml.SequenceNode("tag:yaml.org,2002:seq", nodes, flow_style=flow or not nodes)


def scalar_node(value: str, tag: str = "str") -> yaml.ScalarNode:
    """Build a scalar node. Numbers get the YAML type of their text and need no quotes."""
    if tag == "float":
        tag = "float" if "." in value else "int"
    return yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", value)
