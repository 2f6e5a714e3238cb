"""Leaving after a preemption."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hvdrecover import heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Page, Phase, Stop
from hvdrecover.state.leaving import Preempted, decide
from hvdrecover.state.rank_local import PerRank
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, FakeWorld, Outcome, current_world
from tests.unit.launch.children import child, line
from tests.unit.state.jobs import CONFIG, STATIC, URL, Process

NO, HOST, JOB = Stop.NO, Stop.HOST, Stop.JOB


# -- who leaves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "hosts", "elastic", "leaving", "whole"),
    [
        ([NO, NO], [1, 2], True, [False, False], False),
        ([NO, NO], [1, 2], False, [False, False], False),
        ([HOST, NO], [1, 2], True, [True, False], False),
        ([NO, HOST], [1, 2], True, [False, True], False),
        (
            [HOST, NO, NO, NO],
            [1, 1, 2, 2],
            True,
            [True, True, False, False],
            False,
        ),  # a host leaves as a whole
        ([NO, HOST, NO], [1, 2, 1], True, [False, True, False], False),
        ([HOST, NO], [1, 1], True, [True, True], True),  # no host would be left
        ([HOST, HOST], [1, 2], True, [True, True], True),
        ([HOST, NO, HOST], [1, 1, 2], True, [True, True, True], True),
        ([HOST], [1], True, [True], True),
        ([HOST, NO], [1, 2], False, [True, True], True),  # the others could not continue
        ([JOB, NO], [1, 2], True, [True, True], True),
        ([NO, JOB], [1, 2], False, [True, True], True),
        ([HOST, NO, JOB], [1, 2, 3], True, [True, True, True], True),
    ],
)
def test_who_leaves(
    asked: list[Stop], hosts: list[int], elastic: bool, leaving: list[bool], whole: bool
) -> None:
    decision = decide([int(each) for each in asked], hosts, elastic=elastic)
    assert (decision.leaving if decision else (False,) * len(hosts)) == tuple(leaving)
    assert (decision is not None and decision.whole) == whole
    assert (decision is not None) == any(leaving)


# -- signals -----------------------------------------------------------------------------------------------

TRAIN = """
import signal, time
from hvdrecover import config, heartbeat
from hvdrecover.state.rank_local import PerRank
from hvdrecover.state.leaving import signals
{before}
with signals(config.read().stop_signals):
    print("trains", flush=True)
    while not heartbeat.stop_asked():
        time.sleep(0.005)  # a signal that came before a signal.pause() would not end it
    print(heartbeat.stop_asked().name, flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks_and_the_second_kills(number: signal.Signals) -> None:
    with child(TRAIN.format(before="")) as process:
        assert line(process) == "trains"
        process.send_signal(number)
        assert line(process) == "HOST"
        process.send_signal(number)
        assert process.wait(60) == -number


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    # print would fail where it interrupts another print.
    before = "import os; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'mine\\n'))"
    with child(TRAIN.format(before=before)) as process:
        assert line(process) == "trains"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "mine"
        process.send_signal(signal.SIGUSR1)
        assert line(process) == "HOST"


@pytest.fixture
def default_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in CONFIG.stop_signals}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_between_two_steps_is_heeded_at_the_next_commit(
    default_handlers: None, process: Process, page: Page, roots: FakeRoots
) -> None:
    state = process.state(URL, step=0)

    @run
    def train(state: State) -> None:
        while True:
            state.step += 1
            if state.step == 3:
                signal.raise_signal(signal.SIGTERM)
            state.commit()

    with pytest.raises(Preempted) as caught:
        train(state)
    assert caught.value.code == PREEMPTED
    assert (state.step, state.last_commit) == (3, CommitId(1, 3))
    assert roots[URL].published[-1] == state.last_commit
    assert page.read().phase == Phase.LEFT


# -- all ranks together ------------------------------------------------------------------------------------


class Job:
    """Ranks that train, of whom some are asked to leave at a step.

    Attributes:
        hosts: each place's host.
        asked: at which step which place is asked for what.
        resumed: the step, rank and size whenever a rank's training function was called.
        left: the places that have left, and at which step.
        root: the checkpoint root, if any.
        counts: the ``on_resize`` of a `PerRank` that counts each rank's steps; None if there is none.
    """

    counts: Callable[[Sequence[int], int, int], int] | None = None

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, hosts: list[str], asked: dict[int, tuple[int, Stop]]
    ) -> None:
        self.hosts, self.asked = hosts, asked
        self.root: str | None = URL
        self.static = False
        self.check_only = self.has_handler = False
        self.resumed: list[tuple[int, int, int]] = []
        self.left: list[tuple[int, int]] = []
        self._stops: dict[float, Stop] = {}
        monkeypatch.setattr(heartbeat, "stop_asked", self._stop_asked)

    def _stop_asked(self) -> Stop:
        """Return what this rank's page says: the ranks are threads here, and share a page."""
        world = current_world()
        return Stop.NO if world is None else self._stops.get(world.place, Stop.NO)

    def run(self, *faults: Any) -> list[Outcome]:
        return FakeJob(self._script, len(self.hosts), faults).run()

    def _script(self, world: FakeWorld) -> tuple[int, float, CommitId]:
        world.init()
        process = Process(world)
        config = dataclasses.replace(STATIC if self.static else CONFIG, host=self.hosts[int(world.place)])
        counted = {} if self.counts is None else {"counted": PerRank(0, self.counts)}
        state = process.state(self.root, config=config, model=FakeModel(w=0.0), step=0, **counted)
        try:
            run(lambda state: self._train(world, state))(state)
        except Preempted:
            self.left.append((int(world.place), state.step))
            raise
        return state.step, float(state.model.weights["w"]), state.last_commit

    def _train(self, world: FakeWorld, state: State) -> None:
        self.resumed.append((state.step, world.rank(), world.size()))
        while state.step < 6:
            state.model.weights["w"] += (world.allreduce(np.ones(1)) / world.size())[0]
            state.step += 1
            if self.counts is not None:
                state.counted.value += 1
            place, stop = self.asked.get(state.step, (-1, Stop.NO))
            if place == world.place:
                self._stops[place] = stop
            if self.has_handler and stop and len(self.resumed) == len(self.hosts):
                return  # as soon as all ranks have heard of it
            if self.check_only:
                state.check_host_updates()
            else:
                state.commit()


def test_one_host_leaves_and_the_others_continue_without_losing_a_step(
    monkeypatch: pytest.MonkeyPatch, roots: FakeRoots
) -> None:
    job = Job(monkeypatch, ["h1", "h2", "h1", "h2"], {3: (2, HOST)})
    outcomes = job.run()
    assert [(outcome.status, outcome.world.place) for outcome in outcomes] == [
        ("returned", 1),
        ("returned", 3),
        ("left", 0),
        ("left", 2),
    ]
    assert [outcome.result[:2] for outcome in outcomes[:2]] == [(6, 6.0)] * 2
    assert sorted(job.left) == [(0, 3), (2, 3)]
    assert sorted(job.resumed)[4:] == [(3, 0, 2), (3, 1, 2)]


@pytest.mark.parametrize(("hosts", "stop"), [(["h1", "h1"], HOST), (["h1", "h2"], JOB)])
def test_a_whole_job_leaves_at_one_durable_commit_and_continues_from_it(
    hosts: list[str], stop: Stop, monkeypatch: pytest.MonkeyPatch, roots: FakeRoots
) -> None:
    outcomes = Job(monkeypatch, hosts, {3: (1, stop)}).run()
    assert [outcome.status for outcome in outcomes] == ["left", "left"]
    assert roots[URL].published[-1] == CommitId(1, 3)
    again = Job(monkeypatch, hosts, {})
    assert [outcome.result[:2] for outcome in again.run()] == [(6, 6.0)] * 2
    assert sorted(again.resumed) == [(3, 0, 2), (3, 1, 2)]


def test_a_training_function_that_ends_because_the_job_is_stopped_has_not_finished(
    monkeypatch: pytest.MonkeyPatch, roots: FakeRoots
) -> None:
    job = Job(monkeypatch, ["h1", "h1"], {5: (0, HOST)})
    job.has_handler = True
    assert [outcome.status for outcome in job.run()] == ["left", "left"]
    assert roots[URL].published[-1] == CommitId(1, 4)  # step 5 was not committed
    again = Job(monkeypatch, ["h1", "h1"], {})
    assert [outcome.result[:2] for outcome in again.run()] == [(6, 6.0)] * 2
    assert sorted(again.resumed) == [(4, 0, 2), (4, 1, 2)]


def test_a_training_function_that_ends_because_a_host_leaves_is_called_again_on_the_others(
    monkeypatch: pytest.MonkeyPatch, roots: FakeRoots
) -> None:
    totals: list[int] = []

    def total(states: Sequence[int], rank: int, size: int) -> int:
        totals.append(sum(states))
        return totals[-1]

    job = Job(monkeypatch, ["h1", "h2"], {5: (0, HOST)})
    job.has_handler = True
    job.counts = total
    outcomes = job.run()
    assert [(outcome.status, outcome.world.place) for outcome in outcomes] == [("returned", 1), ("left", 0)]
    assert outcomes[0].result[:2] == (6, 6.0)
    assert sorted(job.resumed) == [(0, 0, 2), (0, 1, 2), (4, 0, 1)]
    assert set(totals) == {8}  # of two ranks at commit 4; step 5 is repeated
