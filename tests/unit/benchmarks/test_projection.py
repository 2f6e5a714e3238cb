"""The table of a job that nobody has seen."""

from __future__ import annotations

import pytest

from benchmarks.projection import projected
from benchmarks.rows import Curve
from hvdrecover.launch.horovodrun import COLLECTIVE_SECONDS

_START, _SYNC = 3.0, 50.0
_FIGURES = {
    ("sizes", "a commit"): 4.0,
    ("sizes", "until a commit is durable"): 17.0,
    ("sizes", "sync of a new worker over loopback"): _SYNC,
    ("sizes", "restore, nothing cached"): 30.0,
    ("ranks", "a commit"): 0.2,
    ("ranks", 'a commit, rng="store"'): 1.7,
    ("ranks", "an election and agreement"): 1.5,
    ("guardians", "from a fault that ends the start to the orders to all"): 9.0,
    ("guardians", "until all guardians have come"): 91.0,
    ("jobs", "SIGKILL of a worker to the next step of all"): 0.2,
    ("jobs", "from the start to the first step of all"): _START,
}


def table(figures: dict[tuple[str, str], float]) -> dict[str, list[str]]:
    """The rows of the table by what they are of; each figure is the same at all numbers."""
    curves = [
        Curve(chart, what, "s", "n", "measured", {number: [figure] for number in (1.0, 2.0, 4.0)})
        for (chart, what), figure in figures.items()
    ]
    rows = [line.strip("| ").split(" | ") for line in "\n".join(projected(curves)).splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_the_loss_of_a_host_has_first_to_be_noticed() -> None:
    computed, made_of = table(_FIGURES)["a host is lost"]
    assert computed == f"{_START + _SYNC:.0f} to {COLLECTIVE_SECONDS + _START + _SYNC:.0f} s"
    assert f"up to {COLLECTIVE_SECONDS} s" in made_of


@pytest.mark.parametrize("what", ["a step", "more by gloo's ring"])
def test_what_was_not_measured_is_not_a_figure(what: str) -> None:
    assert table(_FIGURES)[what][0] == "not measured"


def test_the_whole_job_is_the_sum_of_its_parts() -> None:
    assert table(_FIGURES)["the whole job, from the checkpoint root"][0] == "83 s"


@pytest.mark.parametrize("lacking", _FIGURES)
def test_without_one_of_its_figures_there_is_no_table(lacking: tuple[str, str]) -> None:
    assert table({key: each for key, each in _FIGURES.items() if key != lacking}) == {}
