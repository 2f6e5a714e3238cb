"""When faults strike, and faults that need more than processes; real jobs: integration/test_drill.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.cli import main
from hvdrecover.drill import drill, faults, lab
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.run import Command, ScriptRun
from hvdrecover.errors import ConfigError

COMMAND = Command(("train",), 4, resizes=True)


def test_hosts_leave_and_come_and_one_stays(tmp_path: Path) -> None:
    run = ScriptRun(tmp_path / "run", COMMAND)
    run.list_hosts(run.names)
    sizes, before = [], run.listing.read_text().split()
    for rank in (0, 0, 1, 1, 2, 3):
        FAULTS["resize"].strike(run, rank)
        now = run.listing.read_text().split()
        assert set(now) & set(before)
        assert len(now) != len(before)
        if len(now) < len(before):
            assert before[0] not in now
        sizes.append(len(now))
        before = now
    assert sizes == [1, 2, 3, 2, 4, 1]


def test_a_resize_needs_room_and_the_choice_of_hosts() -> None:
    lacks = FAULTS["resize"].lacks
    assert lacks(COMMAND, None) == ""
    assert "-np 2" in lacks(replace(COMMAND, processes=1), None)
    assert "--resize" in lacks(replace(COMMAND, resizes=False), None)


def test_an_unknown_fault_is_refused_and_all_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown fault 'kil'; the faults are kill, kill-all, "):
        faults.find(["kill-all", "kil"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lab", "2"], "write --lab 3"),
        (["--lab", "3"], "--lab: only root"),
        (["--faults", "host-cut-off"], "--lab 3"),
    ],
)
def test_a_lab_that_cannot_be_is_refused(
    words: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    output = ["--output", str(tmp_path / "drill")]
    assert main(["drill", "-np", "2", *output, *words, "--", "python", "train.py"]) == 1
    assert not (tmp_path / "drill").exists() or not any((tmp_path / "drill").iterdir())
    assert problem in capsys.readouterr().err


def test_a_program_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(lab.PACKAGES, "no-such-program", "its-package")
    assert "apt-get install its-package" in lab.lacks()


NAMES = [f"fault-{number}" for number in range(20)]
FACTS = {"seed": 7, "processes": 4, "commits": 50}


@given(st.integers(1, 20), st.integers(0, 2**32), st.integers(1, 9), st.integers(3, 500), st.integers(1, 4))
def test_each_fault_strikes_as_often_as_asked_for(
    count: int, seed: int, processes: int, commits: int, repeat: int
) -> None:
    names = NAMES[:count]
    plan = drill.schedule(names, seed=seed, processes=processes, commits=commits, repeat=repeat)
    strikes = [strike for run in plan.runs for strike in run]
    assert sorted(strike.fault for strike in strikes) == sorted(names * repeat)
    assert all(0 <= strike.rank < processes and 1 <= strike.commit < commits for strike in strikes)
    for run in plan.runs:
        assert run
        assert [strike.commit for strike in run] == sorted(strike.commit for strike in run)


def test_a_seed_decides_it_all() -> None:
    assert drill.schedule(NAMES, **FACTS) == drill.schedule(NAMES, **FACTS)
    assert drill.schedule(NAMES, **FACTS) != drill.schedule(NAMES, **{**FACTS, "seed": 8})


def test_the_first_host_is_never_cut_off() -> None:
    plan = drill.schedule(["host-cut-off"] * 50, **FACTS)
    assert {strike.rank for run in plan.runs for strike in run} == {1, 2, 3}
