from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.errors import MismatchError, UnsupportedValueError
from tests.fakes.framework import FakeModel
from tests.unit.state.jobs import Process, on_ranks


def test_a_value_that_can_not_be_committed_does_not_spoil_the_last_commit(process: Process) -> None:
    state = process.state(model=FakeModel(w=[1.0]), box=None)
    state.sync()
    state.model.weights["w"][...] = 2.0
    state.box = object()
    with pytest.raises(UnsupportedValueError):
        state.commit()
    assert state.last_commit == CommitId(1, 0)
    state.restore()
    assert (state.model.weights["w"].tolist(), state.box) == ([1.0], None)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_ranks_whose_commit_failed_stay_in_step_with_the_others(failing: set[int], durable: bool) -> None:

    def body(process: Process) -> int:
        state = process.state(box=None)
        state.sync()
        if process.world.rank() in failing:
            state.box = object()
            with pytest.raises(UnsupportedValueError):
                state.commit(durable=durable)
            state.box = None
        else:
            state.commit(durable=durable)
        process.world.allreduce(np.ones(1))
        state.commit()
        return state.last_commit.commit

    assert on_ranks(2, body) == [2, 2]


def test_restoring_into_another_model_names_what_differs_and_loads_nothing(process: Process) -> None:
    state = process.state(model=FakeModel(w=[1.0], v=[1.0]), epoch=0)
    state.sync()
    state.model = FakeModel(w=[5.0, 5.0], u=[5.0])
    state.epoch = 5
    with pytest.raises(MismatchError) as caught:
        state.restore()
    assert caught.value.differences == [
        "model.u: in the model, but not in the commit",
        "model.v: in the commit, but not in the model",
        "model.w: F64[1] in the commit, F64[2] in the model",
    ]
    assert (state.model.weights["w"].tolist(), state.epoch) == ([5.0, 5.0], 5)


class KeptPart:
    """Something beside the attributes."""

    def __init__(self) -> None:
        self.held: Any = None
        self.loaded: list[Any] = []

    def tree(self) -> Any:
        return self.held

    def load(self, tree: Any) -> None:
        self.held = tree
        self.loaded.append(tree)


def test_what_is_kept_beside_the_attributes_rolls_back_and_may_be_absent(process: Process) -> None:
    part = KeptPart()
    state = process.state(hidden={"_part": part}, epoch=0)
    state.sync()
    state.restore()
    part.held = {"best": 3.0, "waits": [1]}
    state.commit()
    part.held = {"best": 1.0, "waits": [1, 2]}
    state.restore()
    assert part.loaded == [None, {"best": 3.0, "waits": [1]}]
    part.held = None
    state.commit()
    assert "_part" not in state._session.memory.newest.state["attributes"]  # type: ignore[union-attr]


def test_what_has_changed_is_found_before_large_tensors_are_compared(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal, compared = process.framework.equal, []

    def noted(pairs: Any) -> Any:
        for pair in pairs:
            compared.append(pair[0].nbytes)
            yield pair

    monkeypatch.setattr(process.framework, "equal", lambda pairs: equal(noted(pairs)))
    state = process.state(model=FakeModel(large=[0.0] * 1000, count=[0.0]), step=0)
    state.sync()
    state.step += 1
    state.commit()
    assert compared == []
    state.model.weights["count"] += 1
    state.commit()
    assert len(compared) == 1
    state.commit()
    assert compared[1:] == [compared[0], 1000 * compared[0]]
