"""The moments at which commits become durable, and what training notices of it."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from pathlib import Path

import pytest

from hvdrecover.checkpoint import Checkpoint, CommitId
from hvdrecover.checkpoint.root import read_commit
from hvdrecover.checkpoint.storage import ATTEMPTS
from hvdrecover.errors import DurableAgeError, FlushTimeoutError, StateError
from hvdrecover.heartbeat import Page
from hvdrecover.machine import Available
from hvdrecover.state.hooks import Hook
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoot, FakeRoots
from tests.fakes.world import HANG_SECONDS
from tests.unit.state.jobs import URL, Process, on_ranks


def begun(process: Process, *hooks: Hook) -> State:
    """A state with one weight after its rendezvous, which writes to the root."""
    state = process.state(URL, hooks=hooks, model=FakeModel(w=[0.0]))
    state.sync()
    return state


def train(state: State) -> None:
    state.model.weights["w"] += 1


def weight_in(roots: FakeRoots, commit: CommitId) -> float:
    """The weight that a durable commit holds; raises if a byte of the commit does not verify."""
    arena = read_commit(roots.open(URL), commit).arenas["model"]
    return float(arena.bytes_of("w").view("f8")[0])


def test_memory_holds_at_most_two_snapshots(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    seen = []
    for number in range(12):
        if number % 2:
            root.gate.clear()
        state.commit()
        root.gate.set()
        assert state._session.memory.newest is not None
        seen.append(weakref.ref(state._session.memory.newest.arenas["model"]))
        assert len({arena() for arena in seen} - {None}) <= 2


def test_a_commit_that_is_asked_to_be_durable_waits_for_the_write_in_flight(
    process: Process, root: FakeRoot
) -> None:
    state = begun(process)
    root.gate.clear()
    state.commit()
    assert root.at_the_gate.wait(HANG_SECONDS)
    training = threading.Thread(target=state.commit, args=(True,))
    training.start()
    root.gate.set()
    training.join(HANG_SECONDS)
    state.flush()
    assert root.published == [CommitId(1, 1), CommitId(1, 2)]


def test_without_memory_for_a_second_commit_one_waits_for_the_write_before_it(
    process: Process, root: FakeRoot, roots: FakeRoots, caplog: pytest.LogCaptureFixture
) -> None:
    state = begun(process)
    arena = state._session.memory.newest.arenas["model"]  # type: ignore[union-attr]
    state._session.memory.room = lambda: Available(0, limited=True)
    vacate = state._session.memory.vacate

    def after_the_gate_opens() -> None:
        root.gate.set()
        vacate()

    state._session.memory.vacate = after_the_gate_opens
    root.gate.clear()
    train(state)
    state.commit()
    assert root.at_the_gate.wait(HANG_SECONDS)
    for _ in range(3):
        train(state)
        state.commit()
    state.flush()
    assert root.published == [CommitId(1, number) for number in (1, 2, 3, 4)]
    assert state._session.memory.newest is not None and state._session.memory.newest.arenas["model"] is arena
    assert [weight_in(roots, CommitId(1, number)) for number in (2, 3, 4)] == [2.0, 3.0, 4.0]
    (line,) = [message for message in caplog.messages if "commits wait for the write" in message]
    assert "cgroup" in line


def test_a_commit_for_which_there_is_no_memory_is_an_error_that_says_so(process: Process) -> None:
    state = begun(process)
    state.model.weights["v"] = state.model.weights["w"].repeat(1000)
    state._session.memory.room = lambda: Available(0, limited=True)
    with pytest.raises(StateError, match="cgroup"):
        state.commit()
    state._session.memory.room = lambda: None
    state.commit()


@pytest.mark.parametrize("durable", [True, False])
def test_all_ranks_pause_for_a_commit_in_which_rank_0_may_wait(
    durable: bool, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdrecover.heartbeat.watched", lambda: True)  # as under a guardian

    def body(process: Process) -> list[int]:
        class Looking(Hook):
            def begins(self) -> None:
                process.world.allgather([1], "all have begun")
                seen.append(page.pauses)
                process.world.allgather([1], "all have looked")

        seen: list[int] = []
        state = begun(process, Looking())
        state._session.memory.room = lambda: None if durable else Available(0, limited=False)
        state.commit()
        state.commit(durable)
        return seen

    assert on_ranks(2, body) == [[0, 2]] * 2


def test_a_storage_that_is_away_when_a_job_starts_is_tried_again(process: Process, root: FakeRoot) -> None:
    root.refusals = ATTEMPTS - 1
    process.clock.impatient = True
    begun(process)
    assert root.claims() == ["claims/g0001.json"]


def test_a_write_that_hangs_does_not_hold_up_training(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    root.gate.clear()
    for _ in range(10):
        train(state)
        state.commit()
    assert state.last_commit == CommitId(1, 10)
    process.clock.impatient = True
    with pytest.raises(FlushTimeoutError, match=r"write .* 50 s"):
        state.flush(timeout=50)
    state._session.durable.settle()
    assert root.published == []
    root.gate.set()


def test_a_job_whose_storage_hangs_for_too_long_stops(process: Process, root: FakeRoot) -> None:
    process.config = dataclasses.replace(process.config, max_durable_age=100.0)
    state = begun(process)
    root.gate.clear()
    state.commit()
    process.clock.advance(100)
    state.commit()
    process.clock.advance(1)
    with pytest.raises(DurableAgeError, match=r"write .* 101 s"):
        state.commit()
    process.clock.impatient = True
    with pytest.raises(DurableAgeError):
        state.commit(durable=True)  # has to wait for the write, and does not wait for ever
    with pytest.raises(DurableAgeError):
        state.flush()
    state._session.durable.settle()
    root.gate.set()


@pytest.mark.parametrize("checkpoint", [None, URL, Checkpoint(URL, keep=7)])
def test_a_process_of_a_drill_never_touches_the_roots_of_its_script(
    checkpoint: Checkpoint | str | None, process: Process, roots: FakeRoots, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        process.config,
        drill=tmp_path / "drill",
        instruments="hvdrecover.drill.witness",
        checkpoint="fake://drill",
    )
    process.state(checkpoint, config=config, model=FakeModel(w=[0.0])).sync()
    assert [*roots.by_url] == ["fake://drill"]
