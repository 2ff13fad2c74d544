"""`docs/endings.md` says what the code does."""

from __future__ import annotations

from pathlib import Path

from infra.endings import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "endings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m infra.endings > docs/endings.md"


def test_no_cell_is_longer_than_90_characters() -> None:
    cells = [cell.strip() for line in page().splitlines() if line.startswith("|") for cell in line.split("|")]

    assert max(map(len, cells)) <= 90
