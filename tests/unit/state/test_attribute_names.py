"""A script's attributes may have the names that a State adds to Horovod's."""

from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import Past
from hvdrecover.state.run import run
from hvdrecover.state.state import _TAKES, State, _divide
from tests.unit.state.jobs import URL, Process

OURS = ["finish", "finished", "flush", "last_commit", "last_durable", "observe"]


@pytest.mark.parametrize("name", OURS)
def test_an_attribute_of_such_a_name_is_committed_and_rolled_back(process: Process, name: str) -> None:
    state = process.state(**{name: [1]})
    state.sync()
    getattr(state, name).append(2)
    state.commit()
    setattr(state, name, None)
    state.restore()
    assert getattr(state, name) == [1, 2]
    assert isinstance(state, State)


def test_a_run_ends_and_is_resumed_whatever_its_attributes_are_called(process: Process) -> None:
    calls = []

    def train(state: Any) -> None:
        calls.append(dict(state.finished))
        state.finished["epoch"] = 1
        state.commit()

    for _ in range(2):
        state = process.state(URL, **dict.fromkeys(OURS, 0) | {"finished": {}})
        run(train)(state)
        process.end()
        process.world.past = Past()
    assert calls == [{}]  # the second start finds the run finished
    assert state.finished == {"epoch": 1}


@pytest.mark.parametrize("name", OURS)
def test_a_script_may_keep_what_is_not_tracked_under_such_a_name(process: Process, name: str) -> None:
    state = process.state(epoch=0)
    setattr(state, name, "mine")
    run(lambda state: state.commit())(state)
    assert getattr(state, name) == "mine"


def test_what_is_not_a_value_for_a_keyword_is_an_attribute(process: Process) -> None:
    state = process.state({"best": 1}, rng=[1, 2], guard=True, tensorboard=False)  # type: ignore[arg-type]
    state.sync()
    state.checkpoint["best"] = 2
    state.commit()
    state.checkpoint, state.rng, state.guard, state.tensorboard = {}, None, False, True
    state.restore()
    assert (state.checkpoint, state.rng, state.guard, state.tensorboard) == ({"best": 2}, [1, 2], True, False)


def test_values_for_the_keywords_are_ours() -> None:
    given = {"checkpoint": "file:///x", "rng": "store", "guard": None, "tensorboard": "logs"}
    assert _divide(given) == (dict.fromkeys(_TAKES) | given, {})


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


def test_a_default_of_a_subclass_makes_way_for_the_attribute(process: Process) -> None:
    class Default(State):
        epoch = 0
        note = "mine"

        def best(self) -> None: ...

    attributes = {"epoch": 1, "best": 2}
    state: Any = Default(process.framework, process.world, config=process.config, attributes=attributes)
    state.sync()
    state.epoch = state.best = 3
    state.commit()
    state.epoch = state.best = 4
    state.restore()
    assert (state.epoch, state.best, state.note) == (3, 3, "mine")


def test_a_property_of_a_subclass_is_not_an_attribute(process: Process) -> None:
    class Mine(State):
        @property
        def epoch(self) -> int:
            return 0

    with pytest.raises(ConfigError, match=r"^state\.epoch: "):
        Mine(process.framework, process.world, config=process.config, attributes={"epoch": 1})


@pytest.mark.parametrize("name", ["_not_durable", "_around"])
def test_a_method_of_a_subclass_by_a_name_of_our_own_inside_is_refused(process: Process, name: str) -> None:
    mine = type("Mine", (State,), {"__module__": __name__, name: lambda self: None})
    with pytest.raises(ConfigError, match=rf"^Mine\.{name}: "):
        mine(process.framework, process.world, config=process.config, attributes={})


def test_a_name_of_the_states_own_inside_is_refused_when_it_is_set(process: Process) -> None:
    with pytest.raises(ConfigError, match=r"^state\._session: "):
        process.state(epoch=0)._session = {}  # type: ignore[assignment]
