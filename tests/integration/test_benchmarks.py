"""The benchmarks run, and fill their table; how fast anything is, no test asserts."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import TOPICS
from benchmarks.report import PLOT
from hvdrecover.checkpoint import near_tier
from hvdrecover.launch.processes import marked
from tests.integration.conftest import LONG, WHOLE

ROOT = Path(__file__).parents[2]
JOBS = ("recovery", "near", "peers")  # topics that are whole jobs
OTHERS = [topic for topic in TOPICS if topic not in JOBS]
WHAT, VERDICT = 0, 8  # columns
MEASURED = (2, 4, 5)


@LONG
@pytest.mark.parametrize("topics", [OTHERS, *([job] for job in JOBS)])
def test_every_row_is_measured_and_nothing_is_left_behind(topics: list[str], tmp_path: Path) -> None:
    rows = measured(tmp_path, *topics)
    assert any(row[VERDICT] for row in rows)  # rows that have a goal
    for row in rows:
        values, *others = (numbers(row[column]) for column in MEASURED)
        assert all(math.isfinite(number) for each in (values, *others) for number in each)
        assert min(values) > 0 or row[WHAT].startswith("steps lost")
    assert not [root.url for root in near_tier.roots() if os.fspath(tmp_path) in root.url]
    if "scale" in topics:
        for chart in re.findall(r"\((images/scale-.*)\)", (tmp_path / "scale.md").read_text()):
            assert (tmp_path / chart).read_bytes().startswith(b"\x89PNG")


def measured(tmp_path: Path, *topics: str) -> list[list[str]]:
    """The rows of a run at small size."""
    page = tmp_path / "performance.md"
    for name in ("performance.md", "scale.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    (tmp_path / "images").mkdir()
    command = [sys.executable, "-m", "benchmarks", "--size", "small", "--page", os.fspath(page)]
    folder = tmp_path / "disk"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environ |= {**WHOLE, "BENCHMARKED_BY": os.fspath(tmp_path)}
    ran = subprocess.run(
        [*command, "--folder", os.fspath(folder), *(f"--only={topic}" for topic in topics)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(folder.iterdir()) == []
    assert marked(f"BENCHMARKED_BY={tmp_path}") == []
    assert (tmp_path / PLOT).read_bytes().startswith(b"\x89PNG")
    return table(page.read_text())


def table(text: str) -> list[list[str]]:
    """The cells of the page's table, without its head."""
    section = text.split("<!-- benchmarks/run writes from here -->")[1].split("<!-- to here -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def numbers(text: str) -> list[float]:
    return [
        float(found) for found in re.findall(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]\d+)?|nan|inf)", text)
    ]
