"""``hvdrecover run --preflight`` as a user runs it, with a host that does not answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.support.faulty_run import FaultyRun
from tests.support.jobs import PATIENCE, supervised

# The second one has no ssh server at that port; the first one takes none.
HOSTS = ("--preflight", "--no-standby", "-H", "localhost:1,127.0.0.2:1", "-p", "1")

pytestmark = pytest.mark.acceptance


def test_the_job_starts_without_a_host_that_does_not_answer(start: Start, tmp_path: Path) -> None:
    run = FaultyRun(tmp_path / "run", "torch", (), 1, "--step-seconds", "0")
    run.finish(start(run, supervised(*HOSTS, "--min-np", "1")))
    assert {batch.size for batch in run.batches()} == {1}
    (event,) = run.events("preflight")
    assert event["used"] == ["localhost"]
    assert "Connection refused" in event["excluded"]["127.0.0.2"]
    (line,) = [line for line in run.log.splitlines() if "left out" in line]
    assert line.startswith("hvdrecover: 127.0.0.2 left out: ssh: 127.0.0.2: ")
    assert line.endswith("Start an ssh server on the host, or name its port with -p.")


def test_the_job_does_not_start_where_too_few_hosts_are_left(start: Start, tmp_path: Path) -> None:
    run = FaultyRun(tmp_path / "run", "torch")
    assert start(run, supervised(*HOSTS)).wait(PATIENCE) == 1
    assert re.search(r"--preflight: .* 1 of 2 .* 2\n", run.log)
    assert "127.0.0.2: ssh: 127.0.0.2: " in run.log
    assert not run.root.exists() and run.events("start") == []
