"""Leaving after a preemption."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from hvdrecover import heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Page, Phase, Stop
from hvdrecover.state.leaving import Preempted, decide
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, FakeWorld, current_world
from tests.unit.launch.children import child, line
from tests.unit.state.jobs import CONFIG, URL, Process

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


@pytest.mark.parametrize(
    ("hosts", "stop", "statuses", "resumed"),
    [
        (["h1", "h2", "h1", "h2"], HOST, ["returned", "returned", "left", "left"], [(3, 0, 2), (3, 1, 2)]),
        (["h1", "h1"], HOST, ["left", "left"], []),
        (["h1", "h2"], JOB, ["left", "left"], []),
    ],
)
def test_hosts_leave_at_a_commit_and_no_step_is_lost(
    hosts: list[str],
    stop: Stop,
    statuses: list[str],
    resumed: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    roots: FakeRoots,
) -> None:
    asked: dict[float, Stop] = {}
    calls: list[tuple[int, int, int]] = []  # the step, rank and size when a training function is called

    def stop_asked() -> Stop:  # the ranks are threads here, and share a page
        world = current_world()
        return Stop.NO if world is None else asked.get(world.place, Stop.NO)

    def script(world: FakeWorld) -> tuple[int, float]:
        world.init()
        config = dataclasses.replace(CONFIG, host=hosts[int(world.place)])
        state = Process(world).state(URL, config=config, model=FakeModel(w=0.0), step=0)

        @run
        def train(state: State) -> None:
            calls.append((state.step, world.rank(), world.size()))
            while state.step < 6:
                state.model.weights["w"] += (world.allreduce(np.ones(1)) / world.size())[0]
                state.step += 1
                if state.step == 3 and world.place == len(hosts) - 2 and not resumed_before:
                    asked[world.place] = stop
                state.commit()

        train(state)
        return state.step, float(state.model.weights["w"])

    monkeypatch.setattr(heartbeat, "stop_asked", stop_asked)
    resumed_before = False
    outcomes = FakeJob(script, len(hosts)).run()
    assert [outcome.status for outcome in outcomes] == statuses
    assert [outcome.result for outcome in outcomes if outcome.status == "returned"] == [(6, 6.0)] * len(
        resumed
    )
    assert sorted(calls)[len(hosts) :] == resumed
    if not resumed:  # the whole job has left; another start continues
        assert roots[URL].published[-1] == CommitId(1, 3)
        asked.clear()
        calls.clear()
        resumed_before = True
        assert FakeJob(script, len(hosts)).results() == [(6, 6.0)] * len(hosts)
        assert sorted(calls) == [(3, 0, 2), (3, 1, 2)]
