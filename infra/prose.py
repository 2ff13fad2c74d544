"""Prose lint for docstrings, comments, messages, pages and names: `python -m infra.prose [PATH]...
[--lower]`.

Finds patterns that plain technical English avoids, and identifiers with words for which the
glossary has another (`infra/identifiers.py`). Without a path, counts each rule's findings in the
repository and fails above its ceiling; with paths, lists every finding below them. `--lower` writes
today's counts as the ceilings. A ceiling goes down to zero and never up.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from infra import identifiers
from infra.architecture import Finding, Source, repository

COLUMNS_MAX = 100
CELL_CHARS_MAX = 90
# Text of other programs, tables of data, and the pages that quote what not to write.
EXEMPT = (
    "infra/identifiers.py",
    "infra/prose.py",
    "tests/infra/test_prose.py",
    "LICENSE",
    "requirements/",
    "sdk/typescript/package-lock.json",
    "console/package-lock.json",
)
LINED = (".py", ".md", ".proto", ".ts", ".toml")  # files whose lines have a limit

CLAUSE = r"of|by|for|with|than|and|or|to|from|in|that"
OF = r"\bof (?:the|its|an?|each|every) [\w-]+ "
SENTENCE_WORDS_MAX = 40  # a longer one holds several ideas; a list of names counts as one word
WORD = r"(?>\w+(?:['’.,-]\w+)*)"
VERBS = (
    r"is|was|are|were|has|had|may|must|can|comes|came|goes|waits|stands|holds|asks|says|knows|needs"
    r"|runs|takes|ends|wants"
)
LINE_CEILING = 0
CELL_CEILING = 0
IDENTIFIER_CEILING = 0
CEILINGS = {  # of the findings that are not of a pattern
    "columns": "LINE_CEILING",
    "cell": "CELL_CEILING",
    "identifier": "IDENTIFIER_CEILING",
}
PRAGMA = re.compile(r" *# (type: ignore|noqa|fmt: ).*$")  # not counted by ruff either
BLOCK_START = re.compile(r" *([-*] |\d+\. |#|\||```|<!-- )")
CODE = re.compile(r"`[^`]*`((,| and| or|, and|, or)? `[^`]*`)*")  # a name, or a list of names
ADDRESS = re.compile(r"\]\([^)]*\)")
IGNORED_MESSAGE = re.compile(r"\bSELECT\b|\bINSERT\b|\bUPDATE\b|\bCREATE\b|\bWHERE\b|<[a-z]+[ >]")


class Kind(Enum):
    """Kind of text that the lint reads."""

    DOCSTRING = auto()
    COMMENT = auto()
    MESSAGE = auto()  # a string literal of several words in Python
    PAGE = auto()  # a paragraph, list item or table row of Markdown, without its code


@dataclass(frozen=True, slots=True)
class Text:
    """Piece of prose, and the line where it begins."""

    path: str
    line: int
    kind: Kind
    words: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Pattern to find, and what to write instead. `ceiling` is the number of findings allowed."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    kinds: frozenset[Kind]
    ceiling: int


ALL = frozenset(Kind)

RULES: tuple[Rule, ...] = (
    Rule(
        "docstring-start",
        re.compile(
            r"\A(What|Who|Whoever|Whose|Where|When|How|Whether|The same|Until|As|So|Of|See `)\b"
        ),
        "begin with a verb (Return …) or, for a class, a noun",
        frozenset({Kind.DOCSTRING}),
        0,
    ),
    Rule(
        "is-no",
        re.compile(
            r"(?<![Tt]here )\b(is|are|was|were) no\b(?! (longer|more than|less than|later than)\b)"
        ),
        "write 'is not a' or 'there is no'",
        ALL,
        0,
    ),
    Rule(
        "pronoun-subject",
        re.compile(
            r"\b([Ww]hoever|[Nn]obody|[Ss]omebody|[Ee]verybody|[Tt]hose who|[Tt]hat"
            rf" which)\b|\b[Ww]ho ({VERBS})\b"
        ),
        "name the caller, client, tenant, operator or process",
        ALL,
        0,
    ),
    Rule(
        "noun-clause",
        re.compile(
            rf"(\A|[.:;,(] |\b(?i:{CLAUSE}) )[Ww]hat (\w+ )?({VERBS}|of|it|they|he|follows)\b"
        ),
        "name the noun that the clause stands for",
        ALL,
        0,
    ),
    Rule(
        "also",
        re.compile(r"\b[Aa]lso (if|when|while|after|without|where|though)\b"),
        "write 'even'",
        ALL,
        0,
    ),
    Rule(
        "word-order",
        re.compile(r"\bexist(s|ed)? already\b|(\A|[.:;] )Else\b"),
        "write 'already exists', 'Otherwise'",
        ALL,
        0,
    ),
    Rule(
        "such",
        re.compile(r"(?<!\b[Nn]o )\b[Ss]uch (?!(as|an?|that)\b)\w"),
        "write 'these', or name them",
        frozenset({Kind.PAGE}),
        0,
    ),
    Rule(
        "by-name",
        re.compile(
            r"\b(refuse|reject)[sd]?\b[^.;:|]{0,30},? by (its |the )?(name|field|parameter|index)\b"
        ),
        "write 'and the error names it'",
        frozenset({Kind.MESSAGE, Kind.PAGE}),
        0,
    ),
    Rule(
        "genitives",
        re.compile(rf"{OF}{OF}of\b|\bof (its|their) [\w-]+'s\b"),
        "use a verb: 'the price when the request starts'",
        frozenset({Kind.MESSAGE, Kind.PAGE}),
        0,
    ),
    Rule(
        "officialese",
        re.compile(
            r"\b(by means of|in (the )?case of|in order to|in the event (of|that)|prior to"
            r"|due to the fact|for the purpose of|with (respect|regard) to"
            r"|it is (possible|necessary|required) to"
            r"|thereby|thereof|therein|wherein|whereby|hereby|hitherto|respectively)\b",
            re.IGNORECASE,
        ),
        "write 'with', 'if', 'to', 'before', 'because', 'you can', 'you must'",
        ALL,
        0,
    ),
    Rule(
        "sentence",
        re.compile(rf"({WORD}(?>[^\w.;:!?|]+)){{{SENTENCE_WORDS_MAX}}}\w"),
        f"split it: at most {SENTENCE_WORDS_MAX} words, one idea a sentence",
        frozenset({Kind.PAGE}),
        0,
    ),
)


def texts_of(source: Source) -> Iterator[Text]:
    """Yield every piece of prose in a file."""
    if source.path.endswith(".md"):
        yield from _of_page(source)
    elif source.is_python:
        yield from _of_python(source)
    elif source.path.endswith(".proto"):
        for number, line in enumerate(source.text.splitlines(), 1):
            if line.lstrip().startswith("//"):
                yield Text(source.path, number, Kind.COMMENT, line.strip("/ "))


def _of_page(source: Source) -> Iterator[Text]:
    """Yield the paragraphs, list items and table rows. Code and addresses of links are left out."""
    is_code = is_generated = False
    first, parts = 0, list[str]()
    for number, line in enumerate([*source.text.splitlines(), ""], 1):
        if parts and (not line.strip() or BLOCK_START.match(line)):
            words = ADDRESS.sub("]", CODE.sub("`code`", " ".join(parts)))
            yield Text(source.path, first, Kind.PAGE, words)
            parts.clear()
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif line.startswith("<!-- "):
            # The text up to the end marker is checked in the source that it is generated from.
            is_generated = line.startswith("<!-- reference: ")
        elif line.strip() and not is_code and not is_generated:
            first = first if parts else number
            parts.append(line.strip())


def _of_python(source: Source) -> Iterator[Text]:
    docstrings = set()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (words := ast.get_docstring(node)) is not None:
            literal = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(id(literal))
            yield Text(source.path, literal.lineno, Kind.DOCSTRING, words)
    quotes = source.path.startswith(("tests/", "demo/"))  # texts of users, training data
    for node in () if quotes else ast.walk(source.tree):
        if (
            not (isinstance(node, ast.Constant) and isinstance(node.value, str))
            or id(node) in docstrings
        ):
            continue
        if node.value.count(" ") >= 3 and not IGNORED_MESSAGE.search(node.value):
            yield Text(source.path, node.lineno, Kind.MESSAGE, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield Text(source.path, token.start[0], Kind.COMMENT, token.string.lstrip("#: "))


def findings(sources: Iterable[Source]) -> Iterator[tuple[str, Finding]]:
    """Yield each finding, preceded by the name of its rule."""
    for source in sources:
        if source.path.startswith(EXEMPT):
            continue
        for text in texts_of(source):
            for rule in RULES:
                if text.kind in rule.kinds and (found := rule.pattern.search(text.words)):
                    excerpt = " ".join(
                        text.words[max(found.start() - 20, 0) : found.end() + 40].split()
                    )
                    yield (
                        rule.name,
                        Finding(text.path, text.line, f"{rule.name}: …{excerpt}… ({rule.advice})"),
                    )
        if source.is_python:
            for finding in identifiers.findings(source):
                yield "identifier", finding
        if source.path.endswith(LINED):
            for number, whole in enumerate(source.text.splitlines(), 1):
                line = PRAGMA.sub("", whole)
                is_table = source.path.endswith(".md") and line.startswith("|")
                if len(line) > COLUMNS_MAX and not is_table and " " in line.strip(" #/*-"):
                    yield (
                        "columns",
                        Finding(
                            source.path,
                            number,
                            f"columns: {len(line)}, at most {COLUMNS_MAX} are allowed",
                        ),
                    )
                elif is_table and any(
                    len(cell.strip()) > CELL_CHARS_MAX for cell in line.split("|")
                ):
                    yield (
                        "cell",
                        Finding(
                            source.path,
                            number,
                            f"cell: at most {CELL_CHARS_MAX} characters: move the rest below the"
                            " table",
                        ),
                    )


def ceilings() -> dict[str, int]:
    """Collect the number of findings allowed for each rule."""
    return {rule.name: rule.ceiling for rule in RULES} | {
        "columns": LINE_CEILING,
        "cell": CELL_CEILING,
        "identifier": IDENTIFIER_CEILING,
    }


def lower(counts: Counter[str]) -> None:
    """Write the counts that are below the ceilings into this file, as new ceilings."""
    path = Path(__file__)
    text = path.read_text()
    for name, ceiling in ceilings().items():
        count = str(min(counts[name], ceiling))
        if constant := CEILINGS.get(name):
            text = re.sub(rf"(?m)^{constant} = \d+$", f"{constant} = {count}", text)
        else:
            text = re.sub(
                rf'(        "{name}",\n(?:.*\n)*?        )\d+(,\n    \),)',
                rf"\g<1>{count}\g<2>",
                text,
                count=1,
            )
    path.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lint the repository, or list the findings in some paths. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="list findings below these instead"
    )
    parser.add_argument("--lower", action="store_true", help="write today's counts as the ceilings")
    options = parser.parse_args(arguments)
    found = list(
        findings(
            source for source in repository() if source.path.startswith(tuple(options.paths) or "")
        )
    )
    if options.paths:
        for _, finding in found:
            print(finding)
        return 0
    counts = Counter(name for name, _ in found)
    if options.lower:
        lower(counts)
        return 0
    above = {name: most for name, most in ceilings().items() if counts[name] > most}
    for name, most in above.items():
        print(
            f"{name}: {counts[name]} findings, at most {most} are allowed: `python -m infra.prose"
            " PATH` lists those of a path",
            file=sys.stderr,
        )
    print(", ".join(f"{name} {counts[name]} of {most}" for name, most in ceilings().items()))
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
