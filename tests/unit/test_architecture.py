"""The table of the adapters' files in docs/architecture.md is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ("torch", "tensorflow")


def rows() -> list[list[list[str]]]:
    """The names of files and folders in each cell of the table but the first, by row."""
    _, _, text = (ROOT / "docs/architecture.md").read_text().partition("| role | torch | tensorflow |\n")
    lines = text.partition("\n\n")[0].splitlines()[1:]
    cells = [line.strip("|").split("|")[1:] for line in lines]
    return [[re.findall(r"`([\w/]+(?:\.py|/))`", cell) for cell in row] for row in cells]


def files(adapter: str) -> set[str]:
    """The modules of an adapter, and the folders that have some."""
    folder = ROOT / "hvdrecover" / adapter
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    return modules | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize(("column", "adapter"), enumerate(ADAPTERS))
def test_each_file_has_a_role_and_each_that_is_named_is_there(column: int, adapter: str) -> None:
    named = [name for row in rows() for name in row[column]]
    below = [name for name in named if not name.endswith("/") and "/" in name]
    assert sorted(set(named) - set(below)) == sorted(files(adapter))
    assert len(named) == len(set(named))
    assert [name for name in below if not (ROOT / "hvdrecover" / adapter / name).is_file()] == []


def test_a_name_that_both_adapters_have_is_of_one_role() -> None:
    apart = {name for torch, tensorflow in rows() for name in set(torch) ^ set(tensorflow)}
    assert apart & files("torch") & files("tensorflow") == set()
