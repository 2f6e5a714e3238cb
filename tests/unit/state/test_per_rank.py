"""Values of which each rank has its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdrecover.errors import MismatchError, PerRankError
from hvdrecover.state import contents
from hvdrecover.state.rank_local import OnResize, PerRank, Randomness
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeFramework, FakeGenerator, FakeModel, FakeSchedule
from tests.fakes.root import FakeRoots
from tests.fakes.world import Action, FakeJob, FakeWorld, Fault, Replacement
from tests.unit.state.jobs import URL, Process, initialised, on_ranks

Values = dict[int, Any]


class Shard:
    """One rank's share of an endless data set; its state has a number, an array and bytes."""

    def __init__(self, rank: int, size: int, generator: FakeGenerator) -> None:
        self.rank, self.size = rank, size
        self.generator = generator
        self.done = 0
        self.seen = np.zeros(3)
        self.loaded = 0
        self.begun = False

    def __iter__(self) -> Iterator[float]:
        self.generator.draw()  # as a loader does that seeds its workers
        self.begun = True
        return self._numbers()

    def _numbers(self) -> Iterator[float]:
        while True:
            self.done += 1
            self.seen[self.done % 3] = self.done
            yield float(self.rank + self.size * (self.done - 1))

    def state_dict(self) -> dict[str, Any]:
        if not self.begun:
            self.generator.draw()  # as torchdata's loader does, which makes an iterator then
        return {"done": self.done, "seen": self.seen, "raw": bytes([self.rank])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["raw"] == bytes([self.rank])  # never another rank's
        self.done, self.seen = state["done"], state["seen"].copy()
        self.loaded += 1
        self.begun = False


class Script:
    """Trains on numbers of a stream for each rank, with noise, and sums up a loss of its own."""

    def __init__(
        self,
        checkpoint: str | None = None,
        rng: Randomness = "reseed",
        steps: int = 6,
        on_resize: OnResize | None = None,
    ) -> None:
        self.checkpoint, self.rng, self.steps, self.on_resize = checkpoint, rng, steps, on_resize

    def __call__(self, world: FakeWorld) -> Any:
        return initialised(self._script)(world)

    def _script(self, process: Process) -> Any:
        world = process.world
        process.generator.state = 100 + world.rank()
        state = process.state(
            self.checkpoint,
            rng=self.rng,
            model=FakeModel(w=[0.0]),
            step=0,
            data=PerRank(Shard(world.rank(), world.size(), process.generator), self.on_resize),
            losses=PerRank([0.0], self.on_resize),
        )
        run(lambda state: self._train(process, state))(state)
        return {
            "w": state.model.weights["w"].tobytes(),
            "losses": state.losses.value,
            "data": (state.data.value.done, state.data.value.seen.tobytes()),
            "stream": process.generator.state,
        }

    def _train(self, process: Process, state: State) -> None:
        while state.step < self.steps:
            for number in state.data:
                noisy = number + process.generator.uniform()
                state.losses.value.append(state.losses.value[-1] + noisy)
                state.model.weights["w"] += process.world.allreduce(np.array([noisy]))
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
                if state.step % 3 == 0:
                    break  # an epoch ends


def undisturbed(rng: Randomness, checkpoint: str | None = None) -> tuple[list[Any], int]:
    """Return the results of an undisturbed run, and how many collectives each rank takes part in."""
    outcomes = FakeJob(Script(checkpoint, rng), 2).run()
    return [outcome.result for outcome in outcomes], outcomes[0].world.visits


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["kill", "kill_after", "cut"])
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("rng", ["reseed", "store"])
def test_a_rank_lost_at_any_collective_gets_its_very_own_back(
    rng: Randomness, rank: int, action: Action
) -> None:
    expected, visits = undisturbed(rng)
    replacement: Replacement = "none" if action == "cut" else "in_place"
    for nth in range(1, visits + (action == "kill")):  # an error at the last visit shows nowhere
        fault = Fault(rank, "", nth, action=action, replacement=replacement)
        assert FakeJob(Script(rng=rng), 2, [fault]).results() == expected, nth


@pytest.mark.parametrize("rng", ["reseed", "store"])
def test_the_whole_job_killed_at_any_collective(rng: Randomness) -> None:
    expected, visits = undisturbed(rng, "fake://undisturbed")
    for nth in range(1, visits + 1):
        url = f"fake://killed-{rng}-{nth}"
        FakeJob(Script(url, rng), 2, [Fault(nth % 2, "", nth, action="kill_all")]).run()
        assert FakeJob(Script(url, rng), 2).results() == expected, nth


# -- other ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["commit", "check_host_updates"])
@pytest.mark.parametrize(("ahead", "remove", "size"), [(False, (), 3), (True, (), 3), (False, (1,), 2)])
@pytest.mark.parametrize("replaced", [False, True])
def test_with_other_ranks_the_script_says_what_each_resumes_from(
    verb: str, ahead: bool, remove: tuple[int, ...], size: int, replaced: bool
) -> None:
    """``replaced``: a reset callback makes another loader, which gets the state of the commit."""
    seen: Values = {}

    def on_resize(states: list[Any], rank: int, size: int) -> Any:
        seen[rank] = (states, size)
        return {"steps": -1}

    def main(world: FakeWorld) -> Any:
        world.init()
        state = Process(world).state(step=0, data=PerRank(FakeSchedule(), on_resize))

        @run
        def training(state: State) -> Any:
            if state.step == 0:
                state.step, state.data.value.steps = 1, 10 + world.rank()
                world.allgather([0], "change")
                getattr(state, verb)()
            return state.data.value.steps

        if replaced:
            state.register_reset_callbacks([lambda: setattr(state.data, "value", FakeSchedule())])
        return training(state)

    fault = Fault(0, "change", action="change", add=1, remove=remove, ahead=ahead)
    results = FakeJob(main, 2, [fault]).results()
    if size == 2:  # as many as before: the new one takes over from the one that left
        assert (results, seen) == ([10, 11], {})
    else:
        assert results == [-1] * 3
        assert seen == {rank: ([{"steps": 10}, {"steps": 11}], 3) for rank in range(3)}


def test_without_a_word_of_the_script_it_is_an_error_on_all_ranks() -> None:
    outcomes = FakeJob(Script(), 2, [Fault(0, "gradient", action="change", add=1)]).run()
    assert [type(each.error) for each in outcomes] == [PerRankError] * 3
    assert re.search("2 ranks .* rank 2 of 3", str(outcomes[2].error))
    assert "on_resize=" in str(outcomes[0].error)


def test_a_finished_run_is_finished_for_any_number_of_ranks() -> None:
    FakeJob(Script(URL), 2).results()
    assert len(FakeJob(Script(URL), 3).results()) == 3


# -- what a commit holds ----------------------------------------------------------------------------------


def test_a_durable_commit_shows_all_ranks_states_by_rank(
    roots: FakeRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdrecover.state.contents.open_storage", roots.open)
    FakeJob(Script(URL), 2).results()
    loaded = contents.load(FakeFramework(), URL, {"model": FakeModel(w=[0.0])}, None, strict=True)
    losses = loaded.objects["losses"]
    assert [losses[rank] for rank in range(2)] == [each["losses"] for each in undisturbed("reseed")[0]]
    with pytest.raises(MismatchError, match=r"  data: .*each rank.*all ranks"):
        contents.load(FakeFramework(), URL, {"data": FakeSchedule()}, None, strict=True)


@pytest.mark.parametrize("per_rank", [True, False])
def test_a_value_of_a_rank_and_one_of_all_ranks_are_not_the_same(per_rank: bool) -> None:
    def commit(process: Process) -> None:
        state = process.state(URL, losses=PerRank(1) if per_rank else 1)
        state.sync()
        state.commit()
        state.flush()

    def resume(process: Process) -> list[str]:
        state = process.state(URL, losses=2 if per_rank else PerRank(2))
        with pytest.raises(MismatchError) as error:
            state.sync()
        return error.value.differences

    on_ranks(1, commit)
    sides = (
        ("one for each rank", "one for all ranks") if per_rank else ("one for all ranks", "one for each rank")
    )
    assert on_ranks(1, resume) == [[f"losses: {sides[0]} in the commit, {sides[1]} in this state"]]
