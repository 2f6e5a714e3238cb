"""Real jobs of more and more processes on this machine, with a model of a few KB."""

from __future__ import annotations

from benchmarks.jobs.launchers import Launcher
from benchmarks.jobs.running import Running
from benchmarks.jobs.tiny_training import commits
from benchmarks.rows import Curve, Fact, Found
from benchmarks.scale import PAGE
from benchmarks.states import Setting
from hvdrecover import machine
from tests.support.jobs import supervised

_WORKERS = {"full": (2, 4, 8, 16), "small": (2,)}
_NEED = 0.6e9  # bytes of a training process and its standby
_FAULTS = {"full": 3, "small": 1}
_FIRST, _RECOVERY, _COMMIT = "first", "recovery", "commit"
_FIGURES = {
    _FIRST: ("from the start to the first step of all", "s"),
    _RECOVERY: ("SIGKILL of a worker to the next step of all", "s"),
    _COMMIT: ("a commit of a few KB", "ms"),
}


def measure(setting: Setting) -> list[Found]:
    """Start each job, have it train, kill workers, and look at its commits."""
    found: dict[str, dict[float, list[float]]] = {key: {} for key in _FIGURES}
    facts: list[Found] = []
    for workers in _WORKERS[setting.size]:
        if (left := machine.available_memory().nbytes) < workers * _NEED:
            what = f"not measured: jobs of {workers}"
            facts.append(Fact(what, f"{workers * _NEED / 1e9:.1f} GB needed, {left / 1e9:.1f} left", PAGE))
            continue
        for key, values in _of(workers, setting).items():
            found[key][float(workers)] = values
    drawn = [
        Curve("jobs" if unit == "s" else "commits", what, unit, "processes", "measured", found[key])
        for key, (what, unit) in _FIGURES.items()
    ]
    return [*drawn, *facts]


def _of(workers: int, setting: Setting) -> dict[str, list[float]]:
    launcher = Launcher(
        f"hvdrecover run of {workers}",
        "hvdrecover",
        lambda _: supervised(workers=workers),
        standbys=workers,
        workers=workers,
    )
    folder = setting.folder / str(workers)
    with Running(launcher, "tiny", folder, durable=False) as job:
        job.settle()
        first = [job.first_step()]
        undisturbed = [1e3 * seconds for seconds in commits(folder / "steps")]
        recoveries = []
        for number in range(_FAULTS[setting.size]):
            job.settle()
            recoveries.append(job.strike(rank=number % workers)[0])
    return {_FIRST: first, _RECOVERY: recoveries, _COMMIT: undisturbed[len(undisturbed) // 2 :]}
