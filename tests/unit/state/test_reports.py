"""The reports to programs and people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdrecover import events, heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.record import Record
from hvdrecover.state import rendezvous
from hvdrecover.state.hooks import Agreement
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeSampler
from tests.fakes.world import FakeJob, Fault, fail_at
from tests.support.jobs import read_events
from tests.unit.state.jobs import URL, Process, initialised


def events_of(folder: Path, size: int, *faults: Fault) -> list[dict[str, Any]]:
    """The events of a job of two steps, with a commit after each."""

    record = Record(folder)

    def body(process: Process) -> None:
        state = process.state(URL, model=FakeModel(w=0.0), sampler=FakeSampler(5), step=0)

        @run
        def train(state: State) -> None:
            while state.step < 2:
                process.world.allgather([0], "step")
                list(state.sampler)
                state.step += 1
                state.commit()
                state.flush()

        train(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "Pipe", lambda _: record)  # as if each rank had a guardian
        patch.setattr(heartbeat, "event_pipe", lambda: 0)
        FakeJob(initialised(body), size, faults).run()
    return read_events(folder)


def of_kind(events: list[dict[str, Any]], kind: str, *facts: str) -> list[tuple[Any, ...]]:
    found = {tuple(event[fact] for fact in facts) for event in events if event["kind"] == kind}
    return sorted(found)


def test_every_rank_reports_every_rendezvous(tmp_path: Path) -> None:
    events = events_of(tmp_path, 2, fail_at(0, "step", 2))
    facts = of_kind(events, "sync", "generation", "rank", "source", "commit", "size")
    assert facts == [(1, 0, "initial", 0, 2), (1, 1, "initial", 0, 2), (2, 0, "memory", 1, 1)]


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        ((0, 0), ""),  # a job that has just started knows nothing
        ((7, 0), ""),
        ((7, 1), "; 1 step is repeated"),
        ((7, 5), "; 5 steps are repeated"),
        ((8, 0), "; 1 commit is repeated"),
        ((9, 5), "; 2 commits and 5 steps are repeated"),
        ((6, 5), ""),
    ],
)
def test_what_is_repeated_after_a_fault_is_said(reached: tuple[int, int], said: str) -> None:
    state = {"random": {"seed": 1, "stream": 7, "states": {}}}
    agreement = Agreement(Snapshot(CommitId(3, 29), {}, state, 2, {}), "memory", "job")
    line = rendezvous.report(agreement, 2, "", 0.25, reached)
    assert line == f"resuming from commit 29 in memory on 2 ranks{said}; 0.25 s"


def test_the_line_of_a_real_recovery_says_what_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    def body(process: Process) -> None:
        state = process.state(step=0)

        @run
        def train(state: State) -> None:
            while state.step < 6:
                process.world.allgather([0], "step")
                heartbeat.stepped()
                state.step += 1
                if state.step % 3 == 0:
                    state.commit()

        train(state)

    FakeJob(initialised(body), 2, (fail_at(1, "step", 5),)).run()
    assert any("resuming from commit 1 in memory on 1 rank; " in line for line in caplog.messages)


def test_a_password_in_the_url_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hvdrecover")

    def body(process: Process) -> None:
        state = process.state("sftp://me:secret@host/run", step=0)
        state.sync()
        state.finish()
        fresh = process.state("sftp://me:secret@host/run", step=0)
        fresh.sync()

    FakeJob(initialised(body), 1).results()
    assert any("sftp://host/run" in message for message in caplog.messages)
    assert not any("secret" in message for message in caplog.messages)
