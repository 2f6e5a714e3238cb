"""The faults of drills: the effect of each on a run, and the recovery that is expected."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import root as roots
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.config import PREEMPTED
from hvdrecover.drill.lab import Lab
from hvdrecover.drill.run import Command, ScriptRun
from hvdrecover.errors import ConfigError
from hvdrecover.launch import processes

_TWO_COMMITS = 120.0  # seconds until a run must have made two durable commits
_STOPPED = 10.0  # seconds for processes to stop, which a write to a disk may delay
_LOOK = 0.01
_SPOILT = 16  # bytes

IN_PLACE = "a standby takes over, and all ranks resume from a commit in memory"
CONTINUES = "training continues with commits in memory; durable commits follow when it is over"


@dataclass(frozen=True)
class Fault:
    name: str
    expected: str  # how a run is expected to recover
    strike: Callable[[ScriptRun, int], None]  # does it to a run, or to the rank
    of_rank: bool = False  # whether it strikes one rank
    end: Callable[[ScriptRun], None] | None = None  # ends a fault that lasts
    # Returns the requirement that a drill with this command and lab lacks, with the remedy; or ''.
    lacks: Callable[[Command, Lab | None], str] = lambda command, lab: ""


# -- processes ---------------------------------------------------------------------------------------------


def _kill(run: ScriptRun, rank: int) -> None:
    processes.kill(run.ranks()[rank])


def _kill_all(run: ScriptRun, rank: int) -> None:
    for process in run.ranks().values():
        processes.kill(process)


def _kill_supervisor(run: ScriptRun, rank: int) -> None:
    processes.kill(run.job.pid)
    run.start_again()


def _stop(run: ScriptRun, rank: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(run.ranks()[rank], signal.SIGSTOP)


def _preempt(run: ScriptRun, rank: int) -> None:
    os.kill(run.job.pid, signal.SIGTERM)
    if (code := run.start_again()) != PREEMPTED:
        raise run.job.failure(f"the run left with exit code {code} instead of {PREEMPTED}")


def _failing(action: str) -> Fault:
    hangs = "the guardian kills the process; " if action == "loop" else ""
    return Fault(action, hangs + IN_PLACE, lambda run, rank: run.order(rank, action), of_rank=True)


# -- the storage -------------------------------------------------------------------------------------------


def _failing_storage(name: str, order: str) -> Fault:
    return Fault(
        name,
        CONTINUES,
        lambda run, rank: run.order("storage", order),
        end=lambda run: run.order("storage", "well"),
    )


def _corrupt_commit(run: ScriptRun, rank: int) -> None:
    """Damage the newest durable commit and all near commits while the ranks are stopped, then kill them."""
    deadline = time.monotonic() + _TWO_COMMITS
    while len(complete(run)) < 2:
        if time.monotonic() > deadline:
            problem = f"'corrupt-commit' needs two durable commits, and found fewer in {_TWO_COMMITS:.0f} s"
            raise run.job.failure(f"{problem}: keep at least 2, and make them more often")
        time.sleep(_LOOK)
    _stop_all(run)
    newest = complete(run)[0]
    run.damaged.add(newest)
    spoil(run.root / newest.name)
    for near in run.near_roots():
        for commit in near.glob(f"g*/{manifests.FILE_NAME}"):
            spoil(commit.parent)
    _kill_all(run, rank)


def spoil(commit: Path) -> None:
    """Change bytes in the middle of the largest file of the commit in a folder."""
    file = max(commit.glob(f"*{manifests.TENSORS}"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek((file.stat().st_size - _SPOILT) // 2)
        before = opened.read(_SPOILT)
        opened.seek(-_SPOILT, os.SEEK_CUR)
        opened.write(bytes(byte ^ 0xFF for byte in before))


def complete(run: ScriptRun) -> list[CommitId]:
    """Return the complete commits of a run's root that are not quarantined, newest first."""
    root = LocalStorage(run.root)
    found = [each for each in roots.commits(root) if roots.is_complete(root, each)]
    return [each for each in found if not roots.is_quarantined(root, each)]


def _stop_all(run: ScriptRun) -> None:
    deadline = time.monotonic() + _STOPPED
    for process in run.ranks().values():
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signal.SIGSTOP)
            while not processes.is_stopped(process) and time.monotonic() < deadline:
                os.kill(process, 0)
                time.sleep(_LOOK)


# -- hosts -------------------------------------------------------------------------------------------------


def _cut_off(run: ScriptRun, rank: int) -> None:
    of_ranks = {pid: host for host in run.hosts for pid in host.processes()}
    used = [of_ranks[pid] for pid in run.ranks().values() if pid in of_ranks]
    if not used:
        raise run.job.failure("no rank is on a host that 'host-cut-off' can strike")
    used[(rank - 1) % len(used)].cut_off()


def _join(run: ScriptRun) -> None:
    for host in run.hosts:
        host.join()


def _lacks_hosts(command: Command, lab: Lab | None) -> str:
    if command.processes < 2:
        return "a rank on a second host; start the drill with -np 2 --lab 3"
    return "" if lab else f"several hosts; --lab {command.processes + 1} makes them on this machine, for root"


def _resize(run: ScriptRun, rank: int) -> None:
    """Change the number of hosts, which are names of this one; the longest present leave first."""
    present = [line.rpartition(":")[0] for line in run.listing.read_text().splitlines()]
    sizes = [size for size in range(1, run.size + 1) if size != len(present)]
    size = sizes[rank % len(sizes)]
    others = [name for name in run.names if name not in present]
    run.list_hosts(present[-size:] if size < len(present) else [*present, *others][:size])


def _lacks_resize(command: Command, lab: Lab | None) -> str:
    if not command.resizes:
        return "a script with virtual ranks; --resize says that it has them"
    if lab:
        return "the drill's own host discovery; leave out --lab"
    return "" if command.processes > 1 else "more ranks; start the drill with -np 2 or more"


# -- the table ---------------------------------------------------------------------------------------------

_ALL = (
    Fault("kill", IN_PLACE, _kill, of_rank=True),
    Fault("kill-all", "standbys take over, and resume from the newest near or durable commit", _kill_all),
    Fault(
        "kill-supervisor",
        "no process outlives the supervisor; the job is started again, and resumes from the newest near or "
        "durable commit",
        _kill_supervisor,
    ),
    Fault("stop", f"the guardian kills the process; {IN_PLACE}", _stop, of_rank=True),
    _failing("loop"),
    _failing("out-of-memory"),
    _failing("script-error"),
    Fault(
        "preempt",
        "the run leaves at a durable commit with exit code 75, is started again, and resumes from there",
        _preempt,
    ),
    _failing_storage("storage-away", "away"),
    _failing_storage("disk-full", "full"),
    Fault("corrupt-commit", "the run quarantines it and resumes from the one before", _corrupt_commit),
    Fault(
        "host-cut-off",
        "a spare host takes over, and all ranks resume from a commit in memory",
        _cut_off,
        of_rank=True,
        end=_join,
        lacks=_lacks_hosts,
    ),
    Fault(
        "resize",
        "training continues on another number of ranks, and no step is lost",
        _resize,
        lacks=_lacks_resize,
    ),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
RESIZING = ("resize", "kill", "resize", "kill-all", "resize")
"""The faults of a drill with ``--resize``."""


def find(names: Sequence[str]) -> list[Fault]:
    if unknown := [name for name in names if name not in FAULTS]:
        problem = f"unknown fault '{unknown[0]}'; the faults are {', '.join(FAULTS)}"
        raise ConfigError("--faults", problem)
    return [FAULTS[name] for name in names]
