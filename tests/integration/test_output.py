"""What jobs print: errors of scripts once, and last; and no rank waits for output that nobody takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support.jobs import PATIENCE, Job, read_events, run_job, supervised

# Without a training function; the ranks ask for different things.
PLAIN = """
import torch
import hvdrecover.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3 + hvd.rank()), name="x")
"""
TENSORFLOW = 'import tensorflow\nimport hvdrecover.tensorflow\nopen("/not/there")\n'
HEADING = "on localhost: an exception before the job's first commit:"
Fail = Callable[..., str]

pytestmark = pytest.mark.acceptance


@pytest.fixture
def fail(jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Runs a script that must fail on two ranks, with options of ``hvdrecover run``; returns the log."""

    def run(script: str, *options: str) -> str:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").write_text(script)
        jobs.append(Job([*supervised(*options), "python", "train.py"], tmp_path / "log"))
        assert jobs[0].wait(PATIENCE) == 1
        assert jobs[0].processes() == []
        return (tmp_path / "log").read_text()

    return run


def test_what_horovod_objects_to_in_a_plain_script_is_its_error(fail: Fail) -> None:
    log = fail(PLAIN, "--no-standby")
    assert log.count(HEADING) == 1
    assert log.count("HorovodInternalError: Mismatched ALLREDUCE tensor shapes") == 1
    assert "start again" not in log


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        pytest.param("def f(:", "SyntaxError: invalid syntax", marks=LONG),
        pytest.param(TENSORFLOW, "No such file or directory: '/not/there'", marks=LONG),
    ],
)
def test_a_wrong_script_on_two_ranks_is_told_once_and_last(script: str, last: str, fail: Fail) -> None:
    log = fail(script)
    assert log.rstrip().endswith(last)
    assert log.count(last) == 1
    assert log.count("Traceback (most recent call last)") == (script in ("import not_there", TENSORFLOW))
    assert log.count(HEADING) == 1
    assert "exit with status code" not in log  # Horovod's line
    assert script == TENSORFLOW or "<stderr>:" not in log  # which says what processor it has found


def test_a_reader_that_is_gone_and_bytes_that_are_no_text_stop_no_rank(tmp_path: Path) -> None:
    options = ("--no-standby", "--hang-timeout", "60", "--output-filename", str(tmp_path / "ranks"))
    words = [*supervised(*options), sys.executable, str(Path(__file__).with_name("scripts") / "chatty.py")]
    gone = ["bash", "-o", "pipefail", "-c", '"$@" | head -n 1 > "$0"', str(tmp_path / "head"), *words]
    log = run_job(gone, tmp_path / "log", {"HVDRECOVER_EVENTS": str(tmp_path / "events")})
    assert read_events(tmp_path / "events", "fault", "restart") == []
    (output,) = read_events(tmp_path / "events", "output")
    assert (output["stream"], output["problem"]) == ("stdout", "Broken pipe")
    assert log.count("stdout can't be written") == 1
    assert log.count("caf\ufffd ") == 2 * 8
    for rank in (0, 1):
        printed = (tmp_path / "ranks" / f"rank.{rank}" / "stdout").read_text()
        assert [line.partition(":")[2][:6] for line in printed.splitlines()[:8]] == [
            f"step {step}" for step in range(8)
        ]
        assert printed.endswith(f"the end of rank {rank}\n")
        assert (tmp_path / "ranks" / f"rank.{rank}" / "stderr").read_text().count("caf\ufffd ") == 8
