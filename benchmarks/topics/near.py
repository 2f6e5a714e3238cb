"""The near tier on beside off: what a fault costs, and what it costs while nothing happens."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs.faults import Faults
from benchmarks.jobs.launchers import WORKERS, Launcher
from benchmarks.jobs.near_commits import RESULT, SMALL
from benchmarks.jobs.near_roots import tidied
from benchmarks.jobs.near_state import EVERY_SECONDS
from benchmarks.jobs.running import Running
from benchmarks.rows import MEMORY, Goal, Row
from benchmarks.states import Setting
from hvdrecover.drill.run import Job
from hvdrecover.errors import HvdrecoverError
from tests.support.jobs import ROOT_MAY_USE_MPI, supervised

_PATIENCE, _LOOK = 600.0, 0.5  # seconds for all commits, and between looks
_OFF = "the near tier off"
_TIER_SHARE = 3.0  # commits in tmpfs, at most
_OTHERS_SHARE = 1.0  # commits in the memory of a process that does not keep the tier


def measure(setting: Setting) -> list[Row]:
    """Jobs of two workers that are killed, by turns with the tier and without; then commits of both kinds."""
    return [*_recoveries(setting), *_commits(setting)]


def _recoveries(setting: Setting) -> list[Row]:
    on, off = Faults(), Faults()
    for turn in range(3 if setting.size == "full" else 1):
        for near, faults in (("auto", on), ("off", off)):
            _strike(setting, setting.folder / f"{turn}-{near}", near, faults)
    title, faster = setting.shape.title, Goal(0.6, 0.4)
    lost = f"steps lost when all processes are killed, durable every {EVERY_SECONDS:.0f} s"
    (keeper, other), (keeper_off, other_off) = on.ranks, off.ranks
    what = "to the next step of all"
    return [
        Row("near", lost, title, "steps", on.lost, goal=Goal(2.0, 0.0, digits=0)),
        Row("near", f"the same, {_OFF}", title, "steps", off.lost),
        Row("near", f"SIGKILL of all processes {what}", title, "s", on.all, _OFF, off.all, faster),
        Row("near", f"SIGKILL of one worker {what}", title, "s", on.one, _OFF, off.one, faster),
        Row("near", "the same, rank 0, which keeps the tier", title, "s", keeper, _OFF, keeper_off),
        Row("near", "the same, rank 1", title, "s", other, _OFF, other_off),
    ]


def _strike(setting: Setting, folder: Path, near: str, faults: Faults) -> None:
    """Kill each worker a few times, and then all of them."""
    launcher = Launcher(
        f"hvdrecover run, HVDRECOVER_NEAR={near}",
        setting.size,
        lambda _: supervised(workers=WORKERS),
        standbys=WORKERS,
        settings={"HVDRECOVER_NEAR": near},
    )
    with tidied(folder / "checkpoint"), Running(launcher, "near", folder) as job:
        faults.strike_each(job, (3 if setting.size == "full" else 1) * WORKERS)
        faults.strike_all(job)


def _commits(setting: Setting) -> list[Row]:
    keeper, other = _in_a_job(setting)
    title, eight = setting.shape.title, SMALL[setting.size].title
    stall, again, commit = (_slower(keeper[name], other[name]) for name in ("alone", "again", "small"))
    steps = Goal(0.05, 0.02, slowdown=True, digits=3)
    what = "a step while a commit goes to the tier, all cores computing"
    share = Goal(_TIER_SHARE, _TIER_SHARE, digits=1)
    spare = Goal(_OTHERS_SHARE, _OTHERS_SHARE, digits=1)
    return [
        Row("near", "stall of a commit", title, "ms", stall[0], _OFF, stall[1], Goal(1.1, 1.0)),
        Row("near", "stall of a commit right after another one", title, "ms", again[0], _OFF, again[1]),
        Row("near", what, title, "ms", keeper["steps"][0], "the same without", keeper["steps"][1], steps),
        Row(
            "near",
            f"{what}: the worker that doesn't keep it",
            title,
            "ms",
            other["steps"][0],
            "the same without",
            other["steps"][1],
        ),
        Row("near", "commit() of two aligned ranks", eight, "ms", commit[0], goal=Goal(2.0, 1.3)),
        Row("near", f"the same, {_OFF}", eight, "ms", commit[1]),
        *(
            Row(
                "near",
                f"extra memory of {whose}, {when} (peak)",
                title,
                MEMORY,
                [found["memory"][name]],
                goal=goal,
            )
            for whose, found, limit in (("the tier's keeper", keeper, share), ("another rank", other, spare))
            for name, when, goal in (
                ("burst", "commits beside a write", limit),
                ("start", "first commits", None),
                ("idle", "idle", limit),
            )
        ),
        Row("near", "the near root in tmpfs", title, MEMORY, [keeper["memory"]["tmpfs"]], goal=share),
    ]


def _slower(first: list[list[float]], second: list[list[float]]) -> list[list[float]]:
    """The time that training waits: of both ranks the slower one, each time."""
    return [list(map(max, mine, others)) for mine, others in zip(first, second, strict=True)]


def _in_a_job(setting: Setting) -> list[dict[str, Any]]:
    """The findings of the ranks, the one that keeps the tier first."""
    module = ["-m", "benchmarks.jobs.near_commits", setting.size, setting.state, str(setting.folder)]
    environ = {
        "PATH": os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "HVDRECOVER_NEAR": "auto",
        **ROOT_MAY_USE_MPI,
    }
    results = [setting.folder / RESULT.format(rank=rank) for rank in range(WORKERS)]
    roots = [setting.folder / name for name in ("on", "small-on")]
    with tidied(*roots):
        command = [*supervised("--no-standby", workers=WORKERS), sys.executable, *module]
        job = Job(command, setting.folder / "log.txt", environ)
        try:
            deadline = time.monotonic() + _PATIENCE
            while not all(result.exists() for result in results):
                if not job.running or time.monotonic() > deadline:
                    raise HvdrecoverError(f"the job has measured nothing; its log ends with\n{job.tail()}")
                time.sleep(_LOOK)
        finally:
            job.kill()
    return [json.loads(result.read_text()) for result in results]
