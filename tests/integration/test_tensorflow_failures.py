"""What fails in Horovod's elastic TensorFlow API works in ours."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LONG
from tests.support.jobs import elastic, run_job, supervised

SCRIPTS = Path(__file__).with_name("scripts")
SCRIPT = SCRIPTS / "tensorflow_failures.py"


def run(launcher: list[str], folder: Path, *case: str) -> tuple[list[dict[str, Any]], str]:
    log = run_job([*launcher, sys.executable, str(SCRIPT), *case], folder / "log.txt")
    return [json.loads(line) for line in re.findall(r"report (\{.*\})", log)], log


@pytest.mark.parametrize(
    "collective",
    ["grouped_allreduce", *(pytest.param(name, marks=LONG) for name in ("alltoall", "reducescatter"))],
)
def test_a_lost_peer_is_recognised_whichever_collective_it_breaks(
    collective: str, hosts: Path, tmp_path: Path
) -> None:
    reports, log = run(elastic(hosts), tmp_path, "lost", collective, str(tmp_path))
    assert (tmp_path / "killed").exists()
    assert reports == [{"rank": 0, "result": "trained", "batch": 10, "traces": 1}], log


def test_a_rank_that_joins_late_has_all_that_the_others_have(
    hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "120")  # nobody is lost, but one may import for long
    hosts.write_text("localhost:1\n")
    launcher = elastic(hosts, workers=1)
    script = hosts.with_suffix(".sh")
    launcher[launcher.index("--host-discovery-script") + 1] = str(script)
    # The second host is there as soon as the first has trained.
    script.write_text(f"#!/bin/sh\ncat '{hosts}'\n[ ! -e '{tmp_path}/trained' ] || echo 127.0.0.1:1\n")
    script.chmod(0o755)
    reports, log = run(launcher, tmp_path, "join", str(tmp_path))
    joined = sorted((each for each in reports if "content" in each), key=lambda each: each["rank"])
    assert [each["rank"] for each in joined] == [0, 1], log
    first, second = joined
    for fact in ("content", "batch", "cursor", "run_seed"):
        assert first[fact] == second[fact]
    assert first["batch"] > 0
    assert first["cursor"]["processed_num"] > 0
    assert first["seeds_differ"] != second["seeds_differ"]  # each rank drops units of its own
    assert len({each["after"] for each in reports if "after" in each}) == 1


def test_collectives_of_constants_and_joins_recover(tmp_path: Path) -> None:
    """One rank is killed before it joins, another one after its peer has joined."""
    script = str(SCRIPTS / "tensorflow_constants.py")
    command = [*supervised("--no-standby"), sys.executable, script, str(tmp_path)]
    run_job(command, tmp_path / "log.txt", {"HVDRECOVER_EVENTS": str(tmp_path / "events")})
    assert {path.name for path in tmp_path.glob("struck-*")} == {"struck-1", "struck-2"}
    table, weights = json.loads((tmp_path / "weights").read_text())
    assert table == [[-3.0, -3.0]] * 3  # four epochs, a rate of 0.5, gradients of 1 and 2
    # Gradients of 2 * x * weight: on both ranks for x of 0.1 and 0.2, on rank 0 alone for 0.3.
    factor = ((1 - 0.1) * (1 - 0.2) * (1 - 0.3 / 2)) ** 4
    assert weights == pytest.approx([factor, -factor])
