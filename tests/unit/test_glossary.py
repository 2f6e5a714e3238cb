"""The glossary stays short, in order, and free of words that no page uses."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
WORDS = re.findall(r"^\| ([a-z -]+) \| (?!meaning)", (DOCS / "glossary.md").read_text(), re.MULTILINE)


def test_it_has_at_most_thirty_words_in_order() -> None:
    assert 0 < len(WORDS) <= 30
    assert sorted(WORDS) == WORDS


def test_each_word_is_used_on_another_page() -> None:
    pages = [page.read_text().lower() for page in DOCS.rglob("*.md") if page.name != "glossary.md"]
    unused = [word for word in WORDS if not any(word in page for page in pages)]
    assert unused == []
