"""Rows for TensorBoard, and the files that they go to."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from hvdrecover.trackers import KEPT_SECONDS, Feed, Row, TensorBoard
from tests.fakes.clock import FakeClock
from tests.fakes.framework import FakeBoard, read_run


class Number:
    """A number that notes when it is asked for."""

    asked = False

    def __float__(self) -> float:
        self.asked = True
        return 1.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def feed(tmp_path: Path, clock: FakeClock) -> Feed:
    return Feed(FakeBoard(str(tmp_path)), clock, each_rank=True)


def losses(folder: Path, rank: int = 0) -> list[tuple[int, float]]:
    return [(step, value) for step, value, _ in read_run(folder / f"rank-{rank}")["loss"]]


def test_no_number_is_asked_for_before_it_is_written(feed: Feed, clock: FakeClock) -> None:
    feed.begin(0)
    first, later = Number(), Number()
    feed.row(1)["loss"] = first
    clock.advance(KEPT_SECONDS - 1)
    feed.row(2)["loss"] = later
    feed.keep_up()
    assert feed._thread is None
    clock.advance(1)
    feed.keep_up()
    feed.close()
    assert first.asked
    assert later.asked


def test_going_back_takes_back_later_steps_written_or_not(
    feed: Feed, clock: FakeClock, tmp_path: Path
) -> None:
    feed.begin(0)
    for step in range(1, 7):
        feed.row(step)["loss"] = step
        if step == 4:
            clock.advance(KEPT_SECONDS)
            feed.keep_up()
    feed.go_to(2)
    for step in (3, 4):
        feed.row(step)["loss"] = step + 10
    feed.close()
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 13), (4, 14)]


def test_a_folder_that_cannot_be_written_is_warned_of_once(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(FakeBoard):
        def log(self, rows: Sequence[Row]) -> None:
            raise OSError(28, "No space left on device")

    feed = Feed(Full("logs"), clock, each_rank=True)
    with caplog.at_level(logging.WARNING, "hvdrecover"):
        feed.begin(0)
        for step in range(1, 4):
            feed.row(step)["loss"] = 1.0
            clock.advance(KEPT_SECONDS)
            feed.keep_up()
            if feed._thread is not None:
                feed._thread.join()
    assert caplog.messages == [
        "Full: no more scalars are logged: OSError: [Errno 28] No space left on device"
    ]


def test_tensorboard_reads_rows_and_drops_steps_that_came_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "tensorboard.compat.notf", ModuleType("notf")
    )  # do not import TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # TensorBoard reads the files of a second by their last numbers, as texts.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    board = TensorBoard(f"{tmp_path}/")
    for start, (first, last) in enumerate([(1, 6), (4, 5), (5, 5), (6, 8)]):  # all within a second
        board.open("rank-0")
        board.log([Row(step, 1e9 + step, {"loss": 10 * start + step}) for step in range(first, last + 1)])
        board.close(finished=False)
    board.open("rank-0")
    board.log([Row(9, 1e9, {"norm": math.inf})])
    board.close(finished=True)
    read = EventAccumulator(str(tmp_path / "rank-0"))
    read.Reload()
    loss = read.Scalars("loss")
    assert [each.value for each in loss] == [1, 2, 3, 14, 25, 36, 37, 38]
    assert [(each.step, each.wall_time) for each in loss] == [(step, 1e9 + step) for step in range(1, 9)]
    assert [(each.step, each.value) for each in read.Scalars("norm")] == [(9, math.inf)]
