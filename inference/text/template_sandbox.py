"""Where chat templates run: no attributes of Python's, no changes to what they are given, no loops without end.

A template is changed while it is parsed: each loop and macro begins with a look at the clock. What makes much of little without
a loop (powers, repeated and joined texts, padding to a width) is bounded by its operands.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S_MAX = 1.0  # seconds: a thousand times what templates take for a long conversation
NUMBER_MAX = 100_000  # of a repetition, width or power, as for `range` in the sandbox
TEXT_CHARS_MAX = 16 << 20  # of a text that an operator makes: four times the largest message
LOOK_AT_CLOCK, JOINED = "_look_at_clock", "_joined"  # names that no template uses

_WIDE = re.compile(r"\*|\d{6}")  # a width beyond `NUMBER_MAX` in a format, or one that comes from elsewhere


class TemplateTooCostly(TemplateError):
    """The template wants more time or memory than any real one."""


class Budget:
    """The time of one rendering."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + RENDER_S_MAX

    def look_at_clock(self) -> None:
        """Raises `TemplateTooCostly` once the time is over."""
        if self._clock() > self._end_s:
            raise TemplateTooCostly(f"the chat template has not ended after {RENDER_S_MAX:g} s")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on time and size. Whoever renders passes a `Budget`'s method as `LOOK_AT_CLOCK`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # makes any amount of text
        self.globals[JOINED] = _joined
        self.filters |= {
            name: _bounded(self.filters[name]) for name in ("batch", "center", "format", "indent", "slice", "wordwrap")
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See the sandbox: the operators above come by here."""
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, int) and hasattr(other, "__len__") and one * len(other) > TEXT_CHARS_MAX:
                raise TemplateTooCostly("the chat template repeats something too often")
        if operator == "+" and isinstance(left, str) and isinstance(right, str) and len(left) + len(right) > TEXT_CHARS_MAX:
            raise TemplateTooCostly("the chat template makes a text too long")
        if operator == "**" and not (abs(left) <= NUMBER_MAX and abs(right) <= 64):
            raise TemplateTooCostly("the chat template raises a number too high")
        if operator == "%":
            _refuse_costly(left, ())
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See the sandbox: calls come by here. Methods of texts pad to any width."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox has put its own around `format`
        if isinstance(getattr(method, "__self__", None), str):
            _refuse_costly(method.__self__ if method.__name__ in ("format", "format_map") else "", args)
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Rewriter().visit(template)  # in place
        template.set_environment(self)
        return template


class _Rewriter(NodeTransformer):
    """Puts the looks at the clock into a parsed template, and a bounded function in the place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._begin_with_look(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._begin_with_look(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._begin_with_look(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(JOINED, "load"), node.nodes, [], None, None).set_lineno(node.lineno)

    def _begin_with_look(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        look = nodes.Call(nodes.Name(LOOK_AT_CLOCK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(look).set_lineno(node.lineno))
        return node


def _joined(*parts: Any) -> str:
    """`a ~ b ~ c`."""
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > TEXT_CHARS_MAX:
        raise TemplateTooCostly("the chat template makes a text too long")
    return "".join(texts)


def _bounded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers are widths or counts."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        text = next((argument for argument in args if isinstance(argument, str)), "") if apply.__name__ == "do_format" else ""
        _refuse_costly(text, (*args, *kwargs.values()))
        return apply(*args, **kwargs)

    # Jinja marks by attributes which filters want its environment.
    bounded.__dict__.update(getattr(apply, "__dict__", {}))
    return bounded


def _refuse_costly(layout: Any, arguments: tuple[Any, ...]) -> None:
    """layout: a text that others are formatted by, if it is one. arguments: those that may be widths or counts."""
    if (isinstance(layout, str) and _WIDE.search(layout)) or any(
        isinstance(argument, int) and abs(argument) > NUMBER_MAX for argument in arguments
    ):
        raise TemplateTooCostly(f"the chat template uses a width or count above {NUMBER_MAX}")
