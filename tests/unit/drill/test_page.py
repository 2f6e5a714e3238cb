"""The page of a drill."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdrecover.drill import page
from hvdrecover.drill.advice import Measured
from hvdrecover.drill.forecast import Forecast
from hvdrecover.drill.outcome import Outcome, Result, Struck
from hvdrecover.drill.runs import Run
from hvdrecover.drill.schedule import Schedule, Strike
from hvdrecover.reporting import reading, summary
from hvdrecover.reporting.page import drawing
from hvdrecover.reporting.page.content import Badge, Facts, Table
from hvdrecover.reporting.timeline import Timeline
from tests.unit.reporting.runs import BEGIN, example

RUN = cast(Run, SimpleNamespace(folder=Path("faults-1")))


def struck(fault: str, at: float, seconds: float | None, whom: str = "") -> Struck:
    return Struck(Strike(fault, 1, 3), at, BEGIN + at, whom, 3, recovered=True, seconds=seconds)


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    """A drill of which a guardian noticed fewer faults, other names, and shorter times."""
    log = reading.read(example(tmp_path / "events").folder)
    faults = [
        struck("kill", 36.0, 0.35, "rank 1"),
        struck("storage-away", 45.0, None),
        struck("stop", 59.5, 23.2, "rank 0"),
        struck("host-powered-off", 90.0, 15.5, "the host of rank 1"),
    ]
    result = Result(RUN, log, summary.summarise(log), faults)
    return Outcome(Schedule(1, 2, ()), Measured(), 0.01, [result], {}, tmp_path)


def blocks(outcome: Outcome, forecast: Forecast | None = None) -> list[Any]:
    made = page.page("python train.py", outcome, [], forecast)
    return [block for section in made.sections for block in section.blocks]


def table(outcome: Outcome, caption: str) -> Table:
    return next(
        each for each in blocks(outcome) if isinstance(each, Table) and each.caption.startswith(caption)
    )


def test_the_headline_is_the_worst_of_its_table(outcome: Outcome) -> None:
    made = page.page("python train.py", outcome, [], None)
    headline = next(figure for figure in made.figures if figure.name == "slowest recovery")
    assert headline.value == "23.2 s"
    assert headline.value in [row[-1] for row in table(outcome, "Seconds from each kind").rows]


def test_each_fault_is_there_once_by_its_number_and_name(outcome: Outcome) -> None:
    (drawn,) = (drawing.draw(each) for each in blocks(outcome) if isinstance(each, Timeline))
    rows = table(outcome, "Faults of the run").rows
    assert [label.text for label in drawn.labels if label.fault] == [f"{row[0]} {row[2]}" for row in rows]
    titles = [shape.title for shape in drawn.shapes if shape.style == "fault" and "fault 1:" in shape.title]
    assert all("kill of rank 1, " in title for title in titles) and titles
    assert not re.search("crash|hang|lost_host", " ".join(shape.title for shape in drawn.shapes))


def test_a_recovery_is_drawn_from_the_moment_at_which_its_fault_struck(outcome: Outcome) -> None:
    (shown,) = (each for each in blocks(outcome) if isinstance(each, Timeline))
    times = [each.time for each in shown.faults]
    for rank, lane in shown.lanes.items():
        recoveries = [each.begin for each in lane if each.activity == "recovery"]
        assert recoveries and set(recoveries) <= set(times), rank
        assert all(one.end <= other.begin for one, other in itertools.pairwise(lane)), rank


def test_no_time_is_left_blank(outcome: Outcome) -> None:
    times = {row[2]: row[-1] for row in table(outcome, "Faults of the run").rows}
    assert times["storage-away"] == "training continued"
    assert times["host-powered-off"] == "15.5 s"
    kinds = {row[0]: row[-2] for row in table(outcome, "Seconds from each kind").rows}
    assert (kinds["storage-away"], kinds["host-powered-off"]) == ("training continued", "15.5 s")
    outcome.results[0].struck[1].recovered = False
    last = {row[2]: row[-1] for row in table(outcome, "Faults of the run").rows}
    assert last["storage-away"] == Badge("not recovered", "bad")


def test_it_says_when_where_and_on_what_the_drill_ran(outcome: Outcome) -> None:
    facts = blocks(outcome)[-1]
    assert isinstance(facts, Facts)
    assert set(facts.values) == {"date", "machine", "versions", "repeated", "goodput"}
    assert facts.values["date"].startswith(("2026-01-01", "2025-12-31"))
    assert facts.values["versions"] == "python 3.11.9, torch 2.13.0"


def test_a_forecast_states_its_assumption(outcome: Outcome) -> None:
    found = blocks(outcome, Forecast(5, 2.0, {86400.0: 0.99, 3600.0: 0.9}))
    told = " ".join(text for each in found for text in getattr(each, "texts", ()))
    assert "fails every 24 h on the average" in told and "2.00 s, as the 5 recoveries did" in told
