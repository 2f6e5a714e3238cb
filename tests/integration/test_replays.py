"""Bits of gradients that flip in mid-job are found, the process is named, and the right ones are used."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import PATIENCE, read_events, run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "replays.py"
OF_EPOCH = 51  # steps
PROCESSES, FLIPS = 2, 40
GUARDS: dict[str, dict[str, Any]] = {
    "none": {},
    "undisturbed": {"replay": 1.0},
    "heal": {"replay": 1.0, "on_divergence": "heal", "flips": FLIPS},
    "raise": {"replay": 1.0, "flips": 1},
}

Outcomes = dict[str, list[dict[str, Any]]]

pytestmark = pytest.mark.timeout(1800)  # seconds; the first test waits for the whole job, which may be slow


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Path]:
    """The outcome of each guard, by process; and the folder of events."""
    folder = tmp_path_factory.mktemp("replays")
    words = [str(folder), "1", *(json.dumps(each) for each in GUARDS.values())]
    environ = {"OMP_NUM_THREADS": "1", "HVDRECOVER_EVENTS": str(folder / "events")}
    command = [*static(PROCESSES), sys.executable, str(SCRIPT), *words]
    run_job(command, folder / "log", environ, patience=3 * PATIENCE)
    outcomes = {
        name: [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(PROCESSES)]
        for number, name in enumerate(GUARDS)
    }
    return outcomes, folder / "events"


def digest(outcomes: list[dict[str, Any]]) -> str:
    """Return the digest of what all processes hold at the end of a run that was not stopped."""
    assert [each["error"] for each in outcomes] == [None] * len(outcomes)
    ((steps, found),) = {(each["steps"], each["digest"]) for each in outcomes}
    assert steps % OF_EPOCH == 0
    return str(found)


def test_replays_change_nothing(job: tuple[Outcomes, Path]) -> None:
    outcomes, _ = job
    assert digest(outcomes["undisturbed"]) == digest(outcomes["none"])
    assert [each["seen"] for each in outcomes["undisturbed"]] == [each["seen"] for each in outcomes["none"]]


def test_each_flipped_bit_is_found_named_and_healed(job: tuple[Outcomes, Path]) -> None:
    outcomes, events = job
    assert digest(outcomes["heal"]) == digest(outcomes["none"])
    made = sorted(flip for each in outcomes["heal"] for flip in each["made"])
    assert [step for step, *_ in made] == list(range(FLIPS))
    assert len({process for _, process, *_ in made}) == len(outcomes["heal"])
    found = [event for event in read_events(events, "replay") if event["action"] == "heal"]
    assert [[each["step"], *each["ranks"]] for each in found] == [flip[:2] for flip in made]
    assert not any(each["tied"] for each in found)
    for each, (_, process, tensor, virtual) in zip(found, made, strict=True):
        (line,) = each["tensors"]
        assert line.startswith(f"gradient of {tensor}, F32") and line.endswith(f": on rank {process}")
        assert each["virtual"] == virtual


def test_a_flipped_bit_stops_the_job_before_it_is_applied(job: tuple[Outcomes, Path]) -> None:
    outcomes, _ = job
    ((_, process, tensor, virtual),) = [flip for each in outcomes["raise"] for flip in each["made"]]
    for each in outcomes["raise"]:
        assert (each["error"], each["steps"]) == ("DivergedError", 1)
        assert re.search(f"virtual rank {virtual} .*step 0 .* rank {process}: ", each["text"])
        assert f"gradient of {tensor}, F32" in each["text"]
