"""Terms of API keys on the command line, one row each: options, tables and files follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weir_client import ApiKey, KeyRestrictions


@dataclass(frozen=True, slots=True)
class KeyTerm:
    """Term of a key. `field` is its name in the contract and in files.

    `kind` is list (of words), int (0 for no limit) or bool. The row `label` of tables shows a value
    that restricts the key, a bool as the text `shown`; without a label the value has its own row.
    """

    field: str
    kind: type
    flag: str
    help: str
    label: str = ""
    shown: str = ""

    @property
    def option(self) -> Any:
        """Annotation of the option. It is None if it is not given."""
        if self.kind is int:
            return Annotated[int | None, typer.Option(self.flag, min=0, help=self.help)]
        kind = list[str] if self.kind is list else self.kind
        return Annotated[kind | None, typer.Option(self.flag, help=self.help)]


KEY_TERMS = (
    KeyTerm(
        "scopes",
        list,
        "--scope",
        "inference, admin or billing; repeatable. Default of a new key: inference.",
    ),
    KeyTerm("models", list, "--model", "Allowed model; repeatable. Default: all.", "models"),
    KeyTerm(
        "allowed_networks",
        list,
        "--network",
        "Allowed client network, such as 203.0.113.0/24; repeatable. Default: all.",
        "networks",
    ),
    KeyTerm(
        "max_input_tokens",
        int,
        "--max-input-tokens",
        "Limit of input tokens per request. 0: no limit.",
        "max input tokens",
    ),
    KeyTerm(
        "max_output_tokens",
        int,
        "--max-output-tokens",
        "Limit of output tokens per request, all choices together. 0: no limit.",
        "max output tokens",
    ),
    KeyTerm(
        "strict_parameters",
        bool,
        "--strict-parameters/--no-strict-parameters",
        "Refuse unknown parameters over HTTP. Default of a new key: no.",
        "unknown parameters",
        shown="refused",
    ),
)

# Options of a command that takes terms, for `calls`.
TERM_OPTIONS = {each.field: (each.option, None) for each in KEY_TERMS}


def stated(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms that were given as options."""
    return {field: value for field, value in terms.items() if value is not None}


def restrictions(key: ApiKey | KeyRestrictions) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each term that restricts a key."""
    for term in KEY_TERMS:
        value = getattr(key, term.field)
        if term.label and value:
            if term.kind is list:
                yield term.label, " ".join(value)
            else:
                yield term.label, term.shown or f"{value:,}"
