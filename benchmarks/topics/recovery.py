"""The time for which a job stands still when a worker is killed, and the cost of being prepared for that."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.jobs import cost
from benchmarks.jobs.cost import Steady, Waiting
from benchmarks.jobs.faults import Faults
from benchmarks.jobs.launchers import FAULTS, NO_STANDBY, SPARE_HOST, STANDBY, TORCHRUN, UNGUARDED, WORKERS
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
    """The amounts: jobs of each kind, faults in each, pairs of jobs, and blocks of steps in each."""

    jobs: int
    faults: int
    pairs: int
    blocks: int
    seconds: float  # of watching those that wait


_AMOUNTS = {"full": _Amount(2, FAULTS, 2, 16, 10.0), "small": _Amount(1, 1, 1, 2, 0.5)}


def measure(setting: Setting) -> list[Row | Fact]:
    """Real jobs of two workers, one of which is killed, by turns; then pairs of jobs side by side."""
    amount = _AMOUNTS[setting.size]
    return [*_recoveries(setting, amount), *_steps(setting, amount), *_beats(setting)]


def _recoveries(setting: Setting, amount: _Amount) -> list[Row | Fact]:
    peers = _PEERS[setting.state]
    ours, cold = Faults(), list[float]()
    theirs = {peer.title: Faults() for peer in peers}
    waiting: list[Waiting] = []
    for turn in range(amount.jobs):
        with Running(STANDBY, setting.state, setting.folder / f"{turn}-ours") as job:
            job.settle()
            waiting.append(cost.waiting(job, amount.seconds))
            ours.strike_each(job, amount.faults)
            for _ in range(amount.faults):
                job.settle()
                cold.append(job.start_cold())
        for place, peer in enumerate(peers):
            with Running(peer, setting.state, setting.folder / f"{turn}-{place}") as job:
                theirs[peer.title].strike_each(job, amount.faults)
    goal = Goal(_COLD_PART * statistics.median(cold), _STRETCH_SECONDS)
    what, state = "SIGKILL of a worker to the next step of all", _state(setting)
    return [
        Row("recovery", f"{what} (bar: half of a cold restart)", state, "s", ours.one, goal=goal),
        *(Row("recovery", what, state, "s", ours.one, peer, each.one) for peer, each in theirs.items()),
        Row("recovery", what, state, "s", ours.one, _COLD, cold),
        *_needs(setting, amount, waiting),
    ]


def _needs(setting: Setting, amount: _Amount, waiting: Sequence[Waiting]) -> list[Row | Fact]:
    """The needs of processes that wait."""
    standbys = [nbytes / 1e6 for each in waiting for nbytes in each.standbys]
    guardians = [nbytes / 1e6 for each in waiting for nbytes in each.guardians]
    seconds = [max(each.standby_seconds for each in waiting), max(each.guardian_seconds for each in waiting)]
    all_of = f"{WORKERS} standbys, {WORKERS} guardians"
    return [
        Row("recovery", "memory (PSS) of a standby that waits", _state(setting), "MB", standbys),
        Row("recovery", "memory (PSS) of a guardian", _state(setting), "MB", guardians),
        Fact(
            f"processor time of {all_of} in {amount.seconds:g} s of {setting.state}, at most",
            ", ".join(f"{1e3 * each:.1f} ms" for each in seconds),
        ),
    ]


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


def _beats(setting: Setting) -> list[Row]:
    """The cost of a sign of life, whatever the framework."""
    if setting.state != "torch":
        return []
    beats = [1e9 * seconds for seconds in cost.heartbeats()]
    goal = Goal(_NANOSECONDS, _NANOSECONDS, digits=0)
    return [Row("recovery", "heartbeat()", "", "ns", beats, goal=goal)]


def _state(setting: Setting) -> str:
    return f"{setting.state}, {TITLE}"
