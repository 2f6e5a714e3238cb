"""The memory that a commit goes to."""

from __future__ import annotations

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.commits.own import Own
from hvdrecover.elastic.commits.randomness import Generators
from hvdrecover.elastic.context import Place
from hvdrecover.elastic.ranks import Ranks
from tests.fakes.framework import FakeFramework
from tests.fakes.world import FakeJob, FakeWorld


class Training:
    """A state of one array, committed to memory."""

    def __init__(self) -> None:
        self.contents = Contents(FakeFramework(), {"w": np.zeros(3)}, set())
        own = Own(FakeFramework(), {}, Generators(FakeFramework(), "reseed"))
        place = Place(FakeWorld(FakeJob(lambda world: None, 1), 0.0, newcomer=False), Ranks())
        self.memory = Memory(self.contents, own, (), place, {})
        self.number = 0

    def commit(self, in_flight: Snapshot | None = None) -> Snapshot:
        self.number += 1
        self.contents.values["w"] = np.full(3, float(self.number))
        self.memory.in_flight = lambda: in_flight
        return self.memory.capture(CommitId(1, self.number))

    def commit_unchanged(self, in_flight: Snapshot | None = None) -> Snapshot:
        self.number += 1
        self.memory.in_flight = lambda: in_flight
        return self.memory.commit()


def arena(snapshot: Snapshot) -> Arena:
    return snapshot.arenas["w"]


def value(snapshot: Snapshot) -> float:
    return float(arena(snapshot).bytes_of("value").view(np.float64)[0])


def test_the_newest_is_overwritten_while_nothing_is_in_flight() -> None:
    training = Training()
    first = arena(training.commit())
    second = training.commit()
    assert arena(second) is first
    assert value(second) == 2.0


def test_two_arenas_are_used_by_turns_if_each_is_being_written() -> None:
    training = Training()
    snapshots = [training.commit()]
    for _ in range(5):
        snapshots.append(training.commit(in_flight=snapshots[-1]))
        assert [value(each) for each in snapshots[-2:]] == [training.number - 1, training.number]
    assert len({arena(snapshot) for snapshot in snapshots}) == 2


def test_memory_is_offered_back_when_a_write_ends_unless_the_newest_commit_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered: list[Arena] = []
    monkeypatch.setattr(Arena, "offer_back", lambda arena: offered.append(arena))
    training = Training()
    first = training.commit()
    training.memory.arenas.release(first)
    training.memory.arenas.release(training.commit_unchanged(in_flight=first))
    assert offered == []
    newest = training.commit(in_flight=first)
    training.memory.arenas.release(first)
    assert offered == [arena(first)]
    training.memory.arenas.release(newest)
    assert offered == [arena(first)]


def test_one_in_flight_that_was_overtaken_long_ago_is_left_alone() -> None:
    training = Training()
    old = training.commit()
    for _ in range(4):
        training.commit(in_flight=old)
        assert value(old) == 1.0


def test_what_a_writer_that_was_left_behind_may_be_writing_is_never_overwritten() -> None:
    training = Training()
    left = training.commit()
    training.memory.arenas.abandon(left)
    newest = training.commit()
    for _ in range(4):
        newest = training.commit(in_flight=newest)
        assert value(left) == 1.0
    assert arena(left) not in training.memory.arenas._spare.values()


def test_memory_that_was_abandoned_is_let_go_in_the_end() -> None:
    training = Training()
    training.memory.arenas.abandon(training.commit())
    training.memory.adopt(training.commit())
    assert len(training.memory.arenas._abandoned) == 0


def test_what_has_not_changed_is_not_copied_and_never_overwritten_while_it_is_written() -> None:
    training = Training()
    first = training.commit()
    again = training.commit_unchanged(in_flight=first)
    assert arena(again) is arena(first)
    newest = training.commit(in_flight=first)
    assert (value(first), value(again), value(newest)) == (1.0, 1.0, 3.0)
    last = training.commit_unchanged(in_flight=first)
    assert arena(last) is arena(newest) and last.id.commit == 4
    assert value(training.commit(in_flight=last)) == 5.0
    assert value(last) == 3.0
