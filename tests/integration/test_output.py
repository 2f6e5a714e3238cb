"""Jobs whose output nobody takes, or that print what is no text: the ranks must not wait for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import read_events, run_job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "chatty.py"

pytestmark = pytest.mark.acceptance


def test_a_reader_that_is_gone_and_bytes_that_are_no_text_stop_no_rank(tmp_path: Path) -> None:
    options = ("--no-standby", "--hang-timeout", "60", "--output-filename", str(tmp_path / "ranks"))
    words = [*supervised(*options), sys.executable, str(SCRIPT)]
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
