"""Pages of the documentation, and of tests/README.md, are true as far as a test can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdrecover.cli import discovering
from hvdrecover.discovery import Host, sources

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


ADAPTERS = ("torch", "tensorflow")


def rows() -> list[list[list[str]]]:
    """The names of files and folders in each cell of the table but the first, by row."""
    _, _, text = (DOCS / "architecture.md").read_text().partition("| role | torch | tensorflow |\n")
    lines = text.partition("\n\n")[0].splitlines()[1:]
    cells = [line.strip("|").split("|")[1:] for line in lines]
    return [[re.findall(r"`([\w/]+(?:\.py|/))`", cell) for cell in row] for row in cells]


def files(adapter: str) -> set[str]:
    """The modules of an adapter, and the folders that have some."""
    folder = ROOT / "hvdrecover" / adapter
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    return modules | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize(("column", "adapter"), list(enumerate(ADAPTERS)))
def test_each_file_has_a_role_and_each_that_is_named_is_there(column: int, adapter: str) -> None:
    named = [name for row in rows() for name in row[column]]
    below = [name for name in named if not name.endswith("/") and "/" in name]
    assert sorted(set(named) - set(below)) == sorted(files(adapter))
    assert len(named) == len(set(named))
    assert [name for name in below if not (ROOT / "hvdrecover" / adapter / name).is_file()] == []


DISCOVERY = (DOCS / "discovery.md").read_text()
OWN = "rack"  # the example of a source of one's own


def test_the_example_of_a_source_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's command line names the source, too."""
    (module,) = re.findall(r"^```python\n(# my_cluster\.py\n.*?)^```", DISCOVERY, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_cluster.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.OURS, OWN, "my_cluster:rack")
    (words,) = re.findall(rf'--discover "({OWN} [^"]*)"', DISCOVERY)
    source, _ = discovering.parse(discovering.request(words, []))
    assert source({}, 5.0) == [Host("rack7-a", 4), Host("rack7-b", 4)]


ISSUES = (DOCS / "horovod-issues.md").read_text()


def test_the_tests_that_the_page_of_horovods_issues_names_exist() -> None:
    for file, test in re.findall(r"`((?:lab/)?test_\w+)(?:::(\w+))?`", ISSUES):
        folder = ROOT / "tests" / ("" if "/" in file else "integration")
        assert f"def {test or 'test_'}" in (folder / f"{file}.py").read_text()


def test_each_file_with_tests_that_only_long_runs_have_is_listed() -> None:
    files = [*ROOT.glob("tests/integration/test_*.py"), *ROOT.glob("tests/lab/test_*.py")]
    long = {
        path.stem for path in files if re.search(r"^from .* import .*LONG", path.read_text(), re.MULTILINE)
    }
    table = (ROOT / "tests" / "README.md").read_text()
    assert {stem for stem in long if f"`{stem}`" not in table and f"`lab/{stem}`" not in table} == set()
