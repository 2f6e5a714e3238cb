"""Gradients of virtual ranks are the same, bit by bit, on any number of processes and however dealt."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import PATIENCE, Job, static

SCRIPT = Path(__file__).with_name("scripts") / "virtual_gradients.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digest of each case, of one process."""
    (found,) = digests(tmp_path_factory.mktemp("alone"), 1)
    assert len(set().union(*found.values())) == len(found)
    return {case: each for case, (each,) in found.items()}


def test_every_way_to_deal_gives_the_bits_of_one_process(tmp_path: Path, alone: dict[str, str]) -> None:
    everywhere = digests(tmp_path, 3)
    assert len(everywhere) == 3
    for found in everywhere:
        assert found == {case: [each] * 5 for case, each in alone.items()}


def digests(folder: Path, processes: int) -> list[dict[str, list[str]]]:
    """The findings of each process, by case."""
    job = Job([*static(processes), sys.executable, str(SCRIPT)], folder / "log.txt")
    try:
        status = job.wait(PATIENCE)
        text = (folder / "log.txt").read_text()
        assert status == 0, text
    finally:
        job.kill()
    match = re.search(r'\{"digests".*\}', text)
    assert match is not None, text
    found: Any = json.loads(match[0])["digests"]
    return list(found)
