"""The reports to programs and people."""

from __future__ import annotations

import pytest

from hvdrecover import heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.state import rendezvous
from hvdrecover.state.hooks import Agreement
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.world import FakeJob, fail_at
from tests.unit.state.jobs import Process, initialised


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
