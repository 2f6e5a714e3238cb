from __future__ import annotations

import pytest

from tests.unit.reporting.runs import TWO, Run


@pytest.fixture
def run(tmp_path):
    """A run of two ranks that has made three commits, 10 s apart, the first one 14 s after its beginning."""
    run = Run(tmp_path / "run")
    run.report(0, "start", pid=5, attempt=1, command=["python"])
    run.rendezvous(4, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 14, 2: 24, 3: 34})
    return run
