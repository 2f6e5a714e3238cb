"""Runs that were over before their faults could strike are repeated, but not for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdrecover.drill import drill as drills
from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.drill import Drill
from hvdrecover.drill.outcome import Outcome, Result
from hvdrecover.drill.runs import Command
from hvdrecover.drill.schedule import Schedule, Strike

COMMITS = 21
KILL, STOP = Strike("kill", 0, 15), Strike("stop", 1, 19)
BROKEN = Finding(rules.WEIGHTS, "commit 3 is not that")


def struck_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: Sequence[tuple[Strike, ...]],
    counts: Sequence[int],
    *findings: Finding,
) -> list[tuple[Strike, ...]]:
    """Drill with these runs, of which each has so many of its faults strike; what each was to have."""
    number: Iterator[int] = iter(counts)
    told: list[tuple[Strike, ...]] = []

    def run(self: Drill, place: int, strikes: tuple[Strike, ...]) -> Result:
        told.append(strikes)
        count = next(number)
        made = SimpleNamespace(folder=folder, leaving=[])
        struck: list[Any] = list(strikes[:count])
        nothing = cast(Any, None)
        return Result(cast(Any, made), nothing, nothing, struck, list(strikes[count:]), list(findings))

    monkeypatch.setattr(Drill, "_run", run)
    monkeypatch.setattr(drills, "measure", lambda *facts: None)
    monkeypatch.setattr(drills, "longest_stall", lambda events: None)
    made = Drill(folder, Command(("train",), 2))
    monkeypatch.setattr(
        made, "_clean", SimpleNamespace(newest=COMMITS, folder=folder, testimony=lambda: None)
    )
    outcome: Outcome = made.strike(Schedule(0, 2, tuple(runs)), {})
    assert outcome.schedule.runs == tuple(told)
    assert len(json.loads((folder / "schedule.json").read_text())["runs"]) == len(told)
    assert list(number) == []
    return told


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


def test_each_run_has_repeats_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = struck_in(tmp_path, monkeypatch, [(KILL,), (STOP,)], [0] * 6)
    assert [run[0].fault for run in runs] == ["kill", "stop"] * 3


def test_a_run_that_breaks_a_rule_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert struck_in(tmp_path, monkeypatch, [(KILL,)], [0], BROKEN) == [(KILL,)]
