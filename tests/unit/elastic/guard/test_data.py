"""Training data that have changed since the commit that a job resumes from."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from hvdrecover.data.fingerprint import fingerprint
from hvdrecover.elastic.guard.settings import DataChanged, Guard
from hvdrecover.elastic.state import State
from hvdrecover.errors import ConfigError, DataChangedError, MismatchError, RecoveryError, StructureError
from tests.fakes.framework import FakeModel, FakeSampler
from tests.unit.elastic.jobs import URL, Process, on_ranks

OLD, NEW, LONGER = np.arange(12), np.array([*range(11), 99]), np.arange(16)


def build(process: Process, data: Any, changed: DataChanged = "raise") -> State:
    guard = Guard(data=None if data is None else fingerprint(data), data_changed=changed)
    length = 12 if data is None else len(data)
    return process.state(
        URL, guard=guard, model=FakeModel(w=[1.0]), sampler=FakeSampler(length, shuffle=False), epoch=0
    )


def train_on(data: Any) -> None:
    def body(process: Process) -> None:
        state = build(process, data)
        state.sync()
        state.sampler.order.set_epoch(3)
        state.sampler.order.record(2)
        state.epoch = 3
        state.model.weights["w"][0] = 5.0
        state.commit()
        state.flush()
        state._durable.settle()

    on_ranks(2, body)


def resume_on(data: Any, changed: DataChanged = "raise") -> list[Any]:
    def body(process: Process) -> Any:
        state = build(process, data, changed)
        try:
            state.sync()
        except (DataChangedError, MismatchError, RecoveryError) as error:
            return type(error).__name__, str(error)
        order = state.sampler.order
        state.commit()
        state.flush()
        return state.model.weights["w"][0], order.epoch, order.done, order.begin().tolist()

    return on_ranks(2, body)


def test_a_job_continues_with_the_same_data() -> None:
    train_on(OLD)
    rests = [[4, 6, 8, 10], [5, 7, 9, 11]]
    assert resume_on(OLD.copy()) == [(5.0, 3, 4, rest) for rest in rests]


def test_other_data_stop_it_and_are_named() -> None:
    train_on(OLD)
    (kind, text), (other, told) = resume_on(NEW)
    assert (kind, other) == ("DataChangedError", "StoppedError")
    assert text.startswith(f"{URL}/g0001-c00000001: ")
    assert "11" in text and "data_changed='warn'" in text
    assert "DataChangedError" in told


def test_other_data_can_be_gone_on_with(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    train_on(OLD)
    assert [result[:3] for result in resume_on(NEW, "warn")] == [(5.0, 3, 4)] * 2
    assert f"{URL}/g0001-c00000001: " in caplog.text and "; continuing" in caplog.text


@pytest.mark.parametrize("data", [NEW, LONGER])
def test_the_epoch_can_be_begun_anew_with_other_data(data: Any) -> None:
    train_on(OLD)
    samples = list(range(len(data)))
    assert resume_on(data, "restart_epoch") == [(5.0, 3, 0, samples[rank::2]) for rank in range(2)]
    assert [result[:3] for result in resume_on(data)] == [(5.0, 3, 0)] * 2  # they are the commit's data now


def test_a_cursor_in_other_data_means_nothing() -> None:
    train_on(OLD)
    assert resume_on(LONGER, "warn")[0][0] == "MismatchError"


@pytest.mark.parametrize(("old", "new"), [(None, NEW), (OLD, None)])
def test_data_that_nobody_knew_are_not_compared(old: Any, new: Any) -> None:
    train_on(old)
    assert [result[:3] for result in resume_on(new)] == [(5.0, 3, 4)] * 2


def test_all_ranks_must_have_the_same_data() -> None:
    def body(process: Process) -> list[str]:
        with pytest.raises(StructureError) as caught:
            build(process, [OLD, NEW][process.world.rank()]).sync()
        return caught.value.differences

    (line,) = on_ranks(2, body)[0]
    assert line.startswith("training data: ") and line.endswith(" on rank 1")


def test_only_a_fingerprint_is_one() -> None:
    with pytest.raises(ConfigError, match=r"^data: ndarray .*recover\.fingerprint"):
        Guard(data=OLD)  # type: ignore[arg-type]
