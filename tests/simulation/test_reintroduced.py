"""The simulator finds faults that were mended, when they are put back."""

from __future__ import annotations

import pytest

from tests.simulation.reintroduced import MISTAKES, Mistake
from tests.simulation.simulate import run_seed

SEEDS = 2000


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.function)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    with mistake.made():
        found = next((seed for seed in range(SEEDS) if run_seed(seed).failure is not None), None)
    assert found is not None, f"not found under {SEEDS} seeds: {mistake.name}"
    assert run_seed(found).failure is None
