"""All ranks are brought to one commit, whoever holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.errors import MismatchError, NoUsableCommitError, RecoveryError
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, fail_at
from tests.unit.state.jobs import URL, Process, initialised, on_ranks


def made(process: Process, checkpoint: Checkpoint | str | None = None, *, value: float = 0.0) -> State:
    model = FakeModel(w=[value, value])
    return process.state(
        checkpoint,
        model=model,
        optimizer=FakeOptimizer(model),
        sampler=FakeSampler(20),
        history=[value],
    )


def facts(state: State) -> dict[str, Any]:
    return {
        "w": state.model.weights["w"].tolist(),
        "velocity": {name: array.tolist() for name, array in state.optimizer.velocity.items()},
        "cursor": (state.sampler.order.epoch, state.sampler.order.done),
        "history": list(state.history),
        "commit": state.last_commit,
    }


def step(state: State, size: int = 1) -> None:
    state.optimizer.step({"w": np.array([1.0, 2.0])})
    state.sampler.order.record(size)
    state.history.append(len(state.history))


def write_commits(number: int, size: int = 1, **options: Any) -> list[Any]:
    """A job that makes this many durable commits and is then gone."""

    def body(process: Process) -> dict[str, Any]:
        state = made(process, URL)
        state.sync()
        for _ in range(number):
            step(state)
            state.commit()
            state.flush()
        state._session.durable.settle()  # the writer deletes old commits after that
        return facts(state)

    return on_ranks(size, body, **options)


def test_if_every_save_was_torn_and_nothing_is_durable_no_state_is_made_up() -> None:
    def body(process: Process) -> None:
        state = made(process)
        state.sync()
        process.framework.tear = 1
        step(state)
        with pytest.raises(RuntimeError):
            state.save()
        with pytest.raises(RecoveryError, match="durable"):
            state.sync()

    on_ranks(2, body)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_receiver_keeps_its_commit_when_the_sender_dies_in_the_middle(nth: int) -> None:
    def body(process: Process) -> dict[str, Any]:
        state = made(process)
        state.sync()
        step(state)
        state.save()
        if process.world.rank() == 0:
            step(state)
            state.save()  # a commit ahead, so it will send, and die
        kept = facts(state)
        with pytest.raises(HorovodInternalError):
            state.sync()
        state.restore()
        assert facts(state) == kept
        process.world.shutdown()
        process.world.init()
        state.sync()
        return facts(state)

    visits = nth + 1  # the first sync sends the model only: the optimizer has no arrays yet
    faults = [fail_at(0, "hvdrecover.snapshot", visits)]
    results = on_ranks(3, body, faults)
    assert len(results) == 2
    assert results[0]["commit"] == CommitId(2, 1)
    assert results[0]["history"] == [0.0, 1]
    assert results[0] == results[1]


# -- from durable commits ------------------------------------------------------------------------------------


def outcomes_of(body: Any, size: int = 3) -> list[BaseException | None]:
    return [outcome.error for outcome in sorted(FakeJob(initialised(body), size).run(), key=by_place)]


def by_place(outcome: Any) -> float:
    return float(outcome.world.place)


def test_a_rank_0_that_can_not_load_tells_the_others_and_nobody_hangs(roots: FakeRoots) -> None:
    write_commits(2)
    for path in roots[URL].files:
        if path.endswith("model.safetensors"):
            roots[URL].files[path] = roots[URL].files[path][:-1] + b"\xff"

    def body(process: Process) -> None:
        made(process, URL).sync()

    errors = outcomes_of(body)
    assert isinstance(errors[0], NoUsableCommitError)
    assert all(isinstance(error, RecoveryError) for error in errors[1:])
    assert "NoUsableCommitError" in str(errors[1])


def test_a_commit_that_does_not_fit_names_what_differs_and_is_not_loaded() -> None:
    write_commits(1)

    def body(process: Process) -> None:
        model = FakeModel(w=[5.0, 5.0, 5.0], b=[0.0])
        state = process.state(URL, model=model, sampler=FakeSampler(30), history=[], extra=1)
        try:
            state.sync()
        finally:
            assert model.weights["w"].tolist() == [5.0, 5.0, 5.0]

    errors = outcomes_of(body)
    assert isinstance(errors[0], MismatchError)
    assert errors[0].differences == [
        "extra: an attribute of this state, but not in the commit",
        "model.b: in the model, but not in the commit",
        "model.w: F64[2] in the commit, F64[3] in the model",
        "optimizer: in the commit, but not an attribute of this state",
        errors[0].differences[-1],
    ]
    assert errors[0].differences[-1].startswith("sampler: ")
    assert "length 20, not 30" in errors[0].differences[-1]
    assert f"{URL}/g0001-c00000001" in str(errors[0])
    assert all(isinstance(error, RecoveryError) for error in errors[1:])


def lenient(process: Process) -> State:
    """A changed model, a data set of another length and a new attribute, all with each rank's own values."""
    mine = 10.0 + process.world.rank()
    state = process.state(
        Checkpoint(URL, strict=False),
        model=FakeModel(w=[mine, mine], head=[mine]),
        sampler=FakeSampler(30),
        history=[mine],
        extra=mine,
    )
    state.sync()
    return state


def test_not_strict_loads_what_fits_and_lists_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    (written,) = write_commits(2)
    (state,) = on_ranks(1, lenient)
    assert state.model.weights["w"].tolist() == written["w"]
    assert state.history == written["history"]
    assert (state.model.weights["head"].tolist(), state.extra) == ([10.0], 10.0)
    assert state.sampler.order.done == 0
    listed = [line for line in caplog.messages if line.startswith("not loaded")]
    assert [line.split(": ")[1] for line in listed] == [
        "extra",
        "model.head",
        "optimizer",
        "sampler",
    ]
