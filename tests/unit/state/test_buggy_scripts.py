"""Scripts with a bug that only a fault brings to light, held against what their witnesses tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.drill import check
from hvdrecover.drill.check import Finding, compare
from hvdrecover.drill.records import Reader
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import FakeJob, fail_at
from tests.unit.state.jobs import Process, in_drill, initialised

SAMPLES, STEPS = 48, 24  # of two ranks
KILLED_AT, RESUMED = 14, 4  # the step, and the last commit before it


def script(bug: str, folder: Path, shuffle: random.Random) -> Callable[[Process], None]:
    """A script that is part of a drill; with a certain bug, each start shuffles its data anew."""
    order = list(range(SAMPLES))
    if bug == "reshuffles":
        shuffle.shuffle(order)  # anew in each start

    def body(process: Process) -> None:
        model = FakeModel(weight=[0.5, -0.25])
        process.clock = SYSTEM_CLOCK  # all starts share it, and reports are put in order by it
        config = in_drill(process.config, folder, f"fake://{folder}")
        state = process.state(
            config=config,
            model=model,
            optimizer=FakeOptimizer(model),
            sampler=FakeSampler(SAMPLES, seed=3),
            batch=0,
        )
        steps = 0  # which a script that forgets it warms its learning rate up by

        def do_step(sample: int) -> None:
            nonlocal steps
            process.framework.reports["steps"].step_begins()
            mine = np.sin(np.arange(1.0, 3.0) * order[sample]) * model.weights["weight"]
            gradient = process.world.allreduce(mine)
            steps += 1
            if bug == "forgets a counter":
                state.optimizer.rate = 0.1 * min(1.0, steps / 100)
            state.optimizer.step({"weight": gradient})

        def record() -> None:
            state.sampler.order.record(1)
            state.batch += 1
            if state.batch % 3 == 0:
                state.commit()
                state.flush()

        @run
        def train(state: State) -> None:
            if bug == "resets its optimizer":
                for velocity in state.optimizer.velocity.values():
                    velocity[...] = 0.0
            if bug == "resets a counter":
                state.batch = 0
            for sample in state.sampler:
                if bug == "commits before the step":
                    record()
                    do_step(sample)
                else:
                    do_step(sample)
                    record()

        train(state)

    return body


def drilled(bug: str, folder: Path) -> list[Finding]:
    """Return what is found when all ranks are killed and start again."""
    shuffle = random.Random(1)

    def start(name: str, *faults: Any) -> None:
        FakeJob(initialised(script(bug, folder / name, shuffle)), 2, faults).run()

    start("clean")
    start("faults-1", fail_at(0, "gradient", KILLED_AT, action="kill_all"))
    start("faults-1")
    clean, faulty = (Reader(folder / name / "witness").look() for name in ("clean", "faults-1"))
    assert [line.commit for line in faulty.of("agreed")] == [0, 0, RESUMED, RESUMED]
    assert faulty.newest >= STEPS // 3
    return compare(clean, faulty).findings


@pytest.mark.parametrize(
    ("bug", "name"),
    [
        ("resets its optimizer", check.SAME_COMMITS),
        ("resets a counter", check.SAME_COMMITS),
        ("forgets a counter", check.SAME_COMMITS),
        ("reshuffles", check.REPRODUCIBLE),
        ("commits before the step", check.STEP_FIRST),
    ],
)
def test_a_bug_is_found_by_the_check_that_names_its_cause(bug: str, name: str, tmp_path: Path) -> None:
    assert drilled(bug, tmp_path)[0].check == name


def test_without_its_bugs_the_script_recovers(tmp_path: Path) -> None:
    assert drilled("none", tmp_path) == []
