from __future__ import annotations

import dataclasses

import pytest

from hvdrecover.elastic.guard.numerics import WINDOW, Budget, Sighting, decide, findings
from hvdrecover.elastic.guard.settings import Numerics

CLEAN = Sighting(0, "a", ())
BAD = Sighting(1, "b", ("gradient of model.w",), "the output of model.0 (Linear)", 2, (5, 3))


@pytest.mark.parametrize(
    ("policy", "used", "budget", "action"),
    [
        ("raise", 0, 10, "raise"),
        ("skip", 0, 10, "skip"),
        ("skip", 9, 10, "skip"),
        ("skip", 10, 10, "raise"),
        ("rollback", 0, 0, "raise"),
        ("rollback", 0, 1, "rollback"),
    ],
)
def test_a_policy_holds_until_its_budget_is_spent(
    policy: Numerics, used: int, budget: int, action: Numerics
) -> None:
    newcomer = dataclasses.replace(CLEAN, used=0)
    assert decide(policy, [newcomer, dataclasses.replace(BAD, used=used)], budget) == action


def test_a_budget_is_refilled_by_good_steps() -> None:
    budget = Budget()
    for step in (3, 4, 9):
        assert budget.used(step) < 3
        budget.bad(step)
    assert [budget.used(step) for step in (9, 2 + WINDOW, 3 + WINDOW, 8 + WINDOW, 9 + WINDOW)] == [
        3,
        3,
        2,
        1,
        0,
    ]


def test_a_finding_names_rank_samples_and_tensors() -> None:
    assert findings([CLEAN, BAD], ["gradient of model.w"]) == [
        "rank 1 on b, at samples 5, 3 of epoch 2: "
        "first the output of model.0 (Linear); then gradient of model.w"
    ]
    plain = Sighting(3, "c", ("parameter model.w",))
    assert findings([plain], []) == ["rank 3 on c: parameter model.w"]
