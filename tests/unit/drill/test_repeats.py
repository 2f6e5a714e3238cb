"""Runs that ended before their faults could strike are repeated, but not forever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hvdrecover.drill import check
from hvdrecover.drill.check import Finding
from hvdrecover.drill.drill import Drill, Result, Schedule, Strike, Struck
from hvdrecover.drill.run import Command
from tests.unit.drill.lines import Story

COMMITS = 21
KILL, STOP = Strike("kill", 0, 15), Strike("stop", 1, 19)
BROKEN = Finding(check.SAME_COMMITS, "commit 3 differs")


def struck_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: Sequence[tuple[Strike, ...]],
    counts: Sequence[int],
    *findings: Finding,
) -> list[tuple[Strike, ...]]:
    """Drill with these runs, in which so many faults strike; return the faults planned for each run."""
    number: Iterator[int] = iter(counts)
    planned: list[tuple[Strike, ...]] = []

    def run(self: Drill, place: int, strikes: tuple[Strike, ...]) -> Result:
        planned.append(strikes)
        count = next(number)
        struck = [Struck(each, each.commit) for each in strikes[:count]]
        return Result(folder, struck, list(strikes[count:]), list(findings))

    monkeypatch.setattr(Drill, "_run", run)
    drill = Drill(folder, Command(("train",), 2))
    drill.clean = Story().rendezvous(1, COMMITS - 1).commit().records
    outcome = drill.strike(Schedule(0, 2, tuple(runs)), {})
    assert outcome.schedule.runs == tuple(planned)
    assert len(json.loads((folder / "schedule.json").read_text())["runs"]) == len(planned)
    assert list(number) == []
    return planned


def test_faults_that_a_run_was_over_for_strike_in_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = struck_in(tmp_path, monkeypatch, [(KILL, STOP)], [1, 1])
    assert runs == [(KILL, STOP), (Strike("stop", 1, 10),)]


def test_a_run_without_any_fault_is_repeated_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = (Strike("kill", 0, 10),)
    assert struck_in(tmp_path, monkeypatch, [(KILL,)], [0, 0, 1]) == [(KILL,), again, again]
    assert struck_in(tmp_path, monkeypatch, [(KILL,)], [0, 0, 0]) == [(KILL,), again, again]


def test_a_run_that_breaks_a_rule_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert struck_in(tmp_path, monkeypatch, [(KILL,)], [0], BROKEN) == [(KILL,)]
