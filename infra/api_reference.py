"""API reference of the two clients on the site: from docstrings, and from TypeDoc.

A page has `<!-- weir_client: MODULE ... -->` where the public names of these modules are listed, or
`<!-- typescript client -->`. MkDocs loads this module as a hook, which replaces both, and griffe as
an extension, which brings our docstrings into the form of Markdown.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from weir_client import _NAMES as NAMES

from infra import typescript_sdk

MODULES = re.compile(r"^<!-- weir_client: ([\w ]+) -->$", re.MULTILINE)
TYPESCRIPT = "<!-- typescript client -->"
FIRST = ("WeirClient", "GenerationStream", "ClientOptions", "GenerateOptions", "Result")
# A line of a docstring that explains an argument: "name: meaning" or "`name`: meaning".
ARGUMENT = re.compile(r"^`?(\*{0,2}[a-z_]\w*(?:, [a-z_]\w*)*)`?: (?=\S)", re.MULTILINE)
DERIVED = re.compile(r"(blocking|blocking_items|items_of)\((?:(\w+)\.)?(\w+)\)")
PAGES_OF = re.compile(r"^AsyncIterator\[(?:list|Sequence|tuple)\[(.*?)(?:, \.\.\.)?\]\]$")
GROUP = re.compile(
    r"^#{3,6} (?:Accessors|Constructors|Methods|Properties|Get Signature|Type Declaration)\b.*\n\n",
    re.MULTILINE,
)
EXTENDS = re.compile(r"^### Extends\b.*\n\n- ", re.MULTILINE)
REPEATED = re.compile(
    r"^#+ (?:Inherited from|Overrides|Implementation of|Implements)\b", re.MULTILINE
)
RETURNS = re.compile(r"^#{3,6} Returns.*\n\n[`\[].*\n", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Bring docstrings into Markdown, and take comments of fields as their docstrings."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show each call that is derived from another one with the arguments of that one."""
        for module in pkg.modules.values():
            for kind in module.classes.values():
                for name, attribute in list(kind.attributes.items()):
                    if (found := DERIVED.fullmatch(str(attribute.value))) is not None:
                        base = module[found[2]] if found[2] else kind
                        call = derived(name, found[1], base.all_members[found[3]])
                        kind.set_member(name, call)

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any
    ) -> None:
        """Take the comment at the end of a field's line."""
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            line = attr.lines_collection[attr.filepath][(attr.endlineno or attr.lineno) - 1]
            mark, comment = line.rpartition("  # ")[1:]
            if mark and not comment.startswith(("noqa", "type:")):
                attr.docstring = griffe.Docstring(comment[:1].upper() + comment[1:], parent=attr)


def derived(name: str, how: str, call: Any) -> griffe.Function:
    """Return a blocking call of an asyncio one, or a call with the items of the pages of one."""
    returned = call.returns
    if how != "blocking":
        kind = "AsyncIterator" if how == "items_of" else "Iterator"
        returned = PAGES_OF.sub(rf"{kind}[\1]", str(returned))
    return griffe.Function(
        name, parameters=call.parameters, returns=returned, docstring=call.docstring
    )


def as_markdown(text: str) -> str:
    """Return a docstring with its arguments as a list and its examples as code."""
    parts = []
    for paragraph in text.split("\n\n"):
        if paragraph.lstrip().startswith(">>>"):
            parts.append(f"```pycon\n{paragraph}\n```")
        elif ARGUMENT.match(paragraph):
            parts.append(ARGUMENT.sub(lambda found: f"- `{found[1]}`: ", paragraph))
        else:
            parts.append(paragraph)
    return "\n\n".join(parts)


def python_names(modules: str) -> str:
    """Return the directives of mkdocstrings for all public names of these modules."""
    names = [name for module in modules.split() for name in NAMES[module].split()]
    return "\n\n".join(f"::: weir_client.{name}" for name in names)


def typescript() -> str:
    """Return the reference of the TypeScript client, or the reason why there is none."""
    if (reason := typescript_sdk.missing()) is not None:
        return f"This site was built without the reference of the TypeScript client: {reason}."
    typescript_sdk.build()
    with tempfile.TemporaryDirectory(prefix="weir-typedoc-") as output:
        subprocess.run(
            [typescript_sdk.SDK / "node_modules" / ".bin" / "typedoc", "--out", output],
            cwd=typescript_sdk.SDK,
            check=True,
        )
        return shortened((Path(output) / "README.md").read_text())


def shortened(page: str) -> str:
    """Order the classes of TypeDoc's page and drop what it repeats of base classes."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]

    def order(section: str) -> tuple[int, str]:
        name = section.split()[1]
        return (FIRST.index(name) if name in FIRST else len(FIRST), name)

    return "\n".join("".join(own_parts(section)) for section in sorted(sections, key=order))


def own_parts(section: str) -> Iterator[str]:
    """Yield the parts of a class that are its own. Members become headings of the third level."""
    for part in re.split(r"^(?=#{3,4} )", section, flags=re.MULTILINE):
        if REPEATED.search(part):
            continue
        part = EXTENDS.sub("Extends ", GROUP.sub("", RETURNS.sub("", part)))
        yield re.sub(r"^#### (?=\S)", "### ", part, flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the markers of a page."""
    markdown = MODULES.sub(lambda found: python_names(found[1]), markdown)
    return markdown.replace(TYPESCRIPT, typescript()) if TYPESCRIPT in markdown else markdown
