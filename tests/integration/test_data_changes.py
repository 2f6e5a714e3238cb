"""A job that resumes on other training data stops, warns, or restarts its epoch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI

pytestmark = pytest.mark.acceptance

SCRIPT = Path(__file__).with_name("scripts") / "changed_data.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(10))
    return folder


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


@pytest.mark.parametrize(
    ("policy", "samples"), [("raise", None), ("warn", "4 5 6 7"), ("restart_epoch", "0 1 2 3 4 5 6 7")]
)
def test_other_data_are_noticed_and_the_policy_is_applied(
    policy: str, samples: str | None, data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    assert "samples 0 1 2 3 4 5 6 7\n" in start(root, data, policy).stdout
    same = start(root, data, policy)
    assert "samples 2 3 4 5 6 7\n" in same.stdout
    assert "train.bin" not in same.stderr

    (data / "train.bin").write_bytes(bytes(9))
    changed = start(root, data, policy)

    assert "changed: train.bin (was 10 bytes of " in changed.stderr
    if samples is None:
        assert changed.returncode == 1
        assert "DataChangedError" in changed.stderr
        assert "samples" not in changed.stdout
    else:
        assert f"samples {samples}\n" in changed.stdout
