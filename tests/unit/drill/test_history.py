from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill import history
from hvdrecover.drill.advice import Measured, Phases, Rates
from hvdrecover.drill.forecast import forecast
from hvdrecover.drill.measured import longest_stall, measure
from hvdrecover.reporting import reading
from hvdrecover.reporting.summary import summarise
from tests.unit.drill.lines import Story

JUMP = 3600.0
DAY = 86400.0


def write(folder: Path, *events: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    common = {"host": "h", "pid": 1, "rank": 0}
    (folder / "h-1.jsonl").write_text("".join(f"{json.dumps({**common, **event})}\n" for event in events))
    return folder


def a_run(folder: Path) -> Path:
    """Starts at 100 s, is killed at 110 s, and steps again at 111 s."""
    return write(
        folder,
        {"time": 100.0, "kind": "start", "attempt": 1},
        {"time": 101.0, "kind": "sync", "source": "initial", "generation": 1, "commit": 0, "size": 1},
        *(
            {"time": 101.0 + n, "kind": "commit", "generation": 1, "commit": n, "stall": n / 10}
            for n in (1, 2, 3)
        ),
        {"time": 102.5, "kind": "durable", "generation": 1, "commit": 1, "bytes": 1, "seconds": 0.5},
        {
            "time": 110.0,
            "kind": "fault",
            "fault": "crash",
            "slot": 0,
            "exit": -9,
            "commit": [1, 3],
            "steps": 1,
        },
        {"time": 110.5, "kind": "sync", "source": "durable", "generation": 2, "commit": 3, "size": 1},
        {
            **{"time": 111.0, "kind": "recovered", "generation": 2, "commit": 3, "reset": 0.1},
            **{"rendezvous": 0.2, "load": 0.1, "sync": 0.1, "first_step": 0.2, "seconds": 0.7},
        },
        {"time": 112.0, "kind": "finished", "generation": 2, "commit": 4},
    )


@given(st.sets(st.integers(0, 9)))
def test_events_from_after_the_end_are_set_back(jumped: set[int]) -> None:
    times = [100.0 + place + (JUMP if place in jumped else 0.0) for place in range(10)]
    events = [{"time": time, "kind": "fault", "host": "h", "place": n} for n, time in enumerate(times)]
    found = [reading.parse(json.dumps(event)) for event in events]
    log = reading.Log(tuple(found), (), {"h": (min(times), max(times))}, 1, 0)  # type: ignore[arg-type]
    settled = history.settled(log, 110.0, JUMP)
    assert [(event.time, event.facts["place"]) for event in settled.events] == [
        (100.0 + place, place) for place in range(10)
    ]
    first, last = settled.spans["h"]
    assert 100.0 <= first <= last <= 110.0


def test_a_run_whose_clock_was_never_set_stays_as_it_is(tmp_path: Path) -> None:
    log = reading.read(a_run(tmp_path / "events"))
    assert history.settled(log, 112.0, JUMP) == log


def test_what_was_measured_is_put_together(tmp_path: Path) -> None:
    clean, log = a_run(tmp_path / "clean"), reading.read(a_run(tmp_path / "drilled"))
    told = Story(size=1).rendezvous(1, 0).step().commit().step().commit().told
    found = measure(clean, told, [log], [4.0, 6.0])
    assert (found.stall, found.write, found.leave) == (pytest.approx(0.2), 0.5, 6.0)
    assert found.interval == pytest.approx(3.0)  # a step, a batch and a commit, a second each
    assert found.silence == pytest.approx(1.0)
    assert found.in_memory == ()
    (phases,) = found.from_durable
    assert phases.seconds == pytest.approx(summarise(log).faults[0].recovery.seconds)  # type: ignore[union-attr]
    assert (phases.detect, phases.rendezvous) == (pytest.approx(0.3), 0.2)
    assert longest_stall([clean]) == pytest.approx(0.3)


RECOVERIES = (Phases(*[0.1] * 6), Phases(*[0.2] * 6), Phases(*[0.3] * 6))


def test_a_forecast_begins_with_its_assumption_and_is_worse_the_more_failures() -> None:
    measured = Measured(stall=0.05, interval=60.0, in_memory=RECOVERIES[:2], from_durable=RECOVERIES[2:])
    found = forecast(measured, Rates(workers=30, mtbf_worker=90 * DAY), others=(7 * DAY, DAY, 60.0))
    assert found is not None
    assert (found.recoveries, found.recovery) == (3, pytest.approx(1.2))
    assert list(found.goodput) == [3 * DAY, DAY, 60.0]  # more rarely than assumed is not of interest
    shares = list(found.goodput.values())
    assert shares == sorted(shares, reverse=True) and 0.0 < shares[-1] < shares[0] < 1.0


@pytest.mark.parametrize(
    "lacking",
    [
        Measured(),
        Measured(stall=0.1, interval=1.0, in_memory=RECOVERIES[:2]),
        Measured(stall=2.0, interval=1.0, in_memory=RECOVERIES),
    ],
)
def test_without_numbers_there_is_no_forecast(lacking: Measured) -> None:
    assert forecast(lacking, Rates(workers=2)) is None
