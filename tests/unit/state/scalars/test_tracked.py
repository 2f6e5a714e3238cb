"""An experiment tracker and what it is told, in jobs of the fake framework."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.heartbeat import Page
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from hvdrecover.trackers import Feed, MLflow, Row, Tracker, WandB
from tests.fakes.clock import FakeClock
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, Fault, fail_at
from tests.unit.state.jobs import URL, Process, initialised

STEPS = 6


class Server:
    """All runs by id, with their rows in the order in which they were logged."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Row]] = {}
        self.opened: list[str] = []
        self.closed: list[bool] = []
        self.news = threading.Condition()

    def wait_for(self, step: int) -> None:
        """Wait for a step: what a fake process has handed over would arrive even after its death."""
        with self.news:
            assert self.news.wait_for(
                lambda: any(rows and rows[-1].step >= step for rows in self.runs.values()), 60.0
            )

    @property
    def rows(self) -> list[Row]:
        """The rows of the only run."""
        (rows,) = self.runs.values()
        return rows

    def series(self, name: str) -> list[tuple[int, float]]:
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


class Script:
    """Steps, with a commit after every second one; rank 0 tells another loss than the others.

    Args:
        server: what is reported to.
        durable_every: the first commit and every so many after it are made durable; 0 for none.
    """

    def __init__(self, server: Server, durable_every: int = 0) -> None:
        self.server = server
        self._durable_every = durable_every

    def run(self, size: int, *faults: Fault) -> None:
        FakeJob(initialised(self._body), size, faults).run()

    def _body(self, process: Process) -> None:
        checkpoint = URL if self._durable_every else None
        state = process.state(checkpoint, tracker=Memory(self.server), model=FakeModel(w=[3.0, 4.0]), step=0)
        world = process.world

        @run
        def train(state: State) -> None:
            scalars = process.framework.reports["times"]
            while state.step < STEPS:
                world.allgather([0], "step")
                scalars.stepped({})
                state.step += 1
                state.log_metrics(loss=state.step + 100 * world.rank())
                if state.step % 2 == 0:
                    state.commit()
                    if world.rank() == 0:
                        self.server.wait_for(state.step)
                    if self._durable_every and (state.step // 2 - 1) % self._durable_every == 0:
                        state.flush()
                    state.log_metrics(accuracy=state.step / 10)

        train(state)


@pytest.fixture(autouse=True)
def roots(monkeypatch: pytest.MonkeyPatch) -> FakeRoots:
    roots = FakeRoots()
    monkeypatch.setattr("hvdrecover.state.durable.open_storage", roots.open)
    return roots


@pytest.fixture
def server() -> Server:
    return Server()


LOSSES = [(step, float(step)) for step in range(1, STEPS + 1)]


def test_rank_0_tells_of_each_step_once(server: Server) -> None:
    Script(server).run(2)
    assert server.series("loss") == LOSSES
    assert [step for step, _ in server.series("seconds/commit_stall")] == [2, 4, 6]
    assert server.series("accuracy") == [(2, 0.2), (4, 0.4), (6, 0.6)]  # told after the commit
    assert server.closed == [True]


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_is_rolled_back_was_not_told_of(server: Server, rank: int, at: int) -> None:
    Script(server).run(3, fail_at(rank, "step", at))
    assert [step for step, _ in server.series("loss")] == [step for step, _ in LOSSES]


def test_another_process_continues_the_run(server: Server) -> None:
    Script(server).run(2, fail_at(0, "step", 4, replacement="in_place"))
    assert [step for step, _ in server.series("loss")] == [1, 2, 3, 4, 5, 6]
    assert len(server.opened) == 2
    assert len({*server.opened}) == 1


def test_a_later_start_continues_the_run_where_it_was(server: Server) -> None:
    """Steps 3 and 4 are in no durable commit, and are done again."""
    Script(server, durable_every=3).run(2, fail_at(0, "step", 6), fail_at(1, "step", 6))
    assert [step for step, _ in server.series("loss")] == [1, 2, 3, 4]
    first = list(server.rows)
    Script(server, durable_every=3).run(2)
    assert [step for step, _ in server.series("loss")] == [1, 2, 3, 4, 5, 6]
    assert server.rows[: len(first)] == first


def test_all_ranks_keep_one_id(server: Server) -> None:
    def body(process: Process) -> str:
        state = process.state(tracker=Memory(server), step=0)
        state.sync()
        state.commit()
        assert state._session.memory.newest is not None
        return str(state._session.memory.newest.state["scalars"])

    assert len({*FakeJob(initialised(body), 3).results()}) == 1


class Broken(Memory):
    def log(self, rows: Sequence[Row]) -> None:
        raise OSError("the server is away")


def test_a_tracker_that_fails_is_left_out(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    class Ours(Script):
        def _body(self, process: Process) -> None:
            state = process.state(tracker=Broken(server), step=0)

            @run
            def train(state: State) -> int:
                while state.step < STEPS:
                    process.framework.reports["times"].stepped({})
                    state.step += 1
                    state.commit()
                return int(state.step)

            assert train(state) == STEPS

    with caplog.at_level(logging.WARNING, "hvdrecover"):
        Ours(server).run(1)
    told = [record.message for record in caplog.records if "no more scalars" in record.message]
    assert told == ["Broken: no more scalars are logged: OSError: the server is away"]


class Hanging(Memory):
    """A tracker whose server does not answer."""

    answers = threading.Event()

    def open(self, run: str) -> int:
        self.answers.wait()
        return super().open(run)


@pytest.fixture
def hanging(server: Server) -> Iterator[Hanging]:
    Hanging.answers.clear()
    yield Hanging(server)
    Hanging.answers.set()


def tracked_by(tracker: Tracker) -> Feed:
    """Return a tracker as rank 0 has it, with a row that a commit holds."""
    tracked = Feed(tracker, FakeClock())
    tracked.begin(0)
    tracked.row(1)["loss"] = 1.0
    tracked.send(1)
    return tracked


def test_a_tracker_that_hangs_is_waited_for_at_the_end(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hvdrecover.trackers.PATIENCE", 0.01)
    tracked_by(hanging).close(finished=True)
    assert "Hanging: it has not answered" in caplog.text


def test_who_waits_for_a_tracker_at_the_end_is_not_taken_for_hanging(server: Server, page: Page) -> None:
    paused = []

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


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_without_its_package_a_tracker_is_refused(
    tracker: type[Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdrecover.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^tracker={tracker.__name__}\(\): .* is not installed"):
        tracker()


def test_who_leaves_sends_what_commits_hold_and_does_not_end_the_run(server: Server) -> None:
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
        assert server.series("loss") == [(1, 1.0), (2, 2.0)]
        assert server.closed == [False]

    FakeJob(initialised(body), 1).results()
