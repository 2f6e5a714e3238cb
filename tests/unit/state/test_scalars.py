"""Scalars and trackers: the reports of each step and commit, also through faults, in fake jobs."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.heartbeat import Page
from hvdrecover.scalars import KEPT_SECONDS, Feed, MLflow, Row, TensorBoard, Tracker, WandB, as_numbers
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.clock import FakeClock
from tests.fakes.framework import FakeFramework, FakeModel
from tests.fakes.world import FakeJob, Fault
from tests.unit.state.jobs import Process, initialised

STEPS = 6
Series = list[tuple[int, float]]


class Server:
    """All runs by id, with their rows in the order in which they were logged."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Row]] = {}
        self.opened: list[str] = []
        self.closed: list[bool] = []
        self.news = threading.Condition()

    def wait_for(self, step: int) -> None:
        """Wait for a step. The thread of a fake process sends rows even after the death of the process."""
        with self.news:
            assert self.news.wait_for(
                lambda: any(rows and rows[-1].step >= step for rows in self.runs.values()), 60.0
            )

    @property
    def rows(self) -> list[Row]:
        """The rows of the only run."""
        (rows,) = self.runs.values()
        return rows

    def series(self, name: str) -> Series:
        return [(row.step, row.values[name]) for row in self.rows if name in row.values]


class Memory(Tracker):
    """A tracker of a server that keeps everything."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def open(self, run: str) -> int:
        self._server.opened.append(run)
        self._rows = self._server.runs.setdefault(run, [])
        return self._rows[-1].step if self._rows else 0

    def log(self, rows: Sequence[Row]) -> None:
        with self._server.news:
            self._rows += rows
            self._server.news.notify_all()

    def close(self, *, finished: bool) -> None:
        self._server.closed.append(finished)


class FakeBoard(Memory):
    """Stands for TensorBoard: keeps rows by folder and run, and takes back those that come again later."""

    boards: ClassVar[dict[Path, Server]] = {}

    def __init__(self, folder: str) -> None:
        super().__init__(self.boards.setdefault(Path(folder), Server()))

    def open(self, run: str) -> int:
        super().open(run)
        self._is_new = True
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        if self._is_new:
            self._is_new = False
            self._rows[:] = [row for row in self._rows if row.step < rows[0].step]
        super().log(rows)


def read_run(folder: Path) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for row in FakeBoard.boards[folder.parent].runs[folder.name]:
        for name, value in row.values.items():
            series.setdefault(name, []).append((row.step, value))
    return series


class Script:
    """Steps, with a commit after every second one; rank 0 reports another loss than the others."""

    def __init__(self, folder: Path) -> None:
        self.server = Server()
        self._folder = folder

    def run(self, size: int, *faults: Fault) -> None:
        FakeJob(initialised(self._body), size, faults).run()

    def written(self, rank: int, name: str) -> Series:
        """Return what TensorBoard has of a rank."""
        return read_run(self._folder / f"rank-{rank}").get(name, [])

    def _body(self, process: Process) -> None:
        state = process.state(
            tracker=Memory(self.server),
            tensorboard=str(self._folder),
            model=FakeModel(w=[3.0, 4.0]),
            step=0,
        )
        world = process.world

        @run
        def train(state: State) -> None:
            scalars = process.framework.reports["times"]
            while state.step < STEPS:
                world.allgather([0], "step")
                state.step += 1
                scalars.stepped({"norm/averaged_gradient": 10.0 * world.rank() + state.step})
                state.log_metrics(loss=state.step + 100 * world.rank())
                if state.step % 2 == 0:
                    state.commit()
                    if world.rank() == 0:
                        self.server.wait_for(state.step)
                    state.log_metrics(accuracy=state.step / 10)

        train(state)


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdrecover.scalars.TensorBoard", FakeBoard)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "logs")


def steps(series: Series) -> list[int]:
    return [step for step, _ in series]


# -- in a job ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_is_rolled_back_is_reported_once(script: Script, rank: int, at: int) -> None:
    script.run(3, Fault(rank, "step", at))
    assert steps(script.server.series("loss")) == list(range(1, STEPS + 1))
    if rank:  # rank 0 takes back its row of the step
        assert script.written(0, "loss") == [(step, step) for step in range(1, STEPS + 1)]


def test_a_rank_that_replaces_another_continues_its_run(script: Script) -> None:
    script.run(2, Fault(0, "step", 4))
    assert script.written(1, "norm/averaged_gradient") == [(1, 11.0), (2, 12.0)]
    # The lost process had not written its first rows yet.
    assert script.written(0, "norm/averaged_gradient") == [(3, 3.0), (4, 4.0), (5, 5.0), (6, 6.0)]


def test_a_rank_that_leaves_sends_what_commits_hold_and_does_not_end_the_run() -> None:
    server = Server()

    def body(process: Process) -> None:
        state = process.state(tracker=Memory(server), step=0)

        @run
        def train(state: State) -> None:
            for step in (1, 2, 3):
                process.framework.reports["times"].stepped({})
                state.log_metrics(loss=step)
                if step == 2:
                    state.commit()
            raise ValueError("a bug")

        with pytest.raises(ValueError, match="a bug"):
            train(state)

    FakeJob(initialised(body), 1).results()
    assert server.series("loss") == [(1, 1.0), (2, 2.0)]
    assert server.closed == [False]


def test_a_process_that_waits_for_a_tracker_at_the_end_is_paused(page: Page) -> None:
    server, paused = Server(), []

    class Slow(Memory):
        def close(self, *, finished: bool) -> None:
            paused.append(page.read().paused)
            super().close(finished=finished)

    def body(process: Process) -> None:
        state = process.state(tracker=Slow(server), step=0)

        @run
        def train(state: State) -> None:
            process.framework.reports["times"].stepped({})
            state.commit()

        train(state)

    FakeJob(initialised(body), 1).results()
    assert paused == [True]
    assert server.closed == [True]


# -- times and values --------------------------------------------------------------------------------------


def test_the_time_of_a_step_has_its_waits_and_no_commit(tmp_path: Path) -> None:
    def body(process: Process) -> None:
        state = process.state(tensorboard=str(tmp_path), step=0)
        state.sync()
        scalars = process.framework.reports["times"]
        for seconds in (1.0, 2.0):
            process.clock.advance(seconds)
            scalars.waiting()
            process.clock.advance(0.5)
            scalars.arrived()
            scalars.stepped({})
            scalars.begins()
            process.clock.advance(5.0)
            scalars.committed()
        scalars.closing()

    FakeJob(initialised(body), 1).results()
    found = {name: [value for _, value in rows] for name, rows in read_run(tmp_path / "rank-0").items()}
    assert found == {
        "seconds/step": [1.5, 2.5],
        "seconds/allreduce_wait": [0.5, 0.5],
        "seconds/commit_stall": [5.0, 5.0],
    }


def test_steps_that_were_not_polled_before_a_rollback_are_rolled_back_too(tmp_path: Path) -> None:
    def body(process: Process) -> None:
        state = process.state(tensorboard=str(tmp_path), step=0)
        state.sync()
        scalars = process.framework.reports["times"]
        ended = 0

        def poll() -> None:
            nonlocal ended
            number, ended = ended, 0
            if number:
                scalars.stepped({}, number)

        scalars.poll = poll
        for number in (2, 3):
            ended = number
            state.commit()
        ended = 4
        state.restore()
        ended = 1
        state.log_metrics(loss=1.0)
        scalars.closing()

    FakeJob(initialised(body), 1).results()
    assert steps(read_run(tmp_path / "rank-0")["seconds/step"]) == [2, 5, 6]


def test_a_reported_tensor_is_copied() -> None:
    loss = np.array([0.5])
    taken = as_numbers(FakeFramework(), {"loss": loss, "accuracy": None})
    loss[:] = 7
    assert {name: float(value) for name, value in taken.items()} == {"loss": 0.5}


@pytest.mark.parametrize(("value", "fact"), [("0.5", "a str"), (np.zeros(3), r"ndarray of shape \(3,\)")])
def test_a_value_that_is_no_number_is_refused_by_name(value: object, fact: str) -> None:
    with pytest.raises(ConfigError, match=rf"^log_metrics\(rate=\): .*{fact}"):
        as_numbers(FakeFramework(), {"rate": value})


# -- the way to a tracker ----------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(FakeBoard):
        def log(self, rows: Sequence[Row]) -> None:
            raise OSError(28, "No space left on device")

    clock = FakeClock()
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


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set at the end, so that no thread is left."""
    answers = threading.Event()
    yield answers
    answers.set()


def test_a_tracker_that_hangs_is_given_up_at_the_end(
    answers: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hanging(Memory):
        def open(self, run: str) -> int:
            answers.wait()
            return super().open(run)

    monkeypatch.setattr("hvdrecover.scalars.PATIENCE", 0.01)
    feed = Feed(Hanging(Server()), FakeClock())
    feed.begin(0)
    feed.row(1)["loss"] = 1.0
    feed.send(1)
    feed.close(finished=True)
    assert "Hanging: it has not answered" in caplog.text


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_without_its_package_a_tracker_is_refused(
    tracker: type[Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdrecover.scalars.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^tracker={tracker.__name__}\(\): .* is not installed"):
        tracker()


def test_tensorboard_reads_rows_and_drops_steps_that_came_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that TensorFlow is not imported.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
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
