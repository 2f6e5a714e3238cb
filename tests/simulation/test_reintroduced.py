"""The simulator finds faults that were mended, when they are put back."""

from __future__ import annotations

import pytest

from tests.simulation.reintroduced import MISTAKES, Mistake
from tests.simulation.simulate import run_seed

SEEDS = 2000


@pytest.mark.parametrize("mistake", [pytest.param(each, id=each.function) for each in MISTAKES])
def test_a_mistake_is_found(mistake: Mistake) -> None:
    """Where a change of the product has moved the seeds that show a mistake, it searches all others."""
    with mistake.made():
        seeds = ((mistake.seed + number) % SEEDS for number in range(SEEDS))
        found = next(filter(_shows, seeds), None)
    assert found is not None, f"not found under {SEEDS} seeds: {mistake.name}"
    assert run_seed(found).failure is None


def _shows(seed: int) -> bool:
    """Return whether a seed fails, or even the undisturbed run to which it is compared."""
    try:
        return run_seed(seed).failure is not None
    except AssertionError:
        return True
