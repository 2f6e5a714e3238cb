"""The time for which collectives may wait for a rank that says nothing."""

from __future__ import annotations

import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover import heartbeat
from hvdrecover.heartbeat import Page, Phase
from hvdrecover.state import horovod
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.world import FakeWorld
from tests.unit.state.jobs import URL, Process

ALLOWED = 7


@pytest.fixture(autouse=True)
def guardian(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guardian that reads the page, and allows seven seconds."""
    monkeypatch.setattr(heartbeat, "_notes", 2)
    monkeypatch.setattr(heartbeat, "notify", lambda **facts: None)
    monkeypatch.setattr(horovod, "_world", None)
    page.allow_stalls(ALLOWED, 0)


@pytest.fixture
def world(process: Process) -> FakeWorld:
    """A world in training, whose waiting is limited."""
    heartbeat.enter(Phase.TRAINING)
    horovod.limit_waits(process.world)
    assert process.world.allowed == [ALLOWED]
    return process.world


def test_a_pause_lifts_the_limit_until_there_is_progress_again(world: FakeWorld) -> None:
    with horovod.paused():
        assert world.allowed == [ALLOWED, 0]
    assert world.allowed == [ALLOWED, 0]  # others may still be in theirs
    heartbeat.heartbeat()
    assert world.allowed == [ALLOWED, 0, ALLOWED]


def test_waiting_is_limited_from_the_first_commit_on_and_not_in_a_recovery(process: Process) -> None:
    world, seen = process.world, []
    state = process.state(URL, step=0)

    @run
    def train(state: State) -> None:
        while state.step < 4:
            state.step += 1
            seen.append(list(world.allowed))
            if len(seen) == 3:
                raise HorovodInternalError("a rank was lost")
            state.commit()
            heartbeat.stepped()

    train(state)
    # Steps 1, 2 and 3, which is lost, then 3 and 4.
    assert seen == [[], [ALLOWED], [ALLOWED], [ALLOWED, 0], [ALLOWED, 0, ALLOWED]]


def test_writing_the_last_commit_is_no_hang(
    process: Process, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = process.state(URL, step=0)
    state.sync()
    state.commit()
    paused: list[bool] = []
    flush = state._session.durable.flush

    def noting(*arguments: object) -> None:
        paused.append(page.read().paused)
        flush(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(state._session.durable, "flush", noting)
    state.flush()
    state.commit()
    state.finish()
    assert paused == [True, True]
    assert not page.read().paused
