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
    "columns": f"# {'a line ' * 20}\n",
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


def test_plain_sentences_pass() -> None:
    assert not rules_broken("api/example.py", PLAIN)


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
    lower(Counter({"is-no": 3, "columns": 5}))
    text = copy.read_text()
    assert re.search(r'"is-no",\n(.*\n)+?        3,\n', text)
    assert "LINE_CEILING = 5\nCELL_CEILING = 0\n" in text
