"""The simulator finds faults that were mended, when they are put back."""

from __future__ import annotations

import pytest

from tests.integration.conftest import LONG
from tests.simulation.reintroduced import MISTAKES, Mistake
from tests.simulation.simulate import run_seed

SEEDS = 2000
RARE = ("_failed", "_place", "take_after")  # need hundreds of seeds


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, id=each.function, marks=[LONG] * (each.function in RARE)) for each in MISTAKES],
)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    with mistake.made():
        found = next((seed for seed in range(SEEDS) if _shows(seed)), None)
    assert found is not None, f"not found under {SEEDS} seeds: {mistake.name}"
    assert run_seed(found).failure is None


def _shows(seed: int) -> bool:
    """Return whether a seed fails, or even the undisturbed run to which it is compared."""
    try:
        return run_seed(seed).failure is not None
    except AssertionError:
        return True
