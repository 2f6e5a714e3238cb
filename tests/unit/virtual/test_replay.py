"""Parts that two processes compute: wrong gradients are found, and nothing else changes."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.errors import ConfigError
from hvdrecover.guard.settings import Guard
from hvdrecover.state.rank_local import PerRank
from hvdrecover.state.run import run
from hvdrecover.virtual.ranks import VirtualRanks
from hvdrecover.virtual.replay import judge, plan
from hvdrecover.virtual.shares import run_of
from tests.fakes.framework import FakeModel, FakeSampler
from tests.fakes.world import FakeJob, FakeWorld, fail_at
from tests.unit.state.jobs import Process, initialised, on_ranks
from tests.unit.virtual import test_runs
from tests.unit.virtual.test_runs import SAMPLES, SIZE, results

# -- decisions ----------------------------------------------------------------------------------------------


def test_a_share_of_the_steps_is_replayed() -> None:
    replayed = [step for step in range(20_000) if plan(7, step, (2, 2), 0.01, calibrate=False)]
    assert 150 < len(replayed) < 250
    assert all(plan(7, step, (2, 2), 1.0, calibrate=False) for step in range(100))
    assert not any(plan(7, step, (2, 2), 0.0, calibrate=False) for step in range(100))
    assert replayed != [step for step in range(20_000) if plan(8, step, (2, 2), 0.01, calibrate=False)]


@pytest.mark.parametrize("counts", [(2, 2), (3, 0, 2), (1, 1, 1, 1), (0, 5), (4, 1, 0, 0)])
def test_processes_are_checked_by_their_last_part_and_by_others(counts: tuple[int, ...]) -> None:
    owners: Counter[int] = Counter()
    spares = {process for process, count in enumerate(counts) if not count}
    for step in range(3000):
        found = plan(1, step, counts, 1.0, calibrate=False)
        assert found is not None
        assert found.rank == run_of(counts, found.owner)[-1]
        (other,) = found.others
        assert other != found.owner
        assert other in spares or not spares - {found.owner}
        owners[found.owner] += 1
    for process, count in enumerate(counts):  # as often as they have work to do
        assert owners[process] == pytest.approx(3000 * count / sum(counts), rel=0.15)


def test_a_lone_process_checks_itself_and_all_calibrate() -> None:
    alone = plan(1, 5, (4,), 1.0, calibrate=False)
    assert alone is not None
    assert (alone.owner, alone.others) == (0, (0,))
    first = plan(1, 5, (2, 1, 1), 0.0, calibrate=True)
    assert first is not None
    assert {first.owner, *first.others} == {0, 1, 2}


def runs(*digests: tuple[int, str]) -> list[tuple[int, tuple[str, ...]]]:
    return [(process, (digest, "same")) for process, digest in digests]


@pytest.mark.parametrize(
    ("ballots", "right", "wrong", "tied"),
    [
        ([(0, "a"), (1, "b"), (2, "a")], {0, 2}, {1}, False),
        ([(0, "a"), (1, "b"), (2, "b")], {1, 2}, {0}, False),
        ([(0, "a"), (0, "b"), (1, "b"), (1, "b")], {0, 1}, {0}, False),
        ([(0, "a"), (0, "a"), (1, "b"), (1, "b")], {0}, {1}, True),
        ([(0, "a"), (0, "b"), (0, "b")], {0}, {0}, False),
    ],
)
def test_computations_vote(
    ballots: list[tuple[int, str]], right: set[int], wrong: set[int], tied: bool
) -> None:
    result, unlike = judge(runs(*ballots), calibrates=False)
    assert {ballots[each][0] for each in result.right} == right
    assert {ballots[each][0] for each in result.wrong} == wrong
    assert (result.tied, unlike) == (tied, False)


def test_no_fault() -> None:
    _, every_time_another = judge(runs((0, "a"), (1, "b"), (2, "c")), calibrates=False)
    _, other_kinds = judge(runs((0, "a"), (0, "a"), (1, "b"), (1, "b")), calibrates=True)
    _, once = judge(runs((0, "a"), (0, "b"), (1, "b"), (1, "b")), calibrates=True)
    assert every_time_another
    assert other_kinds
    assert not once


# -- jobs ---------------------------------------------------------------------------------------------------


def bytes_of(numbers: np.ndarray[Any, Any]) -> Any:
    """The gradients of one computation."""
    return [numbers[place : place + 1].view(np.uint8) for place in range(2)]


Fault = Callable[[FakeWorld, VirtualRanks], bool]
"""Returns whether this computation goes wrong."""


class Carrier(test_runs.Carrier):
    """One that replays; and makes mistakes."""

    def __init__(self, world: FakeWorld, fault: Fault) -> None:
        super().__init__(world)
        self._fault = fault
        self.ranks: Any = None
        self._hold: int | None = None
        self._held = np.zeros(2)
        self._aside = np.zeros(2)

    def begin(self, counts: Any, process: int) -> None:
        super().begin(counts, process)
        self._hold = None

    def add(self, gradient: np.ndarray[Any, Any]) -> None:
        if self._fault(self._world, self.ranks):
            gradient = gradient * 2
        if self.ranks.replaying:
            self._aside += gradient
        else:
            super().add(gradient)

    def part_ends(self) -> None:
        if self._rank == self._hold:
            self._held = self._leaves[self._rank].copy()
            self._leaves[self._rank] = np.nan  # no process has it yet

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec("x", "F64", (1,)), TensorSpec("y", "F64", (1,))]

    def hold(self, rank: int) -> None:
        self._hold = rank

    def held(self) -> Any:
        return bytes_of(self._held)

    def release(self, data: Any) -> None:
        self._leaves[self._hold] = [next(data).view(np.float64)[0] for _ in range(2)]

    def replayed(self) -> Any:
        found, self._aside = self._aside, np.zeros(2)
        return bytes_of(found)

    def packed(self, value: Any) -> bytes:
        return pickle.dumps(value)


class Script(test_runs.Script):
    """The same training with a guard."""

    def __init__(self, fault: Fault = lambda world, ranks: False, **guard: Any) -> None:
        super().__init__()
        self.fault = fault
        self.guard = Guard(**{"replay": 1.0, **guard})

    def _script(self, process: Process) -> Any:
        carrier = Carrier(process.world, self.fault)
        ranks = carrier.ranks = test_runs.virtual(carrier)
        state = process.state(
            virtual=ranks,
            guard=self.guard,
            model=FakeModel(w=[0.0, 0.0]),
            sampler=FakeSampler(SAMPLES, seed=3),
            seen=PerRank([]),
            epoch=0,
            step=0,
        )
        run(lambda state: self._train(process, state, ranks, carrier))(state)
        assert ranks.replay is not None
        seen = {rank: tuple(state.seen.of(rank)) for rank in ranks.carried.ranks}
        return state.model.weights["w"].tobytes(), state.step, seen, ranks.replay.is_on


def trained(size: int, faults: Any = (), **options: Any) -> Any:
    """Return what came of a job, as `results` does; and whether replays were on at its end."""
    ended = FakeJob(initialised(Script(**options)._script), size, faults).run()
    for each in ended:
        if each.error is not None and each.status != "killed":
            raise each.error
    left = [each.result for each in ended if each.status == "returned"]
    assert len({(weights, steps, is_on) for weights, steps, _, is_on in left}) == 1
    weights, steps, _, is_on = left[0]
    return (weights, steps, {rank: each for row in left for rank, each in row[2].items()}), is_on


@pytest.fixture(scope="module")
def expected() -> Any:
    return results(SIZE)


def at(step: int, process: int, *, replaying: bool) -> Fault:
    """One mistake, in the step's part that is compared."""
    made = []

    def fault(world: FakeWorld, ranks: VirtualRanks) -> bool:
        checked = plan(ranks._own.random.seed, step, ranks.counts, 1.0, calibrate=False)
        assert checked is not None
        now = (ranks.steps, world.rank(), ranks.rank(), ranks.replaying)
        if made or now != (step, process, checked.rank, replaying):
            return False
        made.append(now)
        return True

    return fault


def pair(step: int, size: int) -> tuple[int, int]:
    """The process whose part is replayed in a step, and who replays it."""
    seeds: list[int] = []

    def note(world: FakeWorld, ranks: VirtualRanks) -> bool:
        seeds.append(ranks._own.random.seed)
        return False

    trained(size, fault=note)
    counts = tuple(SIZE // size + (process < SIZE % size) for process in range(size))
    found = plan(seeds[0], step, counts, 1.0, calibrate=False)
    assert found is not None
    return found.owner, found.others[0]


def test_processes_of_other_kinds_turn_it_off(expected: Any) -> None:
    found, is_on = trained(2, fault=lambda world, ranks: world.rank() == 1, on_divergence="raise")
    assert not is_on
    assert found[0] != expected[0]


def test_a_process_lost_at_any_collective(expected: Any) -> None:
    for nth in range(1, 40, 2):
        fault = fail_at(nth % 3, "", nth, action="kill", replacement="in_place")
        assert trained(3, [fault]) == (expected, True), nth


# -- what is refused ----------------------------------------------------------------------------------------


def test_jobs_without_virtual_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^replay: .*virtual ranks"):
        on_ranks(1, lambda process: process.state(guard=Guard(replay=0.1), epoch=0))


def test_frameworks_that_can_not_are_refused() -> None:
    def body(process: Process) -> None:
        ranks = test_runs.virtual(test_runs.Carrier(process.world))
        process.state(guard=Guard(replay=0.1), virtual=ranks, epoch=0)

    with pytest.raises(ConfigError, match=r"^replay: .*Guard\(replay="):
        on_ranks(1, body)
