"""The page about Horovod's open issues names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "horovod-issues.md").read_text()
NAMED = sorted({*re.findall(r"`((?:lab/)?test_\w+)(?:::(\w+))?`", PAGE)})


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_named_tests_exist(file: str, test: str) -> None:
    folder = ROOT / "tests" / ("" if "/" in file else "integration")
    assert f"def {test or 'test_'}" in (folder / f"{file}.py").read_text()


def test_each_issue_is_linked_by_its_number() -> None:
    links = re.findall(r"\[#(\d+)\]\(https://github\.com/horovod/horovod/(?:issues|pull)/(\d+)\)", PAGE)
    assert len(links) >= 14
    assert [shown for shown, _ in links] == [number for _, number in links]
