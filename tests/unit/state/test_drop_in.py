"""Horovod's classes of states, and subclasses with methods of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from horovod.common.elastic import ObjectState as HorovodsObjectState

from hvdrecover.errors import ConfigError
from hvdrecover.state import state as states
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, Fault
from tests.unit.state.jobs import CONFIG, URL, Process, initialised


class Calling(State):
    """Notes when its methods are called, and what they find. If it ``passes_on``, they call ``super()``."""

    def __init__(
        self, process: Process, calls: list[Any], *, passes_on: bool = True, checkpoint: str | None = None
    ) -> None:
        self._calls, self._passes_on = calls, passes_on
        super().__init__(
            process.framework,
            process.world,
            checkpoint=checkpoint,
            config=CONFIG,
            clock=process.clock,
            attributes={"model": FakeModel(w=0.0), "step": 0},
        )

    def save(self) -> None:
        self._note("save")
        if self._passes_on:
            super().save()

    def restore(self) -> None:
        self._note("restore")
        if self._passes_on:
            super().restore()

    def sync(self) -> None:
        self._note("sync")
        if self._passes_on:
            super().sync()

    def reset(self) -> None:
        self._note("reset")

    def _note(self, verb: str) -> None:
        self._calls.append((verb, self.step, float(self.model.weights["w"])))


@pytest.mark.parametrize("passes_on", [True, False])
def test_methods_of_a_subclass_are_called_where_horovod_calls_them_and_ours_is_done_once(
    passes_on: bool,
) -> None:
    notes: dict[str, list[Any]] = {}
    ends = []

    def body(process: Process) -> None:
        calls = notes.setdefault("old" if not process.world.newcomer else "new", [])
        state = Calling(process, calls if process.world.place == 0 else [], passes_on=passes_on)
        state.register_reset_callbacks([lambda: state._note("callback")])

        def train(state: Any) -> None:
            while state.step < 4:
                process.world.allreduce(np.zeros(1))
                state.step += 1
                state.model.weights["w"][...] += 1.0
                if state.step % 2 == 0:
                    state.commit()
            ends.append((state.last_commit.generation, state.last_commit.commit))

        run(train)(state)

    FakeJob(initialised(body), 2, [Fault(1, "gradient", 4)]).results()
    assert notes["old"] == [
        ("sync", 0, 0.0),
        ("save", 2, 2.0),
        ("restore", 3, 3.0),  # what super() does there has yet to come
        ("reset", 2, 2.0),
        ("callback", 2, 2.0),
        ("sync", 2, 2.0),
        ("save", 4, 4.0),
    ]
    assert ends == [(2, 2)]


def test_a_line_says_what_durable_commits_lack(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    run(lambda state: None)(Calling(process, []))
    assert "durable" not in caplog.text
    state = Calling(process, [], checkpoint=URL)
    process.states.append(state)
    run(lambda state: None)(state)
    assert (
        "Calling has its own save() and restore(): what it keeps there by itself is not part of"
        in caplog.text
    )


class Own(states.HorovodState):
    """Keeps its counter by itself, as Horovod's interface asks for."""

    process: Process

    def __init__(self, broadcast: Callable[..., Any]) -> None:
        super().__init__(broadcast, lambda: 0)
        self.step = 0
        self.save()

    def _parts(self) -> Any:  # type: ignore[override]
        return self.process.framework, self.process.world

    def save(self) -> None:
        self.saved = self.step

    def restore(self) -> None:
        self.step = self.saved

    def sync(self) -> None:
        self.saved = self._bcast_object(self.saved)
        self.restore()


def broadcast_by(process: Process) -> Callable[..., Any]:
    def broadcast_object(value: Any, root_rank: int = 0) -> Any:
        buffer = np.array([value], np.uint8)
        process.world.broadcast(buffer, root_rank, "object")
        return int(buffer[0])

    return broadcast_object


def test_a_state_that_keeps_everything_by_itself_survives_rank_0() -> None:
    entries = []

    def body(process: Process) -> int:
        state = type("Mine", (Own,), {"process": process})(broadcast_by(process))

        def train(state: Any) -> None:
            entries.append(state.step)
            while state.step < 4:
                process.world.allreduce(np.zeros(1))
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()

        run(train)(state)
        return int(state.step)

    fault = Fault(0, "gradient", 4, replacement="in_place")
    assert FakeJob(initialised(body), 2, [fault]).results() == [4, 4]
    assert sorted(entries) == [0, 0, 2, 2]


class Objects(states.ObjectState):
    """With the framework of a test."""

    process: Process

    def _parts(self) -> Any:  # type: ignore[override]
        return self.process.framework, self.process.world


def test_a_state_of_objects_takes_horovods_arguments_and_leaves_generators_alone(
    process: Process, roots: FakeRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", URL)
    kind = type("Mine", (Objects,), {"process": process})
    state = kind(broadcast_by(process), lambda: 7, epoch=0, seen=[])
    process.states.append(state)
    assert state._rank() == 7

    def train(state: Any) -> None:
        streams = process.generator.state
        state.epoch, state.seen = 1, [3]
        state.commit()
        assert process.generator.state == streams

    run(train)(state)
    state._session.durable.retire()
    again = kind(broadcast_by(process), lambda: 7, epoch=0, seen=[])
    process.states.append(again)
    again.sync()
    assert (again.epoch, again.seen) == (1, [3])


def test_a_state_of_horovods_own_is_refused() -> None:
    state = HorovodsObjectState(lambda value: value, lambda: 0, epoch=0)
    with pytest.raises(
        ConfigError, match=r" horovod\.common\.elastic\.ObjectState .* hvdrecover\.torch\.elastic "
    ):
        run(lambda state: None)(state)  # type: ignore[arg-type]
