"""Scalars of a state, in jobs of the fake framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.scalars import Scalars, as_numbers
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeBoard, FakeFramework, FakeModel, read_run
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, Fault, fail_at
from tests.unit.state.jobs import URL, Process, initialised

Series = list[tuple[int, float]]


class Script:
    """Steps that take a second of each rank and one more of the last, with a commit after every second one.

    Args:
        folder: where scalars are written.
        steps: after which step to end.
    """

    def __init__(self, folder: Path, steps: int = 6) -> None:
        self.folder = folder
        self.steps = steps
        self.checkpoint: str | None = None

    def run(self, size: int, *faults: Fault) -> None:
        FakeJob(initialised(self._body), size, faults).run()

    def series(self, rank: int, name: str) -> Series:
        return [(step, value) for step, value, _ in read_run(self.folder / f"rank-{rank}").get(name, [])]

    def _body(self, process: Process) -> None:
        state = process.state(
            self.checkpoint, tensorboard=str(self.folder), model=FakeModel(w=[3.0, 4.0]), step=0
        )
        world, clock = process.world, process.clock

        @run
        def train(state: State) -> None:
            scalars = process.framework.reports["times"]
            while state.step < self.steps:
                clock.advance(0.25)
                clock.advance(0.75 + (world.rank() == world.size() - 1))
                scalars.waiting()
                world.allgather([0], "step")
                clock.advance(0.5)
                scalars.arrived()
                state.step += 1
                scalars.stepped({"norm/averaged_gradient": 10.0 * world.rank() + state.step})
                state.log_metrics(loss=1 / state.step)
                if state.step % 2 == 0:
                    state.commit()
                    state.flush()

        train(state)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "logs")


@pytest.fixture(autouse=True)
def roots(monkeypatch: pytest.MonkeyPatch) -> FakeRoots:
    roots = FakeRoots()
    monkeypatch.setattr("hvdrecover.state.durable.open_storage", roots.open)
    monkeypatch.setattr("hvdrecover.scalars.TensorBoard", FakeBoard)
    return roots


def test_each_rank_tells_of_each_step(script: Script) -> None:
    script.run(2)
    for rank in (0, 1):
        assert script.series(rank, "loss") == [(step, 1 / step) for step in range(1, 7)]
        own = [(step, 10.0 * rank + step) for step in range(1, 7)]
        assert script.series(rank, "norm/averaged_gradient") == own
        assert script.series(rank, "seconds/step") == [(step, 1.5 + rank) for step in range(1, 7)]
        assert script.series(rank, "seconds/allreduce_wait") == [(step, 0.5) for step in range(1, 7)]


def test_each_rank_tells_of_each_commit(script: Script) -> None:
    script.run(2)
    for rank in (0, 1):
        assert [step for step, _ in script.series(rank, "seconds/commit_stall")] == [2, 4, 6]


def test_steps_that_are_rolled_back_are_taken_back(script: Script) -> None:
    script.run(2, fail_at(1, "step", 4))  # after a commit of two steps, and one step more
    assert script.series(0, "loss") == [(step, 1 / step) for step in range(1, 7)]


def test_who_takes_the_rank_of_one_that_is_lost_continues_in_its_run(script: Script) -> None:
    script.run(2, fail_at(0, "step", 4))
    assert script.series(1, "norm/averaged_gradient") == [(1, 11.0), (2, 12.0)]
    # The lost one took with it what it had not written yet.
    assert script.series(0, "norm/averaged_gradient") == [(3, 3.0), (4, 4.0), (5, 5.0), (6, 6.0)]


def test_a_later_start_continues_with_the_axis(script: Script) -> None:
    script.checkpoint = URL
    script.run(2, fail_at(0, "step", 4), fail_at(1, "step", 4))
    script.run(2)
    for rank in (0, 1):
        assert [step for step, _ in script.series(rank, "loss")][-4:] == [3, 4, 5, 6]


def series_of(folder: Path, body: Callable[[Process, Scalars], None]) -> dict[str, Series]:
    """Run a body in a job of one rank, and return the scalars that it has written."""

    def main(process: Process) -> None:
        state = process.state(tensorboard=str(folder), step=0)
        state.sync()
        body(process, process.framework.reports["times"])
        process.framework.reports["times"].closing()

    FakeJob(initialised(main), 1).results()
    found = read_run(folder / "rank-0")
    return {name: [(step, value) for step, value, _ in rows] for name, rows in found.items()}


def test_a_commit_is_in_no_step(tmp_path: Path) -> None:
    def body(process: Process, scalars: Scalars) -> None:
        for seconds in (1.0, 2.0):
            process.clock.advance(seconds)
            scalars.stepped({})
            scalars.begins()
            process.clock.advance(5.0)
            scalars.committed()

    found = series_of(tmp_path, body)
    assert found["seconds/step"] == [(1, 1.0), (2, 2.0)]
    assert found["seconds/commit_stall"] == [(1, 5.0), (2, 5.0)]


def test_a_reported_tensor_is_copied() -> None:
    loss = np.array([0.5])
    taken = as_numbers(FakeFramework(), {"loss": loss, "accuracy": None})
    loss[:] = 7
    assert {name: float(value) for name, value in taken.items()} == {"loss": 0.5}


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("0.5", "a str"),
        ([0.5], "a list"),
        (np.zeros(3), r"ndarray of shape \(3,\)"),
        (np.zeros(0), r".*\(0,\)"),
    ],
)
def test_a_value_that_is_no_number_is_refused_by_name(value: object, fact: str) -> None:
    with pytest.raises(ConfigError, match=rf"^log_metrics\(rate=\): .*{fact}"):
        as_numbers(FakeFramework(), {"rate": value})


def test_steps_that_nobody_has_told_of_yet_are_rolled_back_too(tmp_path: Path) -> None:
    def body(process: Process) -> None:
        state = process.state(tensorboard=str(tmp_path), step=0)
        state.sync()
        scalars = process.framework.reports["times"]
        ended = 0

        def poll() -> None:
            nonlocal ended
            steps, ended = ended, 0
            if steps:
                scalars.stepped({}, steps)

        scalars.poll = poll
        for steps in (2, 3):
            ended = steps
            state.commit()
        ended = 4
        state.restore()
        ended = 1
        state.log_metrics(loss=1.0)
        scalars.closing()

    FakeJob(initialised(body), 1).results()
    assert [step for step, _, _ in read_run(tmp_path / "rank-0")["seconds/step"]] == [2, 5, 6]
