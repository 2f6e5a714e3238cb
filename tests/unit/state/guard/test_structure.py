from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.errors import StructureError
from hvdrecover.guard.comparison import Description, differences, digest_of
from hvdrecover.guard.settings import Guard
from hvdrecover.state.adapter import Entry
from hvdrecover.state.rendezvous import rendezvous as meet_again
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import fail_at
from tests.unit.state.jobs import Process, on_ranks


def description(*pairs: tuple[str, str]) -> Description:
    return tuple(Entry(name, value, setting=name == "rate") for name, value in pairs)


A = ("model.a", "F32[2]")
B = ("model.b", "F32[3]")


@pytest.mark.parametrize(
    ("described", "lines"),
    [
        ([description(A, B)] * 3, []),
        (
            [description(A), description(("model.a", "F32[9]"))],
            ["model.a: F32[2] on rank 0; F32[9] on rank 1"],
        ),
        (
            [description(A, B), description(A), description(A)],
            ["model.b: F32[3] on rank 0; missing on ranks 1-2"],
        ),
        (
            [description(A, B), description(B, A)],
            ["the same parameters, in another order"],
        ),
        ([description(A), None], ["guard: none on rank 1"]),
        ([None, None], []),
    ],
)
def test_what_ranks_do_not_have_in_common(described: list[Description | None], lines: list[str]) -> None:
    assert differences(described, settings=True) == lines


def test_settings_are_compared_on_request() -> None:
    described = [description(("rate", "1")), description(("rate", "2"))]
    assert differences(described, settings=True) == ["rate: 1 on rank 0; 2 on rank 1"]
    assert differences(described, settings=False) == []


def test_a_digest_depends_on_names_values_and_order() -> None:
    others = [
        description(A, B),
        description(B, A),
        description(A),
        description(A, ("model.b", "F32[4]")),
        description(A, ("b", "F32[3]")),
    ]
    assert len({digest_of(each) for each in others}) == 5
    assert all(-(2**63) <= number < 2**63 for number in digest_of(others[0]))


# -- at a rendezvous --------------------------------------------------------------------------------------


def build(process: Process, guard: Guard | None = Guard(), **attributes: Any) -> Any:  # noqa: B008  frozen
    model = FakeModel(w=[1.0, 2.0])
    made: dict[str, Any] = {"model": model, "optimizer": FakeOptimizer(model), "sampler": FakeSampler(8)}
    return process.state(guard=guard, **{**made, **attributes})


def rendezvous(process: Process, odd: dict[str, Any]) -> str | None:
    options = odd if process.world.rank() == 1 else {}
    try:
        build(process, **options).sync()
    except StructureError as error:
        return str(error)
    return None


def test_ranks_that_are_alike_start() -> None:
    assert on_ranks(3, lambda process: rendezvous(process, {})) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ({"model": FakeModel(w=[1.0, 2.0, 3.0])}, "model.w: float64[2] on ranks 0, 2; float64[3] on rank 1"),
        ({"model": FakeModel(w=[1.0, 2.0], b=0.0)}, "model.b: missing on ranks 0, 2; float64[] on rank 1"),
        ({"sampler": FakeSampler(9)}, "sampler.length: 8 on ranks 0, 2; 9 on rank 1"),
        ({"sampler": FakeSampler(8, seed=5)}, "sampler.seed: 0 on ranks 0, 2; 5 on rank 1"),
        (
            {"optimizer": FakeOptimizer(FakeModel(), rate=3.0)},
            "optimizer.rate: 0.1 on ranks 0, 2; 3.0 on rank 1",
        ),
        ({"extra": 1}, "extra: missing on ranks 0, 2; a int on rank 1"),
        ({"guard": None}, "guard: none on rank 1"),
        ({"guard": Guard(numerics=None)}, "guard: Guard("),
    ],
)
def test_all_ranks_hear_what_differs(odd: dict[str, Any], line: str) -> None:
    results = on_ranks(3, lambda process: rendezvous(process, odd))
    assert len(set(results)) == 1
    assert results[0] is not None and line in results[0]


def test_without_a_guard_nothing_is_compared() -> None:
    def body(process: Process) -> None:
        process.state(guard=None, note=process.world.rank()).sync()

    on_ranks(2, body)


def test_a_rank_that_joins_later_may_have_other_settings() -> None:
    # Such as a learning rate that its script scales by the number of ranks; it is sent the others' state.
    def body(process: Process) -> float:
        newcomer = process.world.newcomer
        model = FakeModel(w=[1.0, 2.0])
        state = build(process, model=model, optimizer=FakeOptimizer(model, rate=7.0 if newcomer else 0.1))
        if not newcomer:
            state.sync()
            state.commit()
            try:
                process.world.allgather([1], "work")
            except Exception as error:
                meet_again(state._session, error)
        state.sync()
        return float(state.optimizer.rate)

    assert on_ranks(2, body, [fail_at(1, "work", replacement="in_place")]) == [0.1, 0.1]


def test_a_rank_that_joins_later_must_have_the_same_model() -> None:
    def body(process: Process) -> str | None:
        newcomer = process.world.newcomer
        state = build(process, model=FakeModel(w=[1.0, 2.0], **({"b": 0.0} if newcomer else {})))
        try:
            if not newcomer:
                state.sync()
                try:
                    process.world.allgather([1], "work")
                except Exception as error:
                    meet_again(state._session, error)
            state.sync()
        except StructureError as error:
            return str(error.differences)
        return None

    results = on_ranks(2, body, [fail_at(1, "work", replacement="in_place")])
    assert results == ["['model.b: missing on rank 0; float64[] on rank 1']"] * 2
