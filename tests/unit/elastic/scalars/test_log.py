"""Rows, and the files that they go to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdrecover.elastic.scalars.sinks import KEPT_SECONDS, KEPT_STEPS, Log
from hvdrecover.state.adapter import Writer
from tests.fakes.clock import FakeClock
from tests.fakes.framework import FakeWriter, read_run


class Number:
    """A number that notes when it is asked for."""

    def __init__(self) -> None:
        self.asked = False

    def __float__(self) -> float:
        self.asked = True
        return 1.0


class Full:
    """A writer whose disk is full."""

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(tmp_path: Path, clock: FakeClock) -> Log:
    return Log(f"{tmp_path}/", FakeWriter, clock)


def losses(folder: Path, rank: int = 0) -> list[tuple[int, float]]:
    return [(step, value) for step, value, _ in read_run(folder / f"rank-{rank}")["loss"]]


def test_rows_have_the_time_of_their_step(log: Log, clock: FakeClock, tmp_path: Path) -> None:
    log.begin(3)
    for step in (1, 2):
        log.row(step)["loss"] = step / 2
        clock.advance(1)
    log.row(2)["accuracy"] = 1.0
    log.close()
    run = read_run(tmp_path / "rank-3")
    assert run == {"loss": [(1, 0.5, 1000.0), (2, 1.0, 1001.0)], "accuracy": [(2, 1.0, 1001.0)]}


def test_no_number_is_asked_for_before_it_is_written(log: Log, clock: FakeClock) -> None:
    log.begin(0)
    first, later = Number(), Number()
    log.row(1)["loss"] = first
    clock.advance(KEPT_SECONDS - 1)
    log.row(2)["loss"] = later
    log.keep_up()
    assert not first.asked
    clock.advance(1)
    log.keep_up()
    assert first.asked
    assert later.asked


def test_so_many_steps_are_kept_at_most(log: Log, tmp_path: Path) -> None:
    log.begin(0)
    for step in range(1, KEPT_STEPS):
        log.row(step)["loss"] = 1.0
        log.keep_up()
    assert read_run(tmp_path / "rank-0") == {}
    log.row(KEPT_STEPS)["loss"] = 1.0
    log.keep_up()
    assert len(losses(tmp_path)) == KEPT_STEPS


def test_going_back_takes_back_later_steps_written_or_not(log: Log, clock: FakeClock, tmp_path: Path) -> None:
    log.begin(0)
    for step in range(1, 7):
        log.row(step)["loss"] = step
        if step == 4:
            clock.advance(KEPT_SECONDS)
            log.keep_up()
    log.go_to(2)
    for step in (3, 4):
        log.row(step)["loss"] = step + 10
    log.close()
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 13), (4, 14)]


def test_a_later_process_continues_in_the_same_run(log: Log, tmp_path: Path) -> None:
    log.begin(0)
    for step in range(1, 6):
        log.row(step)["loss"] = step
    log.close()
    later = Log(str(tmp_path), FakeWriter, FakeClock())
    later.go_to(3)
    later.begin(0)
    later.row(4)["loss"] = 14
    later.close()
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 3), (4, 14)]


def test_what_is_closed_may_be_written_to_again(log: Log, tmp_path: Path) -> None:
    log.begin(0)
    for step in (1, 2):
        log.row(step)["loss"] = step
        log.close()
    log.row(2)["accuracy"] = 0.5  # of a step that has been written
    log.close()
    assert losses(tmp_path) == [(1, 1), (2, 2)]
    assert len(read_run(tmp_path / "rank-0")["accuracy"]) == 1


def test_a_file_is_made_only_for_what_comes(log: Log, tmp_path: Path) -> None:
    log.begin(0)
    log.row(1)["loss"] = 1
    for _ in range(3):
        log.close()
    assert (tmp_path / "rank-0" / "scalars.jsonl").read_text().count("first") == 1


def test_a_new_rank_writes_to_its_own_run(log: Log, tmp_path: Path) -> None:
    other = FakeWriter(str(tmp_path / "rank-0"), 1)
    for step in range(1, 5):
        other.scalars({"loss": -step}, step, 0.0)
    log.begin(1)
    for step in (1, 2):
        log.row(step)["loss"] = step
    log.begin(0)
    log.row(3)["loss"] = 3
    log.close()
    assert losses(tmp_path, 1) == [(1, 1), (2, 2)]
    assert losses(tmp_path, 0) == [(1, -1), (2, -2), (3, 3)]


def test_nothing_is_written_before_the_rank_is_known(log: Log, tmp_path: Path) -> None:
    log.row(1)["loss"] = 1
    log.close()
    assert list(tmp_path.iterdir()) == []


def broken(folder: str, first: int) -> Writer:
    raise OSError(13, "Permission denied")


def full(folder: str, first: int) -> Writer:
    return Full()


@pytest.mark.parametrize("opened", [broken, full])
def test_what_can_not_be_written_is_warned_of_once(
    opened: type[FakeWriter], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log("logs", opened, clock)
    with caplog.at_level(logging.WARNING, "hvdrecover"):
        log.begin(0)
        for step in range(1, 4):
            log.row(step)["loss"] = 1.0
            clock.advance(KEPT_SECONDS)
            log.keep_up()
        log.close()
    [line] = caplog.messages
    assert line.startswith("logs: no more scalars are written: [Errno ")
