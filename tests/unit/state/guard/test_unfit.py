"""No way leads from parameters that are not finite to a durable commit, if a guard looks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hvdrecover import heartbeat
from hvdrecover.errors import NumericsError, StoppedError
from hvdrecover.guard import Guard
from hvdrecover.state.horovod import hosts_updated
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.unit.state.jobs import URL, Process, on_ranks

GUARD = Guard(numerics="raise", parameters_every_commits=None)


def spoil(state: State) -> None:
    state.model.weights["w"][...] = math.nan


def returns(state: State) -> None:
    spoil(state)  # after the last commit


def flushes(state: State) -> None:
    spoil(state)
    state.save()
    state.flush()


def commits(state: State) -> None:
    spoil(state)
    state.commit(durable=True)


def leaves(state: State) -> None:
    spoil(state)
    heartbeat.page.ask(heartbeat.Stop.JOB)
    state.check_host_updates()


def flushes_after_hosts_have_changed(state: State) -> None:
    if state.last_commit.generation == 1:
        spoil(state)
        raise hosts_updated()
    state.flush()


@pytest.mark.parametrize(
    ("ending", "size"),
    [(returns, 2), (commits, 2), (leaves, 2), (flushes, 1), (flushes_after_hosts_have_changed, 1)],
)
def test_parameters_that_are_not_finite_never_get_into_a_manifest(
    ending: Callable[[State], None], size: int, roots: FakeRoots
) -> None:
    def body(process: Process) -> list[type[BaseException]]:
        state = process.state(URL, guard=GUARD, model=FakeModel(w=[1.0]), step=0)

        @run
        def train(state: State) -> None:
            if state.step == 0:
                state.step = 1
                state.commit(durable=True)
                state.flush()
            ending(state)

        with pytest.raises((NumericsError, StoppedError)) as caught:
            train(state)
        heartbeat.page.stop = 0
        return [caught.type]

    outcomes = on_ranks(size, body)
    assert outcomes[0] == [NumericsError]
    assert [commit.commit for commit in roots[URL].published] == [1]
