"""All ranks are brought to one commit, whoever holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from hvdrecover.checkpoint import Checkpoint
from hvdrecover.errors import MismatchError, NoUsableCommitError, RecoveryError, StorageError
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob
from tests.unit.state.jobs import URL, Process, initialised, on_ranks


def made(process: Process, checkpoint: Checkpoint | str | None = None) -> State:
    model = FakeModel(w=[0.0, 0.0])
    optimizer, sampler = FakeOptimizer(model), FakeSampler(20)
    return process.state(checkpoint, model=model, optimizer=optimizer, sampler=sampler, history=[0.0])


def step(state: State) -> None:
    state.optimizer.step({"w": np.array([1.0, 2.0])})
    state.sampler.order.record(1)
    state.history.append(len(state.history))


def write_commits(number: int) -> State:
    """A job that makes this many durable commits and is then gone; return its last state."""

    def body(process: Process) -> State:
        state = made(process, URL)
        state.sync()
        for _ in range(number):
            step(state)
            state.commit()
            state.flush()
        state._session.durable.settle()  # the writer deletes old commits after that
        return state

    (state,) = on_ranks(1, body)
    assert isinstance(state, State)
    return state


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


def errors_of(body: Callable[[Process], None]) -> list[BaseException | None]:
    """Run a body on three ranks; return the error of each, by rank."""
    outcomes = FakeJob(initialised(body), 3).run()
    return [outcome.error for outcome in sorted(outcomes, key=lambda outcome: outcome.world.place)]


def test_a_rank_0_that_can_not_load_tells_the_others_and_nobody_hangs(roots: FakeRoots) -> None:
    write_commits(2)
    for path in roots[URL].files:
        if path.endswith("model.safetensors"):
            roots[URL].files[path] = roots[URL].files[path][:-1] + b"\xff"

    def body(process: Process) -> None:
        made(process, URL).sync()

    errors = errors_of(body)
    assert isinstance(errors[0], NoUsableCommitError)
    assert all(isinstance(error, RecoveryError) for error in errors[1:])
    assert "NoUsableCommitError" in str(errors[1])


def test_a_root_that_is_unmounted_after_the_claim_does_not_look_new(
    process: Process, roots: FakeRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_commits(1)
    state = made(process, URL)
    durable = state._session.durable
    claim = durable.claim

    def claim_and_unmount(left: Mapping[str, str]) -> int:
        generation = claim(left)
        roots[URL].files.clear()
        return generation

    monkeypatch.setattr(durable, "claim", claim_and_unmount)
    with pytest.raises(StorageError, match="emptied or unmounted"):
        state.sync()


def test_a_commit_that_does_not_fit_names_what_differs_and_is_not_loaded() -> None:
    write_commits(1)

    def body(process: Process) -> None:
        model = FakeModel(w=[5.0, 5.0, 5.0], b=[0.0])
        state = process.state(URL, model=model, sampler=FakeSampler(30), history=[], extra=1)
        try:
            state.sync()
        finally:
            assert model.weights["w"].tolist() == [5.0, 5.0, 5.0]

    errors = errors_of(body)
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
    written = write_commits(2)
    (state,) = on_ranks(1, lenient)
    assert state.model.weights["w"].tolist() == written.model.weights["w"].tolist()
    assert state.history == written.history
    assert (state.model.weights["head"].tolist(), state.extra) == ([10.0], 10.0)
    assert state.sampler.order.done == 0
    listed = [line for line in caplog.messages if line.startswith("not loaded")]
    assert [line.split(": ")[1] for line in listed] == ["extra", "model.head", "optimizer", "sampler"]


def test_a_password_in_the_url_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hvdrecover")

    def body(process: Process) -> None:
        state = process.state("sftp://me:secret@host/run", step=0)
        state.sync()
        state.finish()
        process.state("sftp://me:secret@host/run", step=0).sync()

    on_ranks(1, body)
    assert any("sftp://host/run" in message for message in caplog.messages)
    assert not any("secret" in message for message in caplog.messages)
