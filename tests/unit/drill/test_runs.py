from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.discovery.health import Health
from hvdrecover.discovery.history import History, dumps
from hvdrecover.drill.runs import Command, Run, placing


def test_options_that_place_a_job_are_found_in_both_spellings() -> None:
    assert placing(["--hosts=a:1", "--grace", "5", "-p", "22"]) == ["--hosts", "-p"]


@pytest.mark.parametrize("option", ["-H", "--hosts=a:1", "--discover"])
def test_a_run_knows_whether_it_is_told_its_hosts(option: str, tmp_path: Path) -> None:
    assert Run(tmp_path, Command((), 2, (option,))).names_hosts
    assert not Run(tmp_path, Command((), 2, ("--grace", "5"))).names_hosts


def test_a_run_that_is_not_started_leaves_no_trace(tmp_path: Path) -> None:
    Run(tmp_path / "clean", Command((), 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("well", "after", "expected"), [(True, 1.0, True), (True, -1.0, False), (False, 1.0, False)]
)
def test_hosts_are_well_when_that_was_found_after_the_repair(
    well: bool, after: float, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Command((), 2))
    monkeypatch.setattr("hvdrecover.drill.runs.time.time", lambda: 100.0)
    run.repaired()
    (tmp_path / "hosts").mkdir()
    history = History(health={"localhost": Health(well, 0.0, 100.0 + after)})
    (tmp_path / "hosts" / "history.json").write_bytes(dumps(history))
    assert run.hosts_are_well() is expected
