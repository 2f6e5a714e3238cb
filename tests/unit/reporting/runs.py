"""Records of made-up runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdrecover.events import Record

Ranks = Mapping[int, tuple[str, int]]
"""Rank to the host and the pid of its process."""

BEGIN = 1_767_268_800.0  # 2026-01-01 12:00:00 UTC
PHASES = {"reset": 0.02, "rendezvous": 0.11, "load": 0.01, "sync": 0.06, "first_step": 0.05}


class Run:
    """Writes a record; times are seconds since the run's beginning."""

    def __init__(self, folder: Path, begin: float = BEGIN) -> None:
        self.folder = folder
        self._begin = begin
        self._record = Record(folder)

    def report(
        self, time: float, kind: str, host: str = "node-1", pid: int = 1, rank: int = 0, **facts: Any
    ) -> None:
        line = {"time": self._begin + time, "kind": kind, "host": host, "pid": pid, "rank": rank, **facts}
        self._record.add(line)

    def rendezvous(
        self, time: float, ranks: Ranks, generation: int, commit: int, source: str = "memory"
    ) -> None:
        place = {"source": source, "generation": generation, "commit": commit, "size": len(ranks)}
        for rank, (host, pid) in ranks.items():
            self.report(time, "sync", host, pid, rank, **place, seconds=0.01)

    def step(self, time: float, ranks: Ranks, generation: int, commit: int, **phases: float) -> None:
        """The ranks make their first step after a recovery; each 0.01 s after the one before it."""
        spent = {**PHASES, **phases}
        for rank, (host, pid) in ranks.items():
            facts = {"generation": generation, "commit": commit, **spent, "seconds": sum(spent.values())}
            self.report(time + 0.01 * rank, "recovered", host, pid, rank, **facts)

    def commit(self, ranks: Ranks, generation: int, commits: Mapping[int, float]) -> None:
        """The ranks make commits: number to time."""
        for rank, (host, pid) in ranks.items():
            for commit, time in commits.items():
                self.report(time, "commit", host, pid, rank, generation=generation, commit=commit)

    def fault(
        self, time: float, kind: str = "crash", host: str = "node-1", rank: int = 0, **facts: Any
    ) -> None:
        """A guardian notices a fault in slot 0."""
        unknown = dict.fromkeys(("exit", "commit", "steps", "silent"))
        found = {"fault": kind, "slot": 0, "detail": "", **unknown, **facts}
        self.report(time, "fault", host, 9, rank, **found)

    def reset(self, time: float, ranks: Ranks, steps: int) -> None:
        """The ranks roll back so many steps, before the next rendezvous."""
        for rank, (host, pid) in ranks.items():
            self.report(time, "reset", host, pid, rank, reason="HorovodInternalError: x", steps=steps)

    def finish(self, time: float, ranks: Ranks, generation: int, commit: int) -> None:
        for rank, (host, pid) in ranks.items():
            self.report(time, "finished", host, pid, rank, generation=generation, commit=commit)


TWO: Ranks = {0: ("node-1", 10), 1: ("node-2", 20)}
REPLACED: Ranks = {0: ("node-1", 10), 1: ("node-2", 21)}


def example(folder: Path) -> Run:
    """The run of the documentation: a crash and a hang on two hosts, then the end."""
    run = Run(folder)
    versions = {"python": "3.11.9", "torch": "2.13.0", "keras": None}
    found = {"machine": "Linux x86_64, 2 processors", "versions": versions}
    run.report(0, "start", "node-1", 5, attempt=1, command=["python", "train.py"], **found)
    run.rendezvous(4, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 14, 2: 24, 3: 34})
    lost = {"host": "node-2", "rank": 1, "commit": [1, 3], "steps": 4}
    run.fault(36, "crash", exit=-9, silent=0.1, detail="killed by SIGKILL", **lost)
    run.report(36.01, "restart", "node-2", 9, 1, scope="slot", warm=True, attempt=1)
    run.reset(36.05, {0: TWO[0]}, steps=5)
    run.rendezvous(36.25, REPLACED, 2, 3)
    run.step(36.3, REPLACED, 2, 3)
    run.commit(REPLACED, 2, {4: 46, 5: 56})
    stuck = {"host": "node-1", "rank": 0, "commit": [2, 5], "steps": 1}
    where = "no progress; killed in load_batch (train.py:31)"
    run.fault(80, "hang", exit=-9, silent=20.0, detail=where, **stuck)
    run.report(80.01, "restart", "node-1", 9, 0, scope="slot", warm=False, attempt=1)
    run.reset(80.1, {1: REPLACED[1]}, steps=1)
    last = {0: ("node-1", 11), 1: REPLACED[1]}
    run.rendezvous(82.6, last, 3, 5)
    run.step(82.7, last, 3, 5, load=2.3)
    run.commit(last, 3, {6: 92, 7: 102})
    run.finish(103, last, 3, 7)
    run.report(104, "end", "node-1", 5, code=0, reason="finished")
    return run
