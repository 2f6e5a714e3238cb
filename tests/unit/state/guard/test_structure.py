"""Settings of the guard, and structure that ranks must have in common."""

from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.data.version import DataVersion
from hvdrecover.errors import ConfigError, StructureError
from hvdrecover.guard import Guard
from hvdrecover.state.rendezvous import rendezvous as meet_again
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import Fault
from tests.unit.state.jobs import Process, on_ranks

MODEL: dict[str, Any] = {"w": [1.0, 2.0], "v": 0.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters_every_commits", 0),
        ("parameters_every_commits", True),
        ("on_divergence", "ignore"),
        ("numerics", "heal"),
        ("numerics_budget", None),
        ("data", "v1"),
    ],
)
def test_a_setting_without_a_usable_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        Guard(**{name: value})


def build(process: Process, guard: Guard | None = Guard(), **attributes: Any) -> Any:  # noqa: B008  frozen
    model = FakeModel(**MODEL)
    made: dict[str, Any] = {"model": model, "optimizer": FakeOptimizer(model), "sampler": FakeSampler(8)}
    return process.state(guard=guard, **{**made, **attributes})


def rendezvous(process: Process, odd: dict[str, Any]) -> str | None:
    options = odd if process.world.rank() == 1 else {}
    try:
        build(process, **options).sync()
    except StructureError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        (
            {"model": FakeModel(**{**MODEL, "w": [1.0]})},
            "model.w: float64[2] on ranks 0, 2; float64[1] on rank 1",
        ),
        ({"model": FakeModel(**MODEL, b=0.0)}, "model.b: missing on ranks 0, 2; float64[] on rank 1"),
        ({"model": FakeModel(v=0.0, w=[1.0, 2.0])}, "the same parameters, in another order"),
        ({"sampler": FakeSampler(9)}, "sampler.length: 8 on ranks 0, 2; 9 on rank 1"),
        ({"sampler": FakeSampler(8, seed=5)}, "sampler.seed: 0 on ranks 0, 2; 5 on rank 1"),
        (
            {"optimizer": FakeOptimizer(FakeModel(), rate=3.0)},
            "optimizer.rate: 0.1 on ranks 0, 2; 3.0 on rank 1",
        ),
        ({"extra": 1}, "extra: missing on ranks 0, 2; a int on rank 1"),
        ({"guard": None}, "guard: none on rank 1"),
        ({"guard": Guard(numerics=None)}, "guard: Guard("),
        ({"guard": Guard(data=DataVersion("v2"))}, "training data: missing on ranks 0, 2; "),
    ],
)
def test_all_ranks_hear_what_differs(odd: dict[str, Any], line: str) -> None:
    results = on_ranks(3, lambda process: rendezvous(process, odd))
    assert len(set(results)) == 1
    assert results[0] is not None and line in results[0]


def joining(newcomers: dict[str, Any], rate: float = 0.1) -> list[Any]:
    """The rates after rank 1 of 2 was replaced by one with a larger model or another rate; or differences."""

    def body(process: Process) -> Any:
        newcomer = process.world.newcomer
        model = FakeModel(**MODEL, **(newcomers if newcomer else {}))
        state = build(process, model=model, optimizer=FakeOptimizer(model, rate=rate if newcomer else 0.1))
        try:
            if not newcomer:
                state.sync()
                try:
                    process.world.allgather([1], "work")
                except Exception as error:
                    meet_again(state._session, error)
            state.sync()
        except StructureError as error:
            return error.differences
        return state.optimizer.rate

    return on_ranks(2, body, [Fault(1, "work", replacement="in_place")])


def test_a_rank_that_joins_later_may_have_other_settings_but_must_have_the_same_model() -> None:
    # Such as a learning rate that its script scales by the number of ranks; it is sent the others' state.
    assert joining({}, rate=7.0) == [0.1, 0.1]
    assert joining({"b": 0.0}) == [["model.b: missing on rank 0; float64[] on rank 1"]] * 2
