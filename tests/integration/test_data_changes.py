"""A job that resumes on other training data stops, warns, or restarts its epoch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI

pytestmark = pytest.mark.acceptance

SCRIPT = Path(__file__).with_name("scripts") / "changed_data.py"


def start(root: Path, data: Path, policy: str) -> subprocess.CompletedProcess[str]:
    """Start the script once; it makes one commit of two samples."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(root), str(data), policy],
        env={**os.environ, **ROOT_MAY_USE_MPI, "HVDRECOVER_NEAR": "off"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and with the root of a run that was started on them twice."""
    folder = tmp_path_factory.mktemp("started")
    data = folder / "data"
    data.mkdir()
    (data / "train.bin").write_bytes(bytes(10))
    assert "samples 0 1 2 3 4 5 6 7\n" in start(folder / "root", data, "raise").stdout
    same = start(folder / "root", data, "raise")
    assert "samples 2 3 4 5 6 7\n" in same.stdout
    assert "train.bin" not in same.stderr
    (data / "train.bin").write_bytes(bytes(9))
    return folder


@pytest.mark.parametrize(
    ("policy", "samples"), [("raise", None), ("warn", "4 5 6 7"), ("restart_epoch", "0 1 2 3 4 5 6 7")]
)
def test_other_data_are_noticed_and_the_policy_is_applied(
    policy: str, samples: str | None, started: Path, tmp_path: Path
) -> None:
    shutil.copytree(started / "root", tmp_path / "root")
    changed = start(tmp_path / "root", started / "data", policy)
    assert "changed: train.bin (was 10 bytes of " in changed.stderr
    if samples is None:
        assert changed.returncode == 1
        assert "DataChangedError" in changed.stderr
        assert "samples" not in changed.stdout
    else:
        assert f"samples {samples}\n" in changed.stdout
