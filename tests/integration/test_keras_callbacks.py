"""Keras's callbacks in a real job: they decide and write as if nothing had happened to it."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.integration.conftest import IS_LONG
from tests.support.jobs import PATIENCE, Job, static, supervised, wait_until

SCRIPT = Path(__file__).with_name("scripts") / "keras_callbacks.py"
STOPS = 7
# In an epoch and at its end behind the user's callbacks: rank 0, which has the files; both; the whole job.
FAULTS = ["1 3 0", *(["2 5 all", "3 end 0"] if IS_LONG else []), f"{STOPS} end job"]

pytestmark = pytest.mark.acceptance


class Run:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def start(self, launcher: list[str], faults: tuple[str, ...] | list[str] = ()) -> Job:
        command = [*launcher, sys.executable, str(SCRIPT), str(self.folder)]
        events = {"HVDRECOVER_EVENTS": str(self.folder / "events")}
        return Job(command, self.folder / "log.txt", {"FAULTS": "\n".join(faults), **events})

    def traces(self) -> Counter[str]:
        """The number of times that each process has traced its training step."""
        return Counter((self.folder / "traces").read_text().split())

    def outcome(self) -> dict[str, Any]:
        ranks = [json.loads((self.folder / f"outcome-{rank}").read_text()) for rank in (0, 1)]
        return {
            "epochs": [rank["epoch"] for rank in ranks],
            "histories": [rank["history"] for rank in ranks],
            "variables": [rank["variables"] for rank in ranks],
            "rows": list(csv.reader((self.folder / "log.csv").read_text().splitlines())),
            "best": weights(self.folder / "best.weights.h5"),
        }


def weights(path: Path) -> dict[str, bytes]:
    found = {}

    def see(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(see)
    return found


def test_a_job_that_is_killed_again_and_again_decides_and_writes_the_same(
    tmp_path: Path, jobs: list[Job]
) -> None:
    clean, run = Run(tmp_path / "clean"), Run(tmp_path / "run")
    jobs.append(clean.start(static(2)))
    assert jobs[-1].wait(PATIENCE) == 0, jobs[-1].tail()
    jobs.append(run.start(supervised("--no-standby"), FAULTS))
    last = run.folder / FAULTS[-1].replace(" ", "-")
    wait_until(jobs[-1], last.exists, "last fault")
    jobs[-1].kill()
    jobs.append(run.start(supervised("--no-standby"), FAULTS))
    assert jobs[-1].wait(PATIENCE) == 0, jobs[-1].tail(60)
    assert all((run.folder / fault.replace(" ", "-")).exists() for fault in FAULTS)
    expected, found = clean.outcome(), run.outcome()
    assert expected["epochs"] == [STOPS + 1] * 2
    assert len(expected["best"]) > 2
    for what, value in expected.items():
        assert found[what] == value, what
    # Who has survived a fault goes through `fit` again, with what it has traced before. Keras itself traces a
    # step twice where the first time makes variables, those of metrics.
    undisturbed, traces = clean.traces(), run.traces()
    assert len(undisturbed) == 2
    assert len(traces) > 2 + len(FAULTS)
    assert max(traces.values()) <= max(undisturbed.values())
