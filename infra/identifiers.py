"""Forbidden words in identifiers: the names of the code are the terms of `docs/glossary.md`.

Reads the names that a file defines: its module, classes, functions, parameters, attributes,
constants, variables and imports under another name. A name is split into words at underscores and
capitals. `infra.prose` counts the findings beside those of its sentences.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from infra.architecture import Finding, Source

PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
EXEMPT = ("demo/", "migrations/")  # conversations to train on, and past schemas
# Code about conversations, whose messages are also called turns.
CONVERSATIONS = (
    "api/generation/parsing/",
    "api/openai/",
    "bench/",
    "demo/",
    "inference/text/",
    "tests/api/",
    "tests/bench/",
    "tests/e2e/",
    "tests/inference/",
    "tests/service.py",
)
# Code about the key and value of one token position.
KV_CACHE = (
    "inference/core/",
    "inference/decoder/",
    "inference/sampling/",
    "tests/inference/",
)


@dataclass(frozen=True, slots=True)
class Word:
    """Word that identifiers avoid: its forms, and what to write instead.

    `allowed` has whole names in which it means something else; names of tests are sentences and
    exempt. `home` has the paths whose subject it is, `inside` the only paths to which the rule
    applies.
    """

    forms: str
    instead: str
    allowed: str = ""
    home: tuple[str, ...] = ()
    inside: tuple[str, ...] = ("",)

    def allows(self, path: str, name: str) -> bool:
        return (
            not path.startswith(self.inside)
            or path.startswith(self.home)
            or bool(self.allowed and re.fullmatch(self.allowed, name))
        )


WORDS: tuple[Word, ...] = (
    Word(
        "host hosts hosted",
        "worker: the process of an engine",
        # The machine of an address, and its memory as opposed to a GPU's.
        allowed=r"_*hosts?|listen_host|hosted_url|host_of|host_memory|HOST_BYTES|ANY_HOST"
        r"|test_\w*hosts_of_a_url\w*|test_\w*host_and_port\w*|test_of_several_hosts\w*",
    ),
    Word("tell tells telling told", "emit, report, print; of a message: client_message"),
    Word(
        "say says said",
        "append, emit, send; or the noun: text, body, answer",
        allowed=r"test_(?!\w*said)\w+|modules_say_what_they_are",  # an error says what to do
    ),
    Word("asked asker askers", "requested, requester; or the noun: prompt, question"),
    Word(
        "place places",
        "queue entry, position, location, path, batch row",
        allowed=r"in_place|\w*(decimal|money|row|format|DECIMAL|FORMAT)_(places|PLACES)"
        r"|test_\w*_(in|takes?(_the|_its)?|in_the_same)_place\w*",
        home=("inference/routing/", "tests/inference/test_placement.py"),  # to place a sequence
    ),
    Word("turn turns", "dispatch, share, loop iteration", home=CONVERSATIONS),
    Word("slot slots", "managed engine", allowed="__slots__", home=KV_CACHE),
    Word("outside", "external", inside=("inference/", "tests/inference/"), allowed=r"test_\w+"),
    Word("fleet fleets", "replica set", inside=("inference/",)),
    Word("lookahead", "dispatch window"),
    Word(
        "promise promises promised",
        "reservation, reserved",
        home=("tests/sdk/test_typescript.py",),  # JavaScript's
    ),
    Word("entrance", "queue admission"),
    Word("books", "ledger, database"),
    Word("door doors", "gateway, listener, proxy"),
    Word("lane lanes", "connection, posting lock"),
    Word("saw", "read, observed"),
    Word("life lives", "state, lifetime"),
    Word("shut", "close, revoke", allowed=r"\w*shut_?down\w*"),
    Word("hand handed", "forward, dispatch", allowed=r"\w*by_hand\w*"),
    Word("obey obeys", "handle, apply"),
    Word("look looks looked", "poll, check, refresh", allowed=r"\w*look(ed|s)?_up\w*"),
    Word("outbox", "stream writer", allowed="outbox_tokens_per_request_max"),  # in its variable
    Word("visit visits", "call", allowed=r"visit|visit_[A-Z]\w+"),  # of `ast.NodeVisitor`
    Word("trip trips", "fast path, pipeline", allowed=r"\w*round_trips?\w*"),
)
BY_FORM = {form: word for word in WORDS for form in word.forms.split()}


@cache
def forbidden(name: str) -> tuple[Word, ...]:
    """Find the words of the table in a name."""
    parts = dict.fromkeys(part.lower() for part in PART.findall(name))
    return tuple(BY_FORM[part] for part in parts if part in BY_FORM)


def defined(source: Source) -> Iterator[tuple[str, int]]:
    """Yield each name that a Python file defines and its line."""
    for part in source.path.removesuffix(".py").split("/"):
        yield part, 1
    for node in ast.walk(source.tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno


def findings(source: Source) -> Iterator[Finding]:
    """Yield each forbidden word in the names of a file, once per name."""
    if source.path.startswith(EXEMPT):
        return
    seen = set[str]()
    for name, line in defined(source):
        if name in seen:
            continue
        seen.add(name)
        for word in forbidden(name):
            if not word.allows(source.path, name):
                yield Finding(source.path, line, f"identifier: {name} (write {word.instead})")
