"""Real jobs that roll back though no process dies."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hvdrecover.examples.digits_run import PATIENCE, supervised
from hvdrecover.launch.job import Job

SCRIPT = Path(__file__).with_name("scripts") / "evaluation.py"
OPTIONS = ("--no-standby", "--hang-timeout", "40", "--max-restarts", "0")
BUSY = 30.0  # the other waits for 15 s, and Horovod takes up to 10 s more to notice


def test_a_long_evaluation_is_learnt_and_what_always_fails_comes_to_an_end(tmp_path: Path) -> None:
    settings = {"BUSY": str(BUSY), "HVDRECOVER_EVENTS": str(tmp_path / "events"), "OMP_NUM_THREADS": "1"}
    settings["HVDRECOVER_CHECKPOINT"] = f"file://{tmp_path}/root"
    job = Job([*supervised(*OPTIONS), sys.executable, str(SCRIPT)], tmp_path / "log", settings)
    try:
        assert job.wait(PATIENCE) not in (0, 75), job.tail()
    finally:
        job.kill()
    lines = "".join(path.read_text() for path in (tmp_path / "events").glob("*.jsonl")).splitlines()
    events = sorted((json.loads(line) for line in lines), key=lambda event: event["time"])
    # The evaluation: one rollback, one warning, and the second attempt is waited for.
    (kept,) = [event for event in events if event["kind"] == "kept_waiting"]
    assert (kept["rank"], kept["limit"]) == (0, 15)
    assert kept["seconds"] >= BUSY
    assert kept["where"].startswith(str(SCRIPT)) and kept["where"].endswith("in do_step")
    log = job.log.read_text()
    assert len(re.findall(r"rank 0 was busy for .* `with recover\.paused\(\):`", log)) == 1
    first_fault = next(place for place, event in enumerate(events) if event["kind"] == "fault")
    before = events[:first_fault]
    assert max(event["commit"] for event in before if event["kind"] == "commit") == 3
    # The collective: four attempts, and then an error.
    sources = [event["source"] for event in before if event["kind"] == "sync" and event["rank"] == 0]
    assert sources == ["initial"] + ["memory"] * 4
    assert re.search("NoProgressError: commit 3: .* 3 times ", events[first_fault]["detail"])
    assert "Mismatched ALLREDUCE tensor shapes" in events[first_fault]["detail"]
