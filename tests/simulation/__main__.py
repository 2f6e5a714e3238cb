"""Print the transcript of a seed."""

from __future__ import annotations

import sys

from tests.simulation.simulate import run_seed

if __name__ == "__main__":
    outcome = run_seed(int(sys.argv[1]))
    print(outcome.report())
    sys.exit(outcome.failure is not None)
