"""Many seeds of simulated jobs: what must hold, holds after every event."""

from __future__ import annotations

import pytest

from tests.simulation.simulate import run_seed

SEEDS = 300
_AT_ONCE = 30


@pytest.mark.parametrize("first", range(0, SEEDS, _AT_ONCE))
def test_a_job_survives_its_faults(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        outcome = run_seed(seed)
        assert outcome.failure is None, outcome.report()
