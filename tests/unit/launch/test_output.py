from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.launch import output
from hvdrecover.launch.output import Outlet
from tests.unit.launch.children import until

LINE = "x" * 1023 + "\n"


@pytest.fixture
def told() -> list[tuple[str, str]]:
    """The problems that were reported."""
    return []


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for each in ends:
        try:
            os.close(each)
        except OSError:
            continue


def test_a_reader_that_is_gone_is_reported_once(pipe: tuple[int, int], told: list[tuple[str, str]]) -> None:
    os.close(pipe[0])
    outlet = Outlet(pipe[1], "stdout", lambda *words: told.append(words))
    for _ in range(1000):
        assert outlet.write(LINE) == len(LINE)
    outlet.drain()
    assert told == [("stdout", "Broken pipe")]
    # The outlet retries. Let it write the rest now, as another test may get the number of the descriptor.
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), pipe[1])
    until(lambda: not outlet._held, "the rest is to be written")


def test_a_disk_that_was_full_gets_what_waited(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    path = tmp_path / "log"
    full = os.open("/dev/full", os.O_WRONLY)
    outlet = Outlet(full, "stdout", lambda *words: told.append(words))
    outlet.write(LINE)
    until(lambda: told, "it is to be reported")
    with path.open("wb") as room:
        os.dup2(room.fileno(), full)
    outlet.write("the end\n")
    until(lambda: path.read_text() == f"{LINE}the end\n", "it is to be written")
    os.close(full)
    assert told == [("stdout", "No space left on device")]


def test_without_anybody_who_reads_lines_are_lost_and_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_MOST", 256 * len(LINE))
    outlet = Outlet(pipe[1], "stderr")
    for _ in range(500):
        outlet.write(LINE)
    with open(pipe[0], closefd=False) as file:
        for _ in range(250):
            assert file.readline() == LINE
        outlet.write("the end\n")
        outlet.drain()
        rest = [file.readline()]
        while rest[-1] != "the end\n":
            rest.append(file.readline())
    lost = 500 - 250 - rest.count(LINE)
    assert lost > 100
    assert rest[-2:] == [f"hvdrecover: {lost} lines of output were lost here\n", "the end\n"]


def test_a_streams_own_encoding_is_kept_and_nothing_fails_to_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        outlet = Outlet(file.fileno(), "stdout", encoding="latin-1")
        outlet.write("é€\udcff\n")
        outlet.drain()
    assert path.read_bytes() == b"\xe9\\u20ac\\udcff\n"
