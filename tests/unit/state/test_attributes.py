"""The attributes of a state: tracked, committed and restored."""

from __future__ import annotations

import numpy as np
import pytest

from hvdrecover.checkpoint import CommitId
from hvdrecover.errors import ConfigError, StateError, UnsupportedValueError
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeSampler
from tests.unit.state.jobs import Process, on_ranks


@pytest.mark.parametrize(
    "name", ["commit", "sync", "on_hosts_updated", "_private", "größe", "a-b", "1st", ""]
)
def test_a_name_of_horovods_states_or_that_can_not_be_a_file_is_refused(process: Process, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^state\.{name}: "):
        process.state(**{name: 1})


def test_an_unknown_way_to_treat_generators_is_refused(process: Process) -> None:
    with pytest.raises(ConfigError, match=r"^rng: 'restart' "):
        process.state(rng="restart")  # type: ignore[arg-type]


def test_a_value_that_json_can_not_hold_is_named_when_the_state_is_made(process: Process) -> None:
    with pytest.raises(UnsupportedValueError, match=r"state\.scheduler: .*function"):
        process.state(scheduler=lambda epoch: 0.1)


def test_a_replaced_component_is_the_one_that_is_committed(process: Process) -> None:
    state = process.state(model=FakeModel(w=[1.0]))
    state.sync()
    state.model = FakeModel(w=[5.0])
    state.save()
    state.model.weights["w"][...] = 6.0
    state.restore()
    assert state.model.weights["w"].tolist() == [5.0]


def test_a_replaced_sampler_is_placed_and_watched_like_the_first(process: Process) -> None:
    state = process.state(sampler=FakeSampler(4))
    state.sync()
    state.sampler = FakeSampler(8)
    state.commit()
    streams = process.generator.state
    process.generator.draw()
    next(iter(state.sampler))
    assert process.generator.state == streams


def test_a_cursor_that_could_not_be_loaded_again_is_no_commit(process: Process) -> None:
    state = process.state(sampler=FakeSampler(10))
    state.save()
    state.sampler.order.done = -1
    with pytest.raises(StateError, match=r"^state\.sampler: its cursor") as caught:
        state.save()
    assert caught.value.path == "state.sampler"
    state.restore()
    assert state.sampler.order.done == 0


def test_what_is_not_a_value_for_a_keyword_is_an_attribute(process: Process) -> None:
    state = process.state({"best": 1}, rng=[1, 2], guard=True, tensorboard=False)  # type: ignore[arg-type]
    state.sync()
    state.checkpoint["best"] = 2
    state.commit()
    state.checkpoint, state.rng, state.guard, state.tensorboard = {}, None, False, True
    state.restore()
    assert (state.checkpoint, state.rng, state.guard, state.tensorboard) == ({"best": 2}, [1, 2], True, False)


def test_a_subclass_may_set_an_attribute_before_the_state_is_made(process: Process) -> None:
    class Early(State):
        def __init__(self) -> None:
            self.epoch, self.note = 5, "mine"
            super().__init__(process.framework, process.world, config=process.config, attributes={"epoch": 1})

    state = Early()
    assert (state.epoch, state.note) == (1, "mine")
    state.epoch = 2
    state.save()
    state.epoch = 3
    state.restore()
    assert state.epoch == 2


@pytest.mark.parametrize("name", ["finished", "flush", "last_commit"])
def test_an_attribute_hides_a_method_that_horovods_states_lack(process: Process, name: str) -> None:
    state = process.state(**{name: [1]})
    state.sync()
    getattr(state, name).append(2)
    state.commit()
    setattr(state, name, None)
    state.restore()
    assert getattr(state, name) == [1, 2]
    assert isinstance(state, State)


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
