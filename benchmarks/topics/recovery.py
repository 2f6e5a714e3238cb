"""How long a job stands still when a worker is killed, and what it costs to be prepared for that."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.jobs import cost
from benchmarks.jobs.cost import Steady
from benchmarks.jobs.launchers import KILLS, NO_STANDBY, SPARE_HOST, STANDBY, TORCHRUN, UNGUARDED, WORKERS
from benchmarks.jobs.running import Running
from benchmarks.jobs.training import TITLE
from benchmarks.rows import Fact, Goal, Row
from benchmarks.states import Setting

_COLD = "a cold restart: all is killed and started again"
_PEERS = {"torch": (NO_STANDBY, SPARE_HOST, TORCHRUN), "tensorflow": (NO_STANDBY,)}
_COLD_PART, _STRETCH_SECONDS = 0.5, 0.3
_SLOWER, _NANOSECONDS = 0.01, 1000.0


@dataclass(frozen=True)
class _Amount:
    rounds: int
    kills: int
    pairs: int
    blocks: int
    seconds: float


_AMOUNTS = {"full": _Amount(2, KILLS, 3, 16, 10.0), "small": _Amount(1, 1, 1, 2, 0.5)}


def measure(setting: Setting) -> list[Row | Fact]:
    """Real jobs of two workers, one of which is killed, by turns; then pairs of jobs side by side."""
    amount = _AMOUNTS[setting.size]
    return [*_recoveries(setting, amount), *_steps(setting, amount), *_needs(setting, amount)]


def _recoveries(setting: Setting, amount: _Amount) -> list[Row]:
    launchers = (STANDBY, *_PEERS[setting.state])
    times: dict[str, list[float]] = {title: [] for title in [*(each.title for each in launchers), _COLD]}
    for turn in range(amount.rounds):
        for place, launcher in enumerate(launchers):
            with Running(launcher, setting.state, setting.folder / f"{turn}-{place}") as job:
                for kill in range(amount.kills):
                    job.settle()
                    times[launcher.title].append(job.strike(rank=kill % WORKERS))
        with Running(STANDBY, setting.state, setting.folder / f"{turn}-cold") as job:
            for _ in range(amount.kills):
                job.settle()
                times[_COLD].append(job.start_cold())
    ours = times.pop(STANDBY.title)
    limit = Goal(_COLD_PART * statistics.median(times[_COLD]), _STRETCH_SECONDS)
    what, state = "SIGKILL of a worker to the next step of all", _state(setting)
    against = [Row("recovery", what, state, "s", ours, peer, theirs) for peer, theirs in times.items()]
    bar = Row("recovery", f"{what} (bar: half a cold restart)", state, "s", ours, goal=limit)
    return [bar, *against]


def _steps(setting: Setting, amount: _Amount) -> list[Row | Fact]:
    """A step of training under `hvdrecover run` against the same without it."""
    both = Steady()
    for pair in range(amount.pairs):
        steady = cost.steady(setting.state, setting.folder / f"pair-{pair}", amount.blocks)
        both.guarded += steady.guarded
        both.unguarded += steady.unguarded
    guarded, unguarded = ([1e3 * seconds for seconds in each] for each in (both.guarded, both.unguarded))
    what = "a training step with guardian, heartbeats and standby"
    peer = f"{UNGUARDED.title}, the same state"
    goal = Goal(_SLOWER, _SLOWER, slowdown=True, digits=3)
    low, middle, high = cost.quartiles(both.differences())
    spread = f"{low:+.1%} / {middle:+.1%} / {high:+.1%} in {len(guarded)} pairs of blocks of steps"
    return [
        Row("recovery", what, _state(setting), "ms", guarded, peer, unguarded, goal),
        Fact(f"{what}, {setting.state}: quartiles of the difference", spread),
    ]


def _needs(setting: Setting, amount: _Amount) -> list[Row | Fact]:
    """What those that wait need, and what a sign of life takes."""
    with Running(STANDBY, setting.state, setting.folder / "waiting") as job:
        job.settle()
        waiting = cost.waiting(job, amount.seconds)
    framework, state = setting.state, _state(setting)
    memory = (waiting.standbys, waiting.guardians)
    standbys, guardians = ([nbytes / 1e6 for nbytes in each] for each in memory)
    rows: list[Row | Fact] = [
        Row("recovery", "memory (PSS) of a standby that waits", state, "MB", standbys),
        Row("recovery", "memory (PSS) of a guardian", state, "MB", guardians),
        Fact(
            f"processor time in {amount.seconds:g} s of {WORKERS} standbys, {WORKERS} guardians, {framework}",
            f"{1e3 * waiting.standby_seconds:.1f} ms, {1e3 * waiting.guardian_seconds:.1f} ms",
        ),
    ]
    if framework == "torch":
        beats = [1e9 * seconds for seconds in cost.heartbeats()]
        goal = Goal(_NANOSECONDS, _NANOSECONDS, digits=0)
        rows.append(Row("recovery", "heartbeat()", "", "ns", beats, goal=goal))
    return rows


def _state(setting: Setting) -> str:
    return f"{setting.state}, {TITLE}"
