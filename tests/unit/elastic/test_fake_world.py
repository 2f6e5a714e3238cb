"""The fake is only as good as what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.errors import RemovedError, RendezvousError
from tests.fakes.world import (
    AT_RENDEZVOUS,
    FakeJob,
    FakeWorld,
    Killed,
    Replacement,
    alone,
    change_at,
    current_world,
    fail_at,
)


def test_all_ranks_get_everybodys_values() -> None:
    def main(world: FakeWorld) -> list[list[int]]:
        world.init()
        return world.allgather([world.rank(), 7], "values").tolist()

    assert FakeJob(main, 3).results() == [[[0, 7], [1, 7], [2, 7]]] * 3


def test_a_broadcast_fills_the_buffer_in_place() -> None:
    def main(world: FakeWorld) -> list[int]:
        world.init()
        buffer = np.full(3, world.rank(), dtype=np.uint8)
        world.broadcast(buffer, 1, "buffer")
        return buffer.tolist()

    assert FakeJob(main, 2).results() == [[1, 1, 1]] * 2


def test_collectives_of_different_names_fail_the_test() -> None:
    def main(world: FakeWorld) -> None:
        world.init()
        world.allgather([1], f"name.{world.rank()}")

    with pytest.raises(AssertionError, match=r"others are in .*name\."):
        FakeJob(main, 2).run()


def test_buffers_of_different_lengths_fail_the_test() -> None:
    def main(world: FakeWorld) -> None:
        world.init()
        world.broadcast(np.zeros(world.rank() + 1, dtype=np.uint8), 0, "buffer")

    with pytest.raises(AssertionError, match="others are in"):
        FakeJob(main, 2).run()


def test_waiting_for_a_rank_that_has_returned_fails_the_test() -> None:
    def main(world: FakeWorld) -> None:
        world.init()
        if world.rank() == 0:
            world.allgather([1], "lonely")

    with pytest.raises(AssertionError, match="rank 1 has returned"):
        FakeJob(main, 2).run()


def test_a_fault_that_never_happens_fails_the_test() -> None:
    def main(world: FakeWorld) -> None:
        world.init()

    with pytest.raises(AssertionError, match="never happened"):
        FakeJob(main, 1, [fail_at(0, "nothing")]).run()


def test_a_lost_rank_breaks_the_collectives_of_the_others_until_their_next_rendezvous() -> None:
    def main(world: FakeWorld) -> tuple[int, int]:
        world.init()
        for _ in range(2):
            with pytest.raises(HorovodInternalError):
                world.allgather([1], "values")
        world.shutdown()
        world.init()
        return world.rank(), len(world.allgather([1], "values"))

    assert FakeJob(main, 3, [fail_at(1, "values")]).results() == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("replacement", "newcomers"), [("in_place", [True, False]), ("appended", [False, True])]
)
def test_a_lost_rank_is_replaced_where_the_fault_says(replacement: str, newcomers: list[bool]) -> None:
    def main(world: FakeWorld) -> bool:
        world.init()
        if not world.newcomer:
            with pytest.raises(HorovodInternalError):
                world.allgather([1], "values")
            world.shutdown()
            world.init()
        world.allgather([1], "after")
        return world.newcomer

    faults = [fail_at(0, "values", replacement=replacement)]  # type: ignore[arg-type]
    assert FakeJob(main, 2, faults).results() == newcomers


def test_a_rank_that_is_cut_off_fails_alone() -> None:
    def main(world: FakeWorld) -> bool:
        world.init()
        try:
            world.allgather([1], "values")
        except HorovodInternalError:
            return True
        return False

    assert FakeJob(main, 3, [fail_at(1, "values", action="cut")]).results() == [False, True, False]


def test_a_change_of_hosts_is_reported_to_all_and_takes_effect_at_the_next_rendezvous() -> None:
    def main(world: FakeWorld) -> int:
        heard: list[int] = []
        world.told.append(lambda _, update: heard.append(update))
        world.init()
        if not world.newcomer:
            assert len(world.allgather([1], "values")) == 2
            assert heard == [1]
            world.shutdown()
            world.init()
        return len(world.allgather([1], "after"))

    outcomes = FakeJob(main, 2, [change_at(0, "values", add=2, remove=[1])]).run()
    assert [outcome.status for outcome in outcomes] == ["returned"] * 3 + ["left"]
    assert [outcome.result for outcome in outcomes[:3]] == [3, 3, 3]


def test_a_rank_that_was_taken_out_is_told_so_when_it_comes_to_a_rendezvous() -> None:
    def main(world: FakeWorld) -> str:
        world.init()
        world.allgather([1], "values")
        world.shutdown()
        try:
            world.init()
        except RemovedError:
            return "removed"
        return "rejoined"

    outcomes = FakeJob(main, 2, [change_at(0, "values", remove=[1])]).run()
    assert [outcome.result for outcome in outcomes] == ["rejoined", "removed"]


@pytest.mark.parametrize("replacement", ["none", "in_place", "appended"])
def test_a_rank_that_is_lost_at_a_rendezvous_fails_it_for_the_others(replacement: Replacement) -> None:
    def main(world: FakeWorld) -> tuple[bool, int]:
        world.init()
        if not world.newcomer:
            world.shutdown()
            with pytest.raises(RendezvousError):
                world.init()
            world.init()
        return world.newcomer, len(world.allgather([1], "values"))

    results = FakeJob(main, 3, [fail_at(1, AT_RENDEZVOUS, replacement=replacement)]).results()
    size = 2 if replacement == "none" else 3
    assert sorted(results) == [(False, size)] * 2 + [(True, size)] * (size - 2)


def test_a_rendezvous_is_no_collective_to_faults() -> None:
    def main(world: FakeWorld) -> int:
        world.init()
        world.shutdown()
        world.init()
        return len(world.allgather([1], "values"))

    assert isinstance(FakeJob(main, 2, [fail_at(1, "")]).run()[0].error, HorovodInternalError)


def test_killing_all_ends_all() -> None:
    def main(world: FakeWorld) -> None:
        world.init()
        while True:
            world.allgather([1], "values")

    outcomes = FakeJob(main, 3, [fail_at(2, "values", 4, action="kill_all")]).run()
    assert [outcome.status for outcome in outcomes] == ["killed"] * 3


@pytest.mark.parametrize("turn", ["a test", "the test after it"])
def test_no_test_begins_as_the_process_of_an_earlier_one(turn: str) -> None:
    assert current_world() is None
    world = alone()
    assert current_world() is world


def test_a_lone_process_can_be_killed_as_well() -> None:
    world = alone(fail_at(0, "step", 2))
    world.init()
    world.here("step")
    with pytest.raises(Killed):
        world.here("step")
