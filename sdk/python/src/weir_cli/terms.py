"""Terms of keys, limits and prices on the command line, one row each.

Options, tables and the file of `weir apply` follow from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_cli.texts import parse_picos, parse_price, parse_thousandths, parse_thresholds, parsed

if TYPE_CHECKING:
    from weir_client import ApiKey, KeyRestrictions

Declared = tuple[Any, Any]  # annotation and default of an option

# Of each kind of term: the end of its field in the contract, the type of its option, and the parser
# of the option's text. Weights are whole thousandths here, and numbers such as 0.25 in files.
KINDS: Mapping[str, tuple[str, Any, Callable[[str], Any] | None]] = {
    "amount": ("_picos", str, parse_picos),
    "count": ("", int, None),
    "multiplier": ("_milli", str, parse_thousandths),
    "percentages": ("", str, parse_thresholds),
    "price": ("_picos_per_token", str, parse_price),
    "switch": ("", bool, None),
    "text": ("", str, None),
    "weight": ("_milli", int, None),
    "words": ("", list[str], None),
}
# Maximum of whole numbers; None for none.
MAXIMA: Mapping[str, int | None] = {"count": None, "weight": 1_000_000}
WEIGHT_HELP = (
    "How much {} token counts, in thousandths: 1000 is one token, 250 a quarter. New limits use"
    " 1000."
)


@dataclass(frozen=True, slots=True)
class Term:
    """Term of a key, a limit or a price. `key` is its name in files; its option is named after it.

    The row `label` of a key's tables shows a value that restricts it, a switch as the text `shown`;
    without a label the value has its own row.
    """

    key: str
    kind: str
    help: str
    flag: str = ""
    required: bool = False
    label: str = ""
    shown: str = ""

    @property
    def field(self) -> str:
        """Name in the contract."""
        return self.key + KINDS[self.kind][0]

    @property
    def names(self) -> str:
        """Names of the option, the second one of a switch after `/`."""
        return self.flag or f"--{self.key.replace('_', '-')}"

    @property
    def option(self) -> Declared:
        """Annotation and default of the option. It is None if it is not given."""
        limits = {"min": 0, "max": MAXIMA[self.kind]} if self.kind in MAXIMA else {}
        declared, default = option(KINDS[self.kind][1], self.help, self.names, **limits)
        return declared, ... if self.required else default


# By the kind of their object.
TERMS = {
    "key": (
        Term(
            "scopes",
            "words",
            "inference, admin, billing or scim; repeat for more. New keys get inference.",
            "--scope",
        ),
        Term(
            "models",
            "words",
            "Allow this model only; repeat for more. Default: all.",
            "--model",
            label="models",
        ),
        Term(
            "allowed_networks",
            "words",
            "Allow calls from this network only, such as 203.0.113.0/24; repeat for more.",
            "--network",
            label="networks",
        ),
        Term(
            "max_input_tokens",
            "count",
            "Refuse a request with more input tokens than this. 0 removes the limit.",
            label="max input tokens",
        ),
        Term(
            "max_output_tokens",
            "count",
            "Most output tokens of a request, all its choices together. 0 removes the limit.",
            label="max output tokens",
        ),
        Term(
            "strict_parameters",
            "switch",
            "Refuse unknown parameters over HTTP, or ignore them. New keys ignore them.",
            "--strict-parameters/--no-strict-parameters",
            label="unknown parameters",
            shown="refused",
        ),
        Term(
            "group",
            "text",
            "Group of keys, such as free, that limits can name with --each key:free. '' for none.",
            label="group",
        ),
        Term(
            "role",
            "text",
            "Role in its organization: owner, admin, developer, finance or viewer. '' for none.",
            label="role",
        ),
    ),
    "token issuer": (
        Term("keys_url", "text", "URL of its public keys. Default: its discovery document has it."),
        Term(
            "algorithms",
            "words",
            "Accept this algorithm only, such as ES256; repeat for more. Default: all safe ones.",
            "--algorithm",
        ),
        Term("token_type", "text", "Required header `typ`, such as at+jwt."),
        Term(
            "requires_id",
            "switch",
            "Refuse tokens without `jti`. Default: accept them.",
            "--require-id/--no-require-id",
        ),
        Term(
            "single_use",
            "switch",
            "Accept each token for one call only. Default: until it expires.",
            "--single-use/--no-single-use",
        ),
        Term("project_claim", "text", "Claim whose value chooses among the projects."),
        Term("end_user_claim", "text", "Claim that names the end user, such as sub."),
        Term("models_claim", "text", "Claim with the allowed models."),
        Term("max_output_tokens_claim", "text", "Claim with the output tokens per request."),
        Term(
            "label_claims",
            "words",
            "Claim that becomes a label of each request; repeat for more.",
            "--label-claim",
        ),
        Term("models", "words", "Allow this model only; repeat for more.", "--model"),
        Term("max_input_tokens", "count", "Most input tokens of a request. 0 removes the limit."),
        Term("max_output_tokens", "count", "Most output tokens of a request. 0 removes the limit."),
    ),
    "quota": (
        Term(
            "enforced",
            "switch",
            "Refuse requests beyond the limit, or only count them. New limits refuse.",
            "--enforce/--watch",
        ),
        Term("input_weight", "weight", WEIGHT_HELP.format("an input")),
        Term(
            "cached_input_weight",
            "weight",
            WEIGHT_HELP.format("a cached input"),
            "--cached-weight",
        ),
        Term("output_weight", "weight", WEIGHT_HELP.format("an output")),
        Term(
            "alert_at",
            "percentages",
            "Alert at these percentages of the limit, or `none`. New limits alert at 50,80,100.",
        ),
    ),
    "price": (
        Term("input", "price", "Price of a million input tokens, such as 0.15.", required=True),
        Term(
            "cached_input",
            "price",
            "Price of a million input tokens from the prefix cache. Default: as --input.",
        ),
        Term("output", "price", "Price of a million output tokens.", required=True),
        Term(
            "reasoning",
            "price",
            "Price of a million output tokens of thinking. Default: as --output.",
        ),
        Term(
            "embedding",
            "price",
            "Price of a million embedded tokens. Default: unchanged; 0 if it was never set.",
        ),
        Term(
            "batch_multiplier",
            "multiplier",
            "What the batch tier pays of these prices, such as 0.5 for half. First price: 1.",
        ),
    ),
    "resale price": (
        Term("markup", "multiplier", "Multiple of your cost, such as 1.25. Default: 1, the cost."),
        Term("input", "price", "Price of a million input tokens. Default: the markup."),
        Term("cached_input", "price", "Price of a million cached input tokens, likewise."),
        Term("output", "price", "Price of a million output tokens, likewise."),
        Term("reasoning", "price", "Price of a million tokens of thinking. Default: as --output."),
        Term("embedding", "price", "Price of a million embedded tokens. Default: the markup."),
        Term("request", "amount", "Price of each request, beside its tokens, such as 0.001."),
        Term("replica_hour", "amount", "Price of an hour of a rented replica, such as 4.00."),
    ),
}


def option(kind: Any, help_text: str, *names: str, default: Any = None, **form: Any) -> Declared:
    """Declare an option of a type, named after its parameter unless it has `names`.

    It is None if it is not given and has no default.
    """
    value = kind | None if default is None else kind
    return Annotated[value, typer.Option(*names, help=help_text, **form)], default


def options_of(terms: Iterable[Term]) -> dict[str, Declared]:
    """Build the options of a command that takes terms, for `calls`."""
    return {each.field: each.option for each in terms}


def values_of(terms: Iterable[Term], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options that were given. Raises: typer.BadParameter."""
    values = {each.field: given[each.field] for each in terms if given[each.field] is not None}
    for each in terms:
        if each.field in values and (parse := KINDS[each.kind][2]) is not None:
            values[each.field] = parsed(each.names, parse, values[each.field])
    return values


def restrictions(key: ApiKey | KeyRestrictions) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each term that restricts a key."""
    for term in TERMS["key"]:
        value = getattr(key, term.field)
        if term.label and value:
            if term.kind == "words":
                yield term.label, " ".join(value)
            else:
                yield term.label, term.shown or (value if term.kind == "text" else f"{value:,}")
