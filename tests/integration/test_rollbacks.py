"""Real jobs that roll back though no process dies."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.jobs import read_events, run_job, static, supervised

SCRIPT = Path(__file__).with_name("scripts") / "evaluation.py"
OPTIONS = ("--no-standby", "--hang-timeout", "40", "--max-restarts", "0")
# The other rank waits for 15 s. Horovod takes up to 15 s more to notice: 10 until tensors leave its cache,
# and 5 until it looks again. The hang timeout of 40 s must not be reached.
BUSY = 34.0

pytestmark = pytest.mark.acceptance


def test_a_long_evaluation_is_learnt_and_what_always_fails_comes_to_an_end(tmp_path: Path) -> None:
    settings = {"BUSY": str(BUSY), "HVDRECOVER_EVENTS": str(tmp_path / "events"), "OMP_NUM_THREADS": "1"}
    settings["HVDRECOVER_CHECKPOINT"] = f"file://{tmp_path}/root"
    log = run_job([*supervised(*OPTIONS), sys.executable, str(SCRIPT)], tmp_path / "log", settings, code=1)
    events = read_events(tmp_path / "events")
    # The evaluation: one rollback, one warning, and the second attempt is waited for.
    (kept,) = [event for event in events if event["kind"] == "kept_waiting"]
    assert (kept["rank"], kept["limit"]) == (0, 15)
    assert kept["seconds"] >= BUSY
    assert kept["where"].startswith(str(SCRIPT)) and kept["where"].endswith("in do_step")
    assert len(re.findall(r"rank 0 was busy for .* `with recover\.paused\(\):`", log)) == 1
    first_fault = next(place for place, event in enumerate(events) if event["kind"] == "fault")
    before = events[:first_fault]
    assert max(event["commit"] for event in before if event["kind"] == "commit") == 3
    # The collective: four attempts, and then an error.
    sources = [event["source"] for event in before if event["kind"] == "sync" and event["rank"] == 0]
    assert sources == ["initial"] + ["memory"] * 4
    assert re.search("NoProgressError: commit 3: .* 3 times ", events[first_fault]["detail"])
    assert "Mismatched ALLREDUCE tensor shapes" in events[first_fault]["detail"]


def test_after_bad_batches_a_resize_and_a_kill_each_sample_was_seen_once_or_is_left_out(
    tmp_path: Path,
) -> None:
    script = str(Path(__file__).with_name("scripts") / "left_out.py")

    def start(launcher: list[str], code: int | None = 0, **settings: str) -> str:
        environ = {"OMP_NUM_THREADS": "1", "HVDRECOVER_NEAR": "off", **settings}
        command = [*launcher, sys.executable, script, str(tmp_path)]
        return run_job(command, tmp_path / "log", environ, code=code)

    # The batch of 4..7 is left out; the commit is before 0..3.
    start(static(2), None, BAD="5", RATE="0.1", STOP="yes")
    log = start(supervised("--no-standby", workers=3), BAD="1", RATE="0.2")  # whose batch is 0..3, 8 and 9
    assert len(re.findall("going back to the last commit", log)) == 2, log  # of both jobs
    assert "optimizer.lr to 0.2, but the run was started with 0.1" in log
    assert "state.metric: commits do not hold total" in log
    first, second = json.loads((tmp_path / "seen.json").read_text())
    assert first == [0] * 10 + [1] * 30
    assert (tmp_path / "killed").exists()
    assert second == [2] * 2 + [1] * 38  # three ranks fill their last round up with the first samples
