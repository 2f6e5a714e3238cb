"""Leaving after a preemption."""

from __future__ import annotations

import signal
from contextlib import suppress

import numpy as np
import pytest

from hvdrecover import heartbeat
from hvdrecover.heartbeat import Stop
from hvdrecover.state.hooks import Preempted, decide
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.unit.launch.children import child, line
from tests.unit.state.jobs import URL, Process, on_ranks

NO, HOST, JOB = Stop.NO, Stop.HOST, Stop.JOB


@pytest.mark.parametrize(
    ("asked", "hosts", "elastic", "leaving", "whole"),
    [
        ([NO, NO], [1, 2], True, [False, False], False),
        ([NO, NO], [1, 2], False, [False, False], False),
        # A host leaves as a whole.
        ([HOST, NO, NO, NO], [1, 1, 2, 2], True, [True, True, False, False], False),
        ([NO, HOST, NO], [1, 2, 1], True, [False, True, False], False),
        ([HOST, NO], [1, 1], True, [True, True], True),  # no host would be left
        ([HOST, NO, HOST], [1, 1, 2], True, [True, True, True], True),
        ([HOST, NO], [1, 2], False, [True, True], True),  # the others could not continue
        ([NO, JOB], [1, 2], False, [True, True], True),
        ([HOST, NO, JOB], [1, 2, 3], True, [True, True, True], True),
    ],
)
def test_who_leaves(
    asked: list[Stop], hosts: list[int], elastic: bool, leaving: list[bool], whole: bool
) -> None:
    decision = decide([int(each) for each in asked], hosts, elastic=elastic)
    found = None if decision is None else ([*decision.leaving], decision.whole)
    assert found == ((leaving, whole) if any(leaving) else None)


TRAIN = """
import signal, time
from hvdrecover import config, heartbeat
from hvdrecover.heartbeat import Stop
from hvdrecover.state.run import stop_signals
{before}
with stop_signals(config.read().stop_signals):
    print("trains", flush=True)
    while not heartbeat.page.stop:
        time.sleep(0.005)  # a signal that came before a signal.pause() would not end it
    print(Stop(heartbeat.page.stop).name, flush=True)
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


def test_a_rank_whose_commit_fails_as_all_leave_makes_it_again(roots: FakeRoots) -> None:
    def body(process: Process) -> list[int]:
        state = process.state(URL, model=FakeModel(w=[1.0]), step=0)

        @run
        def train(state: State) -> None:
            state.step = 1
            heartbeat.page.ask(Stop.JOB)
            process.framework.tear = 0 if process.world.rank() == 1 else None
            with suppress(RuntimeError):  # as a script that continues without the commit
                state.commit()
            process.world.allreduce(np.zeros(1))

        with pytest.raises(Preempted):
            train(state)
        heartbeat.page.stop = 0
        return [state.last_commit.commit, state._session.own.stream]

    assert on_ranks(2, body) == [[1, 1], [1, 1]]
    assert [commit.commit for commit in roots[URL].published] == [1]
