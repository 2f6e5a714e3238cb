"""Jobs of virtual ranks end with the same bits, whoever carries them out and whatever happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from hvdrecover.errors import ConfigError, StepError
from hvdrecover.state.rank_local import PerRank
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from hvdrecover.virtual.exchange import RunningSum
from hvdrecover.virtual.ranks import Counts, Policy, VirtualRanks, virtual_rank, virtual_size
from hvdrecover.virtual.steps import Buffers, Feed, Step, deal, steps
from tests.fakes.framework import FakeModel, FakeSampler
from tests.fakes.world import Action, FakeJob, FakeWorld, Fault, Replacement
from tests.unit.state.jobs import Process, initialised, on_ranks

SIZE = 4
BATCH = 2
SAMPLES = 27  # an uneven tail


class NoBuffers(Buffers):
    """Models without buffers."""

    read = write = same = cast(Any, None)  # not called

    def names(self) -> list[str]:
        return []


def virtual(carrier: Any, policy: Policy | None = "equal", size: int = SIZE) -> VirtualRanks:
    return VirtualRanks(size, policy, NoBuffers(), [carrier])


class Carrier:
    """Sums what the script adds in the order of the tree."""

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self.begin()

    def begin(self) -> None:
        self._leaves = np.zeros((SIZE, 2))
        self._part = np.zeros(2)

    def add(self, gradient: np.ndarray[Any, Any]) -> None:
        self._part += gradient

    def part_ends(self, rank: int) -> None:
        self._leaves[rank], self._part = self._part, np.zeros(2)

    def finish(self, counts: Counts, process: int) -> None:
        leaves = self._world.allreduce(self._leaves)  # others send zeros, so nothing is rounded
        total = RunningSum(SIZE, np.add)
        for rank, leaf in enumerate(leaves):
            total.push(range(rank, rank + 1), leaf)
        (self.gradient,) = total.values

    abandon = begin


def feed(sampler: FakeSampler) -> Feed:
    """Samples of an elastic sampler."""
    return lambda ranks: deal(sampler.order, BATCH, ranks, lambda parts: (each for _, _, each in parts))


class Script:
    """Two epochs with noise, a count for each virtual rank, and a commit every second step."""

    def __init__(self, checkpoint: str | None = None, policy: Policy = "equal", size: int = SIZE) -> None:
        self.checkpoint, self.policy, self.size = checkpoint, policy, size
        self.samples: list[int] = []

    def __call__(self, world: FakeWorld) -> Any:
        return initialised(self._script)(world)

    def _script(self, process: Process) -> Any:
        carrier = Carrier(process.world)
        ranks = virtual(carrier, self.policy, self.size)
        state = process.state(
            self.checkpoint,
            virtual=ranks,
            model=FakeModel(w=[0.0, 0.0]),
            sampler=FakeSampler(SAMPLES, seed=3),
            seen=PerRank([]),
            epoch=0,
            step=0,
        )
        run(lambda state: self._train(process, state, ranks, carrier))(state)
        seen = {rank: tuple(state.seen.of(rank)) for rank in ranks.carried.ranks}
        return state.model.weights["w"].tobytes(), state.step, seen

    def _train(self, process: Process, state: State, ranks: VirtualRanks, carrier: Carrier) -> None:
        while state.epoch < 2:
            state.sampler.order.set_epoch(state.epoch)
            for step in steps(ranks, feed(state.sampler), Step):
                for batch in step:
                    noise = process.generator.uniform()
                    process.clock.advance(0.1 * (1 + 3 * process.world.rank()))
                    carrier.add(np.array([np.sin(batch).sum() * noise, noise / 3]))
                    state.seen.value.extend(batch.tolist())
                state.model.weights["w"] += np.tanh(carrier.gradient + process.generator.uniform())
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
            state.epoch += 1


def results(
    size: int, faults: list[Fault] | None = None, **options: Any
) -> tuple[bytes, int, dict[int, Any]]:
    """Return what all processes of a job have come to, which must be the same."""
    ended = [
        each for each in FakeJob(Script(**options), size, faults or []).run() if each.status == "returned"
    ]
    assert len({each.result[:2] for each in ended}) == 1
    weights, steps, _ = ended[0].result
    return weights, steps, {rank: seen for each in ended for rank, seen in each.result[2].items()}


@pytest.fixture(scope="module")
def expected() -> tuple[bytes, int, dict[int, Any]]:
    return results(SIZE)


def test_it_trains_on_each_sample(expected: tuple[bytes, int, dict[int, Any]]) -> None:
    _, steps, seen = expected
    assert steps == 8
    assert sorted({sample for each in seen.values() for sample in each}) == list(range(SAMPLES))
    assert len({tuple(each) for each in seen.values()}) == SIZE


@pytest.mark.parametrize("policy", ["equal", "by-speed"])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5])
def test_the_number_of_processes_and_their_shares_do_not_matter(
    processes: int, policy: Policy, expected: tuple[bytes, int, dict[int, Any]]
) -> None:
    assert results(processes, policy=policy) == expected


def test_shares_that_change_as_an_epoch_ends_leave_no_empty_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    results(2, policy="by-speed")
    assert "2 processes, 1 of them spare: 4 + 0" in caplog.text and "is empty" not in caplog.text


@pytest.mark.parametrize("replacement", ["none", "in_place"])
@pytest.mark.parametrize("action", ["kill", "kill_after"])
@pytest.mark.parametrize("processes", [2, 3])
def test_a_process_lost_at_any_collective(
    processes: int, action: Action, replacement: Replacement, expected: tuple[bytes, int, dict[int, Any]]
) -> None:
    for nth in range(1, 23, 2):
        fault = Fault(nth % processes, "", nth, action=action, replacement=replacement)
        assert results(processes, [fault]) == expected, nth


def test_hosts_come_and_go(expected: tuple[bytes, int, dict[int, Any]]) -> None:
    faults = [Fault(1, "gradient", 2, "change", add=2), Fault(1, "gradient", 4, "change", remove=(0, 2))]
    assert results(2, faults) == expected


@pytest.mark.parametrize("then", [1, 3, 4])
def test_a_whole_job_killed_and_started_with_other_processes(
    then: int, expected: tuple[bytes, int, dict[int, Any]]
) -> None:
    url = f"fake://virtual-{then}"
    FakeJob(Script(url), 2, [Fault(1, "hvdrecover.updates", 3, action="kill_all")]).run()
    assert results(then, checkpoint=url) == expected


# -- what is refused ----------------------------------------------------------------------------------------


def test_a_commit_of_another_number_of_virtual_ranks_is_refused() -> None:
    results(1, checkpoint="fake://of-four")
    (outcome,) = FakeJob(Script("fake://of-four", size=2), 1).run()
    assert isinstance(outcome.error, ConfigError)
    assert re.search("^virtual_ranks: .* has 4, .* 2.* virtual_ranks=4", str(outcome.error))


def test_a_commit_of_virtual_ranks_is_refused_by_a_state_without() -> None:
    def body(process: Process) -> None:
        for ranks in (virtual(Carrier(process.world)), None):
            state = process.state("fake://of-four", virtual=ranks, model=FakeModel(w=[0.0]))
            state.sync()
            state.flush()

    with pytest.raises(ConfigError, match=r"^virtual_ranks: .* has 4, .* none.* virtual_ranks=4"):
        on_ranks(1, body)


def loop(process: Process, body: Any) -> None:
    """Run a body on a state with virtual ranks, and an endless loop of steps."""
    carrier = Carrier(process.world)
    ranks = virtual(carrier)
    state = process.state(virtual=ranks, model=FakeModel(w=[0.0]), sampler=FakeSampler(SAMPLES))
    run(lambda state: body(state, steps(ranks, feed(state.sampler), Step)))(state)


def in_steps(call: Callable[[State, Step], object]) -> Callable[[State, Iterator[Step]], None]:
    """A loop that calls something instead of going through the parts."""

    def body(state: State, steps: Iterator[Step]) -> None:
        for step in steps:
            call(state, step)

    return body


def in_parts(call: Callable[[State], object]) -> Callable[[State, Iterator[Step]], None]:
    """A loop that calls something in each part."""
    return in_steps(lambda state, step: [call(state) for _ in step])


def asks_outside(state: State, step: Step) -> None:
    assert virtual_size() == SIZE
    assert [virtual_rank() for _ in step] == list(range(SIZE))
    virtual_rank()


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        (in_parts(lambda state: state.restore()), r"^state\.restore\(\): "),
        (in_parts(lambda state: state.commit()), r"^state\.steps\(\): .*commit .* step 0 "),
        (in_parts(lambda state: state.check_host_updates()), r"^state\.steps\(\): .*hosts .* step 0 "),
        (in_steps(lambda state, step: state.commit()), r"^state\.steps\(\): .*commit .* step 0 "),
        (in_steps(lambda state, step: next(iter(step))), r"^state\.steps\(\): .*next .* step 0 "),
        (in_steps(lambda state, step: None), r"^state\.steps\(\): .*passed"),
        (in_steps(lambda state, step: (list(step), list(step))), r"^state\.steps\(\): .*twice"),
        (in_steps(asks_outside), "^virtual_rank: "),
    ],
)
def test_loops_that_are_not_gone_through_as_they_must_be(body: Any, fact: str) -> None:
    with pytest.raises(StepError, match=fact):
        on_ranks(1, lambda process: loop(process, body))


def test_samples_of_a_step_that_ends_in_an_error_are_not_done() -> None:
    """A guard then leaves them out, from where the cursor is."""

    def body(state: State, steps: Iterator[Step]) -> None:
        list(next(steps))
        steps.close()  # type: ignore[attr-defined]  # as an error in the loop does
        assert state.sampler.order.done == 0

    on_ranks(1, lambda process: loop(process, body))
