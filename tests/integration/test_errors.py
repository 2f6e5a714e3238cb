"""The words that a person sees when a job can't continue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.support.jobs import PATIENCE, DigitsRun, static

pytestmark = pytest.mark.acceptance


def test_a_foreign_root_stops_all_ranks_with_one_clear_error(start: Start, tmp_path: Path) -> None:
    run = DigitsRun(tmp_path, 1)
    run.root.mkdir()
    (run.root / "thesis.tex").write_text("irreplaceable")
    job = start(run, static(2))
    assert job.wait(PATIENCE) != 0
    assert re.search(f"{run.root}: .*'thesis.tex'", run.log)
    assert "ForeignRootError" in run.log
    assert [path.name for path in run.root.iterdir()] == ["thesis.tex"]
    assert run.batches() == []


def test_a_broken_commit_is_walked_back_over_and_said_so(start: Start, tmp_path: Path) -> None:
    first = DigitsRun(tmp_path, 1)
    first.finish(start(first))
    (manifest,) = sorted(first.root.glob("g*/MANIFEST.json"))[-1:]
    manifest.parent.joinpath("model.safetensors").write_bytes(b"")  # the newest is broken: walk back over it
    other = DigitsRun(tmp_path, 2)
    other.finish(start(other))
    assert "skipping" in other.log and "has 0 bytes" in other.log
    assert "resumed from commit" in other.log
    assert (manifest.parent / "QUARANTINE.json").exists()
