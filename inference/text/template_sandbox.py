"""Environment that renders chat templates of unknown origin within bounds of time and memory.

Templates are untrusted, so they run in a sandbox: no Python attributes, no changes to arguments, a
time limit. Parsing inserts a check of the deadline at the start of each loop and macro. Operations
that produce large results without a loop (powers, repetition, concatenation, padding) have bounded
operands. Templates can use what published templates expect: `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, loop controls, `generation` blocks, and the special tokens by name.
All processes of a fleet render the same text: dates are UTC in English, nothing is random.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S_MAX = 1.0  # a thousand times the usual time for a long conversation
NUMBER_MAX = 100_000  # limit of repetitions, widths and exponents, as for `range` in the sandbox
TEXT_CHARS_MAX = 16 << 20  # limit of a text built by an operator: four times the largest message
# a width above `NUMBER_MAX` in a format, or one passed as an argument
_WIDE = re.compile(r"\*|\d{6}")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = """
    January February March April May June July August September October November December
"""
MONTHS = _MONTHS.split()
_DIRECTIVE = re.compile(r"%([-_0^#]*)(\d*)[EO]?([A-Za-z+%])")
# Directives that depend on the locale, as the C locale has them.
_C_LOCALE = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}


# Names that templates do not use: of a variable, a test and a filter. A test or a filter is called
# directly; a function is checked by the sandbox, which costs as much as a turn of a conversation.
READ_CLOCK, IN_TIME, JOINED = "_look_at_clock", "_in_time", "_joined"


class TemplateTooCostly(TemplateError):
    """The template exceeds its limit of time or memory."""


class Budget:
    """Limit on the processor time of one rendering, so that a busy machine does not exhaust it."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._end_s = clock() + RENDER_S_MAX

    def read_clock(self) -> None:
        """Raise TemplateTooCostly after the deadline."""
        if self._clock() > self._end_s:
            raise TemplateTooCostly(f"the chat template has not ended after {RENDER_S_MAX:g} s")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox with limits on time and size. `read_clock`, called in templates, ends them."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"], self.filters["random"]  # text of any length, random prompts
        self.tests[IN_TIME] = _in_time
        self.filters[JOINED] = _joined
        self.filters |= {
            name: _bounded(self.filters[name])
            for name in ("batch", "center", "format", "indent", "slice", "wordwrap")
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the operands of an intercepted operator, such as `*`, before applying it.

        Raises: TemplateTooCostly.
        """
        for one, other in ((left, right), (right, left)):
            if (
                operator == "*"
                and isinstance(one, int)
                and hasattr(other, "__len__")
                and one * len(other) > TEXT_CHARS_MAX
            ):
                raise TemplateTooCostly("the chat template repeats a value too often")
        if (
            operator == "+"
            and isinstance(left, str)
            and isinstance(right, str)
            and len(left) + len(right) > TEXT_CHARS_MAX
        ):
            raise TemplateTooCostly("the chat template builds a text that is too long")
        if operator == "**" and not (abs(left) <= NUMBER_MAX and abs(right) <= 64):
            raise TemplateTooCostly("the chat template computes a power that is too large")
        if operator == "%":
            _refuse_costly(left, ())
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check calls of string methods that can pad to any width."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        if isinstance(getattr(method, "__self__", None), str):
            _refuse_costly(
                method.__self__ if method.__name__ in ("format", "format_map") else "", args
            )
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Rewriter().visit(template)  # in place
        template.set_environment(self)
        return template


class _Rewriter(NodeTransformer):
    """Transformer that inserts deadline checks into a template and bounds the operator `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return nodes.Filter(first, JOINED, others, [], None, None).set_lineno(node.lineno)

    def _begin_with_clock(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        poll = nodes.Test(nodes.Name(READ_CLOCK, "load"), IN_TIME, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(poll).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _begin_with_clock


def _in_time(read_clock: Callable[[], None]) -> bool:
    """Return True. Raises: TemplateTooCostly after the deadline."""
    read_clock()
    return True


def _joined(*parts: Any) -> str:
    """Concatenate values like `a ~ b ~ c`, with a bound on the size."""
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > TEXT_CHARS_MAX:
        raise TemplateTooCostly("the chat template builds a text that is too long")
    return "".join(texts)


def _bounded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter whose numeric arguments are widths or counts."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        text = (
            next((argument for argument in args if isinstance(argument, str)), "")
            if apply.__name__ == "do_format"
            else ""
        )
        _refuse_costly(text, (*args, *kwargs.values()))
        return apply(*args, **kwargs)

    # Jinja uses attributes to mark filters that take the environment.
    bounded.__dict__.update(getattr(apply, "__dict__", {}))
    return bounded


def _refuse_costly(layout: Any, arguments: tuple[Any, ...]) -> None:
    """Raise TemplateTooCostly if a width or count is above the limit. `layout` may be None."""
    if (isinstance(layout, str) and _WIDE.search(layout)) or any(
        isinstance(argument, int) and abs(argument) > NUMBER_MAX for argument in arguments
    ):
        raise TemplateTooCostly(f"the chat template uses a width or count above {NUMBER_MAX}")


class GenerationBlock(Extension):
    """Jinja block `{% generation %}`, which marks text for training; its content is rendered."""

    # An instance variable in the stubs.
    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def utc_text(moment: datetime, layout: str) -> str:
    """Format a moment in UTC like `strftime`, in English whatever the locale and time zone."""
    _refuse_costly(layout, ())

    def text(found: re.Match[str]) -> str:
        flags, _, letter = found.groups()
        match letter:
            case "a" | "A":
                name = WEEKDAYS[moment.weekday()][: 3 if letter == "a" else None]
            case "b" | "h" | "B":
                name = MONTHS[moment.month - 1][: None if letter == "B" else 3]
            case "p" | "P":
                name = "AM" if moment.hour < 12 else "PM"
                name = name.lower() if letter == "P" or "#" in flags else name
            case "s":
                name = str(int(moment.timestamp()))
            case _ if letter in _C_LOCALE:
                name = utc_text(moment, _C_LOCALE[letter])
            case _:
                name = moment.strftime(re.sub("[EO]", "", found[0][:-1]) + letter)
        return name.upper() if "^" in flags else name

    return _DIRECTIVE.sub(text, layout)


def refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML: the model would see "\u003c".
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
