"""Prose lint: finds each forbidden construction, and accepts plain sentences."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from infra import prose
from infra.architecture import Source
from infra.prose import findings, lower

FOREIGN = {
    "docstring-start": '"""Whether somebody waited and does not any more."""\n',
    "is-no": 'raise ValueError("the name is no valid network at all")\n',
    "pronoun-subject": "# Whoever knocks is let in.\n",
    "noun-clause": "# By what of them a cache is known to be broken.\n",
    "also": "# The counts agree, also if a server dies.\n",
    "word-order": 'raise ValueError("an object with this name exists already")\n',
    "officialese": "# Computes the rate by means of a window.\n",
    "columns": f"# {'a line ' * 20}\n",
    "identifier": "def tell(request: object) -> None: ...\n",
}
FOREIGN_ON_A_PAGE = {
    "also": "A bill is exact, also\nwhile a server dies.\n",
    "word-order": "Wait until there is room. Else send it again.\n",
    "such": "- A worker ends such\n  holds.\n",
    "by-name": "Fields that it ignores are refused by name.\n",
    "genitives": "It keeps the price of its request's admission.\n",
    "officialese": "It is possible to resume a stream.\n",
    "sentence": "A request" + "\nand a word" * 13 + " ends.\n",
}
NAMES = ",\n".join(f"`name_{number}`" for number in range(50))
PLAIN_PAGE = f"""The limit holds even if a server dies. No such request exists. Such a limit is
rare. Otherwise send {NAMES}.

| a | b |
| one | {"cell " * 15} |
| two | {"cell " * 15} |
| three | {"cell " * 15} |
[A page](such/things/by/means/of.md) has the name of its model and the price of a token.
"""
IDENTIFIERS = {
    "module": ("api/outbox.py", ""),
    "class": ("api/example.py", "class OnDemandSlot: ...\n"),
    "function": ("metering/example.py", "async def hand_over() -> None: ...\n"),
    "parameter": ("api/example.py", "def send(*, told_ms: float) -> None: ...\n"),
    "attribute": ("inference/example.py", "world.lookahead = 3\n"),
    "constant": ("tests/example.py", "LANE_COUNT = 3\n"),
    "variable": ("tests/example.py", "for asked in ():\n    pass\n"),
    "import under another name": ("bench/example.py", "from a import b as door\n"),
    "exception": ("api/example.py", "try:\n    pass\nexcept OSError as told:\n    pass\n"),
    "pattern": ("api/example.py", "match 1:\n    case places:\n        pass\n"),
    "test": ("tests/test_example.py", "def test_a_killed_host_comes_back() -> None: ...\n"),
}
TERMS = {
    "api/example.py": "host = address.host\nlisten_host = look_up_host(host)\nshutdown = None\n",
    "api/openai/example.py": "turn = conversation.turns[-1]\n",
    "inference/core/example.py": "block, slot = divmod(position, 16)\n",
    "inference/routing/example.py": "def place(sequence: object) -> None: ...\n",
    "metering/example.py": "decimal_places = 2\nreplaced, displaced = 1, 2\n",
    "tests/test_example.py": "def test_an_error_says_what_to_install() -> None: ...\n",
    "demo/example.py": "place = asked = 'Paris'\n",
}
PLAIN = '''"""Metrics, alerts and runbooks.

A closed month cannot be reopened. There is no way back, and the result is no longer used.
"""


def replica_state() -> str:
    """Return the state of the model, aggregated over its replicas."""
    raise ValueError("`max_output_tokens` must be between 1 and 4096, got 9000")
'''


def rules_broken(path: str, text: str) -> set[str]:
    return {name for name, _ in findings([Source(path, text)])}


@pytest.mark.parametrize(("rule", "text"), FOREIGN.items())
def test_a_foreign_sentence_is_found(rule: str, text: str) -> None:
    assert rule in rules_broken("api/example.py", text)


@pytest.mark.parametrize(("rule", "text"), FOREIGN_ON_A_PAGE.items())
def test_a_foreign_sentence_of_a_page_is_found_across_its_lines(rule: str, text: str) -> None:
    assert rules_broken("docs/page.md", text) == {rule}


def test_plain_sentences_pass() -> None:
    assert not rules_broken("api/example.py", PLAIN)
    assert not rules_broken("docs/page.md", PLAIN_PAGE)


@pytest.mark.parametrize(("path", "text"), IDENTIFIERS.values(), ids=IDENTIFIERS)
def test_a_name_that_is_not_a_term_is_found_once(path: str, text: str) -> None:
    [(rule, finding)] = findings([Source(path, text)])
    assert (rule, finding.path) == ("identifier", path)


@pytest.mark.parametrize(("path", "text"), TERMS.items())
def test_a_term_is_a_name_where_it_has_its_meaning(path: str, text: str) -> None:
    assert not rules_broken(path, text)


def test_pages_are_read_without_their_code() -> None:
    page = "Whoever asks is answered.\n\n```sh\n# whoever\n```\n\n`nobody` is a user.\n"
    [(_, finding)] = findings([Source("docs/page.md", page)])
    assert str(finding).startswith("docs/page.md:1: ")


def test_generated_parts_of_a_page_are_checked_in_their_source() -> None:
    generated = "<!-- reference: errors -->\n\nNobody asks.\n\n<!-- end of reference -->\n"
    page = f"Text.\n\n{generated}\nNobody answers.\n"
    [(_, finding)] = findings([Source("docs/page.md", page)])
    assert str(finding).startswith("docs/page.md:9: ")


def test_a_cell_holds_one_fact() -> None:
    assert rules_broken("docs/page.md", f"| a | {'fact ' * 20} |\n") == {"cell"}


def test_ceilings_go_down_and_never_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "prose.py"
    copy.write_text(Path(prose.__file__).read_text())
    monkeypatch.setattr(prose, "__file__", str(copy))

    counts = Counter(dict.fromkeys(prose.ceilings(), 10**6))
    lower(counts)
    assert copy.read_text() == Path(prose.__spec__.origin or "").read_text()

    higher = dict.fromkeys(prose.ceilings(), 10)
    monkeypatch.setattr(prose, "ceilings", lambda: higher)
    lower(Counter({"is-no": 3, "columns": 5, "identifier": 7}))
    text = copy.read_text()
    assert re.search(r'"is-no",\n(.*\n)+?        3,\n', text)
    assert "LINE_CEILING = 5\nCELL_CEILING = 0\nIDENTIFIER_CEILING = 7\n" in text
