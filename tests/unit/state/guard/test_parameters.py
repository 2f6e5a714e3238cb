"""Ranks whose parameters have come apart: found, named, and healed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hvdrecover.errors import DivergedError
from hvdrecover.guard import Divergence, Guard
from hvdrecover.state.rendezvous import rendezvous
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeOptimizer
from tests.fakes.root import FakeRoots
from tests.fakes.world import HANG_SECONDS, Fault
from tests.unit.state.jobs import URL, Process, on_ranks


def build(process: Process, guard: Guard, checkpoint: str | None = None) -> State:
    model = FakeModel(w=np.arange(6.0), small=np.float32([1, 2]), local=[0.0])
    return process.state(checkpoint, guard=guard, model=model, optimizer=FakeOptimizer(model), step=0)


def flip(array: Any, place: int = 1) -> None:
    array.reshape(-1).view(np.uint8)[place * array.itemsize] ^= 1


def weights(state: State) -> list[list[float]]:
    return [value.tolist() for name, value in state.model.weights.items() if name != "local"]


def train(state: State, steps: int) -> None:
    for _ in range(steps):
        state.optimizer.step({"w": np.ones(6), "small": np.ones(2, np.float32)})
        state.model.weights["local"] += state._session.context.world.rank()
        state.step += 1
        state.commit()


def guard(policy: Divergence, every: int = 1) -> Guard:
    return Guard(parameters_every_commits=every, on_divergence=policy)


@pytest.mark.parametrize(("size", "odd", "tied"), [(2, 1, True), (3, 0, False), (3, 2, False)])
def test_one_bit_is_found_and_named_on_all_ranks(size: int, odd: int, tied: bool) -> None:
    def body(process: Process) -> str:
        state = build(process, guard("raise", every=2))
        state.sync()
        train(state, 2)
        if process.world.rank() == odd:
            flip(state.model.weights["small"])
        state.commit()  # of the same tensors, but the ranks do not compare them yet
        with pytest.raises(DivergedError) as caught:
            state.commit()
        return str(caught.value)

    results = on_ranks(size, body)
    assert len(set(results)) == 1
    assert re.search(rf" rank {odd} .* ranks? .* commit g0001-c00000004", results[0])
    assert f"model.small, F32[2]: 1 of 2 numbers, by 1.19e-07 at most, on rank {odd} on host" in results[0]
    assert ("nobody can tell" in results[0]) == tied
    assert "model.w" not in results[0]


def test_a_slot_that_a_rank_lacks_is_named() -> None:
    def body(process: Process) -> list[str]:
        state = build(process, guard("heal"))
        state.sync()
        names = ["w"] if process.world.rank() == 0 else ["w", "small"]
        state.optimizer.step({name: np.ones_like(state.model.weights[name]) for name in names})
        with pytest.raises(DivergedError) as caught:
            state.commit()
        return caught.value.differences

    assert on_ranks(3, body) == [["number of tensors: 3 on rank 0; 4 on ranks 1-2"]] * 3


def test_a_commit_that_differs_is_not_made_durable(roots: FakeRoots) -> None:
    def body(process: Process) -> None:
        state = build(process, guard("heal"), URL)
        state.sync()
        if process.world.rank() == 0:
            state.model.weights["w"][0] = 9.0
        state.commit(durable=True)
        state.flush()
        state._session.durable.settle()

    on_ranks(3, body)

    def resumed(process: Process) -> float:
        state = build(process, guard("raise"), URL)
        state.sync()
        return float(state.model.weights["w"][0])

    assert on_ranks(1, resumed) == [0.0]


def test_healing_does_not_change_a_commit_that_is_being_written(roots: FakeRoots) -> None:
    def body(process: Process) -> Any:
        state, root = build(process, guard("heal", every=2), URL), roots[URL]
        state.sync()
        if process.world.rank() == 0:
            state.model.weights["w"][0] = 9.0
            root.gate.clear()
        state.commit(durable=True)
        if process.world.rank() == 0:
            assert root.at_the_gate.wait(HANG_SECONDS)
        state.commit()  # of the same tensors, and they are compared
        root.gate.set()
        state.flush()
        state._session.durable.settle()
        return weights(state)[0][0]

    assert on_ranks(3, body) == [0.0] * 3
    written = {name.split("/")[0]: data for name, data in roots[URL].files.items() if "model.s" in name}
    assert [np.float64(9.0).tobytes() in data for _, data in sorted(written.items())] == [True, False]


@pytest.mark.parametrize("collective", ["ballots", "tensors", "found", "48"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_lost_meanwhile_costs_nothing_else(collective: str, victim: int) -> None:
    def body(process: Process) -> Any:
        state = build(process, guard("heal"))

        @run
        def training(state: State) -> Any:
            while state.step < 4:
                state.optimizer.step({"w": np.ones(6), "small": np.ones(2, np.float32)})
                state.step += 1
                if state.step == 2 and process.world.rank() == 1 and not process.world.newcomer:
                    flip(state.model.weights["w"])
                state.commit()
            return weights(state)

        return training(state)

    name = f"hvdrecover.guard.{collective}"
    fault = Fault(victim, name, 2 if collective == "ballots" else 1, replacement="in_place")
    results = on_ranks(4, body, [fault])
    assert results == [results[0]] * 4
    model = FakeModel(w=np.arange(6.0), small=np.float32([1, 2]))
    optimizer = FakeOptimizer(model)
    for _ in range(4):
        optimizer.step({"w": np.ones(6), "small": np.ones(2, np.float32)})
    assert results[0] == [value.tolist() for value in model.weights.values()]


@pytest.mark.parametrize(("policy", "error"), [("raise", "DivergedError"), ("warn", None), ("heal", None)])
def test_ranks_at_the_rendezvous_after_a_fault_believe_the_majority(
    policy: Divergence, error: str | None
) -> None:
    def body(process: Process) -> Any:
        state = build(process, guard(policy, every=100))
        if not process.world.newcomer:
            state.sync()
            if process.world.rank() == 0:
                flip(state.model.weights["w"])
            state.commit()
            try:
                process.world.allgather([1], "work")
            except Exception as fault:
                rendezvous(state._session, fault)
        try:
            state.sync()
        except DivergedError as caught:
            assert re.search("rank 0 .* rank 1 ", str(caught))
            return "DivergedError", None
        return None, weights(state)

    results = on_ranks(4, body, [Fault(3, "work", replacement="in_place")])
    expected = None if error else [list(np.arange(6.0)), [1.0, 2.0]]
    assert results == [(error, expected)] * 4
