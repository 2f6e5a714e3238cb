from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.data.version import DataVersion
from hvdrecover.drill.faults import FAULTS
from hvdrecover.errors import DrillError
from tests.unit.drill.drilled import Counting

CHANGED = FAULTS["data-changed"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path, stack)


@pytest.fixture(params=["file", "folder"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    data = tmp_path / "data"
    if request.param == "file":
        data.write_bytes(bytes(range(256)) * 100)
    else:
        (data / "part").mkdir(parents=True)
        (data / "part" / "a").write_bytes(b"a" * 500)
        (data / "part" / "b").write_bytes(b"")
        (data / "c").write_bytes(b"c" * 500)
    return data


def content(data: Path) -> dict[Path, tuple[bytes, int]]:
    files = [data] if data.is_file() else [path for path in data.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_one_file_changes_all_ranks_die_and_the_old_file_comes_back(run: Counting, data: Path) -> None:
    run.data = data
    before, seen = content(data), DataVersion.of_files(data)
    assert CHANGED.lacks(run) == ""
    CHANGED.strike(run, 0)
    changed = {path for path, (text, _) in content(data).items() if text != before[path][0]}
    assert len(changed) == 1
    assert DataVersion.of_files(data) != seen
    assert [run.children[name].wait(60) for name in "01"] == [-9, -9]
    CHANGED.strike(run, 0)  # once more, and it is still the old file that comes back
    CHANGED.end(run)
    assert content(data) == before
    assert DataVersion.of_files(data) == seen


def test_data_without_a_file_are_an_error(run: Counting, tmp_path: Path) -> None:
    run.data = tmp_path / "empty"
    run.data.mkdir()
    with pytest.raises(DrillError) as caught:
        CHANGED.strike(run, 0)
    assert caught.value.where == str(run.data)
    assert run.alive() == list(run.children)


def test_an_empty_file_grows(run: Counting, tmp_path: Path) -> None:
    run.data = tmp_path / "data"
    run.data.touch()
    CHANGED.strike(run, 0)
    assert run.data.read_bytes() == b"\0"
