"""Training data that have changed since the commit that a job resumes from."""

from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.data.version import DataVersion
from hvdrecover.errors import ConfigError, DataChangedError, MismatchError, RecoveryError
from hvdrecover.guard import DataChanged, Guard
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeSampler
from tests.unit.state.jobs import URL, Process, on_ranks

OLD, NEW = DataVersion("v1"), DataVersion("v2")
FINGERPRINT = {"version": 1, "kind": "arrays"}  # by the release before `DataVersion`


def build(
    process: Process, data: DataVersion | None, changed: DataChanged = "raise", length: int = 12
) -> State:
    guard = Guard(data=data, data_changed=changed)
    return process.state(
        URL, guard=guard, model=FakeModel(w=[1.0]), sampler=FakeSampler(length, shuffle=False), epoch=0
    )


def train_on(data: DataVersion | None) -> None:
    def body(process: Process) -> None:
        state = build(process, data)
        state.sync()
        state.sampler.order.set_epoch(3)
        state.sampler.order.record(2)
        state.epoch = 3
        state.model.weights["w"][0] = 5.0
        state.commit()
        state.flush()
        state._session.durable.settle()

    on_ranks(2, body)


def resume_on(data: DataVersion | None, changed: DataChanged = "raise", length: int = 12) -> list[Any]:
    def body(process: Process) -> Any:
        state = build(process, data, changed, length)
        try:
            state.sync()
        except (ConfigError, DataChangedError, MismatchError, RecoveryError) as error:
            return type(error).__name__, str(error)
        order = state.sampler.order
        state.commit()
        state.flush()
        return state.model.weights["w"][0], order.epoch, order.done, order.begin().tolist()

    return on_ranks(2, body)


@pytest.mark.parametrize("length", [12, 16])
def test_the_epoch_can_restart_with_other_data(length: int) -> None:
    train_on(OLD)
    samples = list(range(length))
    restarted = resume_on(NEW, "restart_epoch", length)
    assert restarted == [(5.0, 3, 0, samples[rank::2]) for rank in range(2)]
    # The new commit holds the new version.
    assert [result[:3] for result in resume_on(NEW, length=length)] == [(5.0, 3, 0)] * 2


def test_a_cursor_does_not_fit_data_of_another_length() -> None:
    train_on(OLD)
    assert resume_on(NEW, "warn", length=16)[0][0] == "MismatchError"


@pytest.mark.parametrize(("old", "new"), [(None, NEW), (OLD, None)])
def test_an_unknown_version_is_not_compared(old: DataVersion | None, new: DataVersion | None) -> None:
    train_on(old)
    assert [result[:3] for result in resume_on(new)] == [(5.0, 3, 4)] * 2


def test_a_job_continues_from_a_commit_with_an_old_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DataVersion, "as_json", lambda self: FINGERPRINT)
        train_on(OLD)
    assert [result[:3] for result in resume_on(NEW)] == [(5.0, 3, 4)] * 2
    # The job's own commits hold the new version.
    (kind, text), (other, told) = resume_on(OLD)
    assert (kind, other) == ("DataChangedError", "StoppedError")
    assert "the data version was 'v2', and is 'v1'" in text and "data_changed='warn'" in text
    assert "DataChangedError" in told


def test_a_version_of_a_later_release_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DataVersion, "as_json", lambda self: {"version": 3})
        train_on(OLD)
    kind, text = resume_on(OLD)[0]
    assert kind == "ConfigError" and "format 3" in text and "upgrade" in text
