"""The cost of a result that does not depend on the number of processes: virtual ranks."""

from __future__ import annotations

import json
import time

import horovod.torch as hvd
import torch

from benchmarks import workers
from benchmarks.jobs.virtual_ranks import RESULT, Steps
from benchmarks.jobs.virtual_shares import RESULT as SHARES
from benchmarks.measure import by_turns, stopwatch
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting
from hvdrecover.launch.processes import kill
from tests.support.jobs import DigitsRun, elastic

_PATIENCE = 600.0  # seconds
_STEP = Goal(1.05, 1.02)
_UNEVEN = {"1-3": "shares of 1 and 3", "3-3": "shares of 3"}


def measure(setting: Setting) -> list[Row]:
    """Steps and reductions of two workers over loopback, and steps of one process, beside their peers."""
    workers.run("benchmarks.jobs.virtual_ranks", setting, _PATIENCE)
    found = {
        name: [[1e3 * each for each in values] for values in both]
        for name, both in json.loads((setting.folder / RESULT).read_text()).items()
    }
    workers.run("benchmarks.jobs.virtual_shares", setting, _PATIENCE)
    shared = json.loads((setting.folder / SHARES).read_text())
    alone = _alone(setting)
    grouped = "hvd.grouped_allreduce"
    return [
        Row(
            "virtual",
            "a step of two virtual ranks on two processes",
            "compute-bound",
            "ms",
            found["step"][0],
            "hvd.DistributedOptimizer",
            found["step"][1],
            _STEP,
            True,
        ),
        Row(
            "virtual",
            "a step of four virtual ranks on one process",
            "compute-bound",
            "ms",
            alone[0],
            "four passes by hand",
            alone[1],
            _STEP,
            True,
        ),
        Row(
            "virtual",
            "reduction of virtual ranks, two processes",
            "100 MB",
            "ms",
            found["1-1"][0],
            grouped,
            found["1-1"][1],
            Goal(1.6, 1.2),
            True,
        ),
        Row(
            "virtual",
            "a step of ten virtual ranks, shares by speed",
            "one of two processes four times slower",
            "ms",
            shared[0],
            "equal shares",
            shared[1],
            Goal(0.5, 0.435),
            False,
        ),
        Row(
            "virtual",
            "from SIGKILL of one of two processes to the end of the next step",
            "digits, four virtual ranks",
            "ms",
            _recoveries(setting),
            goal=Goal(500.0, 200.0, digits=0),
        ),
        *(
            Row("virtual", f"the same, {what}", "100 MB", "ms", *(found[name][0], grouped, found[name][1]))
            for name, what in _UNEVEN.items()
        ),
    ]


def _recoveries(setting: Setting) -> list[float]:
    """Milliseconds from a kill to the end of the survivor's next step, in jobs without standbys."""
    found = []
    for number in range(setting.rounds(5)):
        folder = setting.folder / f"killed-{number}"
        folder.mkdir()
        hosts = folder / "hosts"
        hosts.write_text("localhost:1\n127.0.0.1:1\n")  # Horovod gives up a host on which a worker died
        run = DigitsRun(folder, 15, "--virtual-ranks", "4", "--step-seconds", "0.01")
        job = run.start(elastic(hosts), {"OMP_NUM_THREADS": "1"})
        try:
            run.wait_for(job, lambda batch: batch.epoch == 2)
            struck = time.time()
            kill(run.process_of(rank=3))
            first = run.wait_for(job, lambda batch: batch.generation > 1, after=struck)
            # A part is written down before it is computed: that of the next step tells that this one is done.
            following = run.wait_for(job, lambda batch: batch.rank == 0, after=first.time)
        finally:
            job.kill()
        found.append(1e3 * (following.time - struck))
    return found


def _alone(setting: Setting) -> list[list[float]]:
    """Milliseconds of steps in this process, which has all virtual ranks."""
    hvd.init()
    torch.set_num_threads(1)
    steps = [Steps(setting.size, (4,)).step, Steps(setting.size, None, passes=4).step]
    takes = [lambda step=step: 1e3 * stopwatch(step) for step in steps]  # type: ignore[misc]
    return by_turns(setting.rounds(20), takes, warmups=2)
