"""The ways in which Horovod's elastic TensorFlow API fails (DESIGN section 6), and that ours does not.

Each is tried with Horovod's own classes too: where they should stop failing one day, we want to know.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.examples.digits_run import PATIENCE, elastic, static
from hvdrecover.launch.job import Job

SCRIPT = Path(__file__).with_name("scripts") / "tensorflow_failures.py"
Try = Callable[..., tuple[int | None, list[dict[str, Any]], str]]


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Try]:
    """Runs a case to its end; gives the exit code, the ranks' reports and the log."""
    jobs: list[Job] = []

    def run(side: str, launcher: list[str], *case: str) -> tuple[int | None, list[dict[str, Any]], str]:
        job = Job([*launcher, sys.executable, str(SCRIPT), *case], tmp_path / "log.txt", {"SIDE": side})
        jobs.append(job)
        code = job.wait(PATIENCE)
        log = job.log.read_text(errors="replace")
        return code, [json.loads(line) for line in re.findall(r"report (\{.*\})", log)], log

    yield run
    for job in jobs:
        job.kill()


def test_a_sync_sends_the_variables(attempt: Try) -> None:
    code, reports, log = attempt("hvdrecover", static(2), "sync")
    assert code == 0, log
    assert [each["value"] for each in reports] == [[10.0], [10.0]]


def test_horovods_own_sync_sends_none(attempt: Try) -> None:
    _, reports, _ = attempt("horovod", static(2), "sync")
    assert sorted(each["value"] for each in reports) != [[10.0], [10.0]]


def test_what_is_not_committed_stays_together(attempt: Try) -> None:
    code, reports, log = attempt("hvdrecover", static(2), "uncommitted")
    assert code == 0, log
    assert [(each["value"], each["batch"]) for each in reports] == [([5.0], 5)] * 2


def test_horovods_own_sync_takes_back_the_counters_but_not_the_variables(attempt: Try) -> None:
    _, reports, _ = attempt("horovod", static(2), "uncommitted")
    assert [(each["value"], each["batch"]) for each in reports] == [([5.0], 0)] * 2


def test_the_slots_of_an_optimizer_that_was_not_used_are_there_and_in_step(attempt: Try) -> None:
    code, reports, log = attempt("hvdrecover", static(2), "slots")
    assert code == 0, log
    assert [each["slots"] for each in reports] == [6, 6]  # iteration, rate, and two for each variable
    assert len({each["content"] for each in reports}) == 1


def test_horovods_own_state_of_a_model_fails_on_keras_3(attempt: Try) -> None:
    code, reports, log = attempt("horovod", static(2), "slots")
    assert code != 0
    assert reports == []
    assert "object is not callable" in log


def test_gradients_of_keras_variables_are_averaged(attempt: Try) -> None:
    code, reports, log = attempt("hvdrecover", static(2), "tape")
    assert code == 0, log
    assert [each["gradients"] for each in reports] == [[[[1.5, 1.5]] * 3, [1.0, 1.0]]] * 2


def test_horovods_own_tape_fails_on_keras_variables(attempt: Try) -> None:
    code, reports, log = attempt("horovod", static(2), "tape")
    assert code != 0
    assert reports == []
    assert "has no attribute 'ref'" in log


@pytest.mark.parametrize("collective", ["grouped_allreduce", "alltoall", "reducescatter"])
def test_a_lost_peer_is_recognised_whichever_collective_it_breaks(
    attempt: Try, collective: str, hosts: Path, tmp_path: Path
) -> None:
    code, reports, log = attempt("hvdrecover", elastic(hosts), "lost", collective, str(tmp_path))
    assert (tmp_path / "killed").exists()
    assert reports == [{"rank": 0, "result": "trained", "batch": 10}], log
    assert code == 0


def test_horovods_own_run_returns_none_when_a_grouped_allreduce_fails(
    attempt: Try, hosts: Path, tmp_path: Path
) -> None:
    _, reports, _ = attempt("horovod", elastic(hosts), "lost", "grouped_allreduce", str(tmp_path))
    assert (tmp_path / "killed").exists()
    [report] = reports
    assert report["result"] is None
    assert report["batch"] < 10


@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_any_other_error_is_raised_with_its_traceback(
    attempt: Try, where: str, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "5")  # for as long peers may turn out to be lost
    code, reports, log = attempt("hvdrecover", elastic(hosts), "mistake", where)
    failed = [report for report in reports if "kind" in report]
    assert len(failed) >= (2 if where == "everywhere" else 1), log
    assert all(report["mine"] and report["through"] for report in failed)
    assert code != 0 or where != "everywhere"


def test_a_rank_that_joins_late_has_all_that_the_others_have(
    attempt: Try, hosts: Path, tmp_path: Path
) -> None:
    hosts.write_text("localhost:1\n")
    script = elastic(hosts, workers=1)
    # The second host is there from the fifth look on, some seconds after the first has begun to train.
    counting = f"""#!/bin/sh
echo >> '{tmp_path}/looks'
cat '{hosts}'
[ "$(wc -l < '{tmp_path}/looks')" -gt 12 ] && echo 127.0.0.1:1
exit 0
"""
    hosts.with_suffix(".sh").write_text(counting)
    code, reports, log = attempt("hvdrecover", script, "join")
    assert code == 0, log
    joined = sorted((each for each in reports if "content" in each), key=lambda each: each["rank"])
    assert [each["rank"] for each in joined] == [0, 1], log
    first, second = joined
    for fact in ("content", "batch", "cursor", "run_seed"):
        assert first[fact] == second[fact]
    assert first["batch"] > 0
    assert first["cursor"]["processed_num"] > 0
    assert first["seeds_differ"] != second["seeds_differ"]  # each rank drops units of its own
    assert len({each["after"] for each in reports if "after" in each}) == 1
