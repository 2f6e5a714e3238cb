"""Numbers that are not finite: raised, skipped or rolled back, by all ranks alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdrecover.errors import ConfigError, NumericsError
from hvdrecover.guard import Guard, Numerics
from hvdrecover.guard.numbers import WINDOW
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeLoader, FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import Fault
from tests.unit.state.jobs import Process, on_ranks

SAMPLES = 24


class Script:
    """A training function whose bad sample makes gradients that are not finite."""

    def __init__(self, guard: Guard, bad: set[int]) -> None:
        self.guard = guard
        self.bad = bad

    def __call__(self, process: Process) -> Any:
        model = FakeModel(w=[0.0])
        state = process.state(
            guard=self.guard,
            model=model,
            optimizer=FakeOptimizer(model),
            sampler=FakeSampler(SAMPLES, shuffle=False),
            step=0,
            log=[],
        )
        try:
            run(lambda state: self._train(process, state))(state)
        except NumericsError as error:
            return error.findings
        return model.weights["w"].tolist(), state.log, state.sampler.order.gaps

    def _train(self, process: Process, state: State) -> None:
        for batch in FakeLoader(state.sampler, 2, process.generator):
            mine = 0.0 if self.bad.isdisjoint(batch) else np.nan
            total = process.world.allreduce(np.array([1.0 + mine]))
            if np.isfinite(total).all():
                process.framework.reports["gradients"].stepped()
                state.optimizer.step({"w": total})
                state.log.append(state.step)
            else:
                here = [] if np.isfinite(mine) else ["model.w"]
                process.framework.reports["gradients"].gradients(["model.w"], here)
            state.sampler.order.record(len(batch))
            state.step += 1
            if state.step % 3 == 0:
                state.commit()


@pytest.mark.parametrize(("size", "bad"), [(1, {4}), (2, {9, 17}), (3, {10}), (2, {0}), (2, {23})])
def test_a_rolled_back_batch_is_left_out_and_all_else_done_once(size: int, bad: set[int]) -> None:
    skipped = on_ranks(size, Script(Guard(numerics="skip"), bad))
    rolled = on_ranks(size, Script(Guard(numerics="rollback"), bad))
    assert rolled == [rolled[0]] * size
    assert rolled[0][0] == skipped[0][0]  # the same steps were applied
    out = [sample for first, end in rolled[0][2] for sample in range(first, end)]
    assert bad <= set(out) and len(out) == len(bad) * 2 * size
    assert rolled[0][1] == list(range(SAMPLES // (2 * size) - len(bad)))


def test_a_batch_whose_samples_nobody_tells_is_an_error_and_not_a_guess() -> None:
    def body(process: Process) -> Any:
        state = process.state(guard=Guard(numerics="rollback"), sampler=FakeSampler(SAMPLES), step=0)

        def train(state: State) -> None:
            for _ in FakeLoader(state.sampler, 2, process.generator):
                process.framework.reports["gradients"].gradients(["model.w"], ["model.w"])
                state.step += 1
                state.commit()

        with pytest.raises(NumericsError, match=r"record_batch\(\) after each step"):
            run(train)(state)
        return state.last_commit.commit

    assert on_ranks(2, body) == [0, 0]


def test_a_batch_can_only_be_left_out_of_a_sampler_of_the_state() -> None:
    def body(process: Process) -> Any:
        with pytest.raises(ConfigError, match=r"^numerics: .*ElasticSampler.*Guard\(numerics='skip'\)"):
            process.state(guard=Guard(numerics="rollback"), step=0)

    on_ranks(1, body)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_lost_at_it_changes_nothing(policy: Numerics, victim: int) -> None:
    undisturbed = on_ranks(2, Script(Guard(numerics=policy), {9}))
    fault = Fault(victim, "hvdrecover.guard.numerics", replacement="in_place")
    assert on_ranks(2, Script(Guard(numerics=policy), {9}), [fault]) == undisturbed


def test_a_budget_is_refilled_by_good_steps() -> None:
    def body(process: Process) -> Any:
        guard = Guard(numerics="skip", numerics_budget=2)
        process.state(guard=guard, model=FakeModel(w=[1.0])).sync()
        judge, raised = process.framework.reports["gradients"], []
        for step in (1, 2, 3, WINDOW + 2, WINDOW + 3, WINDOW + 4):
            judge.steps = lambda step=step: step
            try:
                judge.gradients(["model.w"], ["model.w"])
            except NumericsError:
                raised.append(step)
        return raised

    assert on_ranks(1, body) == [[3, WINDOW + 4]]


def test_a_sum_that_overflows_is_blamed_on_nobody() -> None:
    def body(process: Process) -> list[str]:
        process.state(guard=Guard(), model=FakeModel(w=[1.0])).sync()
        with pytest.raises(NumericsError) as caught:
            process.framework.reports["gradients"].gradients([f"p{number}" for number in range(10)], [])
        return caught.value.findings

    (line,) = on_ranks(2, body)[0]
    assert line.startswith("finite on each of ranks 0-1, but not their sum: gradient of p0, gradient of p1")
    assert line.endswith("gradient of p7, and 2 more")
