"""Hosts become unhealthy, and recover."""

from __future__ import annotations

import pytest

from hvdrecover.discovery.health import EVERY, Health, is_due, judged


def course(results: str) -> str:
    """Return what becomes of a host by good (+) and failed (-) checks, one a second."""
    health: Health | None = None
    states = ""
    for now, result in enumerate(results):
        health = judged(health, "" if result == "+" else "it is down", now)
        states += "+" if health.healthy else "-"
    return states


@pytest.mark.parametrize(
    ("results", "states"),
    [
        ("+++++", "+++++"),
        ("+-+-+-", "++++++"),  # one failed check is chance
        ("+--", "++-"),
        ("+--++-+++", "++------+"),  # who has failed has to prove itself
        ("-+", "--"),
        ("-+++", "---+"),
        ("+--+++--", "++---++-"),
    ],
)
def test_checks_in_a_row_count(results: str, states: str) -> None:
    assert course(results) == states


def test_what_is_known_says_since_when_and_why() -> None:
    health = judged(judged(None, "", 1.0), "port 22: refused", 2.0)
    assert health == Health(True, 1.0, 2.0, streak=1, why="port 22: refused")
    health = judged(health, "port 22: no route", 3.0)
    assert health == Health(False, 3.0, 3.0, why="port 22: no route")
    assert judged(health, "", 4.0) == Health(False, 3.0, 4.0, streak=1, why="port 22: no route")


def test_who_is_well_is_checked_less_often() -> None:
    healthy = judged(None, "", 100.0)
    assert is_due(None, 100.0)
    assert not is_due(healthy, 100.0 + EVERY - 0.1)
    assert is_due(healthy, 100.0 + EVERY)
    assert is_due(healthy, 99.0)  # the clock was set back
    assert is_due(judged(healthy, "x", 101.0), 101.0)
    assert is_due(judged(None, "x", 101.0), 101.0)
