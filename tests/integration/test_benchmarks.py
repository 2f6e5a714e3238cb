"""The benchmarks run, and fill their table; how fast anything is, no test asserts."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import TOPICS
from benchmarks.jobs.near_commits import SMALL as NEAR_SMALL
from benchmarks.jobs.peers.loop import SHAPE as PEERS_SHAPE
from benchmarks.report import PLOT
from benchmarks.states import SHAPES
from hvdrecover.checkpoint import near_root
from hvdrecover.launch.processes import marked
from tests.integration.conftest import LONG, WHOLE

ROOT = Path(__file__).parents[2]
SMALL = {state: shape.title.split(",")[0] for state, shape in SHAPES["small"].items()}  # sizes
FRAMEWORKS = ("torch", "tensorflow")
DIGITS = {"digits": "digits example", "digits-tensorflow": "TensorFlow digits example"}
VIRTUAL = {"compute": "compute-bound", "sent": "100 MB"}
TINY = {"tiny": NEAR_SMALL["small"].title.split(",")[0], "kept": PEERS_SHAPE.title.split(",")[0]}
JOBS = ("recovery", "near", "peers")  # topics that are whole jobs, each with a test of its own
STATES = {**SMALL, **TINY, **{framework: framework for framework in FRAMEWORKS}, **DIGITS, **VIRTUAL, "": ""}
MEASURED = r"≤ [\d.]+ s"  # half of a cold restart

# By topic: what is measured, against what, and for which states a goal is set.
GOALS = {
    "stall": [
        (
            "stall of a commit that is due",
            "Horovod's TorchState.save()",
            ("large", "many"),
            "≤ 0.60",
            "≤ 0.45",
        ),
        ("stall of a commit that is due", "DCP async_save", ("large", "many"), "≤ 0.80", "≤ 0.50"),
    ],
    "tensorflow": [
        (
            "stall of a TensorFlow commit that is due",
            "Horovod's TensorFlowKerasState.save()",
            ("large", "many"),
            "≤ 0.60",
            "≤ 0.45",
        ),
    ],
    "durable": [
        ("durable throughput to a local disk", "raw O_DIRECT write", ("large",), "≥ 0.80", "≥ 0.95"),
        ("time until durable", "torch.save + fsync", ("large", "many"), "≤ 0.70", "≤ 0.50"),
        ("time until durable", "safetensors save_file + fsync", ("large", "many"), "≤ 0.70", "≤ 0.50"),
        ("time until durable", "DCP save", ("large", "many"), "≤ 0.50", "≤ 0.50"),
        ("processor time of writing", "", ("large",), "≤ 0.150 s/GB", "≤ 0.060 s/GB"),
    ],
    "slowdown": [
        ("a training step while a write is in flight", "the same without", ("large",), "≤ +5.0%", "≤ +2.0%"),
    ],
    "restore": [("restore, nothing cached", "torch.load", ("large", "many"), "≤ 0.80", "≤ 0.40")],
    "memory": [
        ("extra memory when idle", "", ("large",), "≤ 1.00 states", "≤ 1.00 states"),
        ("extra memory, a commit beside a write", "", ("large",), "≤ 2.00 states", "≤ 2.00 states"),
    ],
    "sync": [
        ("sync of a new worker", "Horovod's TorchState.sync()", ("large",), "≤ 1.00", "≤ 0.80"),
        ("sync of a new worker", "Horovod's TorchState.sync()", ("many",), "≤ 0.50", "≤ 0.20"),
    ],
    "guard": [
        ("a training step with a guard", "the same without", ("large", *DIGITS), "≤ +1.0%", "≤ +1.0%"),
    ],
    "virtual": [
        ("a step of two virtual ranks", "hvd.DistributedOptimizer", ("compute",), "≤ 1.05", "≤ 1.02"),
        ("a step of four virtual ranks", "four passes by hand", ("compute",), "≤ 1.05", "≤ 1.02"),
        ("reduction of virtual ranks", "hvd.grouped_allreduce", ("sent",), "≤ 1.60", "≤ 1.20"),
    ],
}
RECOVERY_GOALS = [
    ("SIGKILL of a worker to the next step of all", "", FRAMEWORKS, MEASURED, "≤ 0.30 s"),
    ("a training step with guardian", "plain elastic horovodrun", FRAMEWORKS, "≤ +1.0%", "≤ +1.0%"),
    ("heartbeat()", "", ("",), "≤ 1000 ns", "≤ 1000 ns"),
]
OFF = "the near tier off"
NEAR_GOALS = [
    ("steps lost when all processes are killed", "", ("large",), "≤ 2 steps", "≤ 0 steps"),
    ("SIGKILL of all processes", OFF, ("large",), "≤ 0.60", "≤ 0.40"),
    ("SIGKILL of one worker", OFF, ("large",), "≤ 0.60", "≤ 0.40"),
    ("stall of a commit", OFF, ("large",), "≤ 1.10", "≤ 1.00"),
    ("a step while a commit goes to the tier", "the same without", ("large",), "≤ +5.0%", "≤ +2.0%"),
    ("commit() of two aligned ranks", "", ("tiny",), "≤ 2.00 ms", "≤ 1.30 ms"),
    ("extra memory of the tier's keeper, commits", "", ("large",), "≤ 3.0 states", "≤ 3.0 states"),
    ("extra memory of the tier's keeper, idle", "", ("large",), "≤ 3.0 states", "≤ 3.0 states"),
    ("extra memory of another rank, commits", "", ("large",), "≤ 1.0 states", "≤ 1.0 states"),
    ("extra memory of another rank, idle", "", ("large",), "≤ 1.0 states", "≤ 1.0 states"),
    ("the near root in tmpfs", "", ("large",), "≤ 3.0 states", "≤ 3.0 states"),
]
PEERS = ("Horovod's own elastic", "torchrun, torch.save", "torchrun, DCP async_save")
PEERS_GOALS = [
    (what, peer, ("kept",), "≤ 1.00", "≤ 1.00")
    for what, peers in (
        ("SIGKILL of one worker", PEERS),
        ("SIGKILL of all", PEERS[1:]),  # which ends a job of Horovod's
        ("stall of a commit, of a save", PEERS),
    )
    for peer in peers
]
RIVALS = (
    "hvdrecover run --no-standby",
    "plain elastic horovodrun with spare hosts",
    "torchrun",
    "a cold restart",
)


@LONG
def test_stalls_are_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    check(measured(tmp_path, "stall"), GOALS["stall"])


@LONG
def test_every_row_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    rows = measured(tmp_path, *(topic for topic in TOPICS if topic not in JOBS))
    check(rows, [goal for goals in GOALS.values() for goal in goals])
    page = (tmp_path / "scale.md").read_text()
    for title in ("## Measured", "## Simulated", "## Computed"):
        assert title in page
    for chart in re.findall(r"\((images/scale-.*)\)", page):
        assert (tmp_path / chart).read_bytes().startswith(b"\x89PNG")
    assert "with room for 0.5 states more: exit code 1: hvdrecover.errors.StateError" in page or (
        "not measured: commits of 0.1 GB in a cgroup" in page
    )


@LONG
def test_jobs_are_killed_under_each_launcher_and_none_is_left_behind(tmp_path: Path) -> None:
    rows = measured(tmp_path, "recovery")
    check(rows, RECOVERY_GOALS)
    for rival in RIVALS:
        assert any(row[0].startswith("SIGKILL of a worker") and row[3].startswith(rival) for row in rows)


@LONG
def test_jobs_are_killed_with_the_near_tier_and_without_and_no_near_root_is_left(tmp_path: Path) -> None:
    rows = measured(tmp_path, "near")
    check(rows, NEAR_GOALS)
    assert not near_roots(tmp_path)


@LONG
def test_one_job_is_killed_under_each_peer_that_needs_no_package_and_no_near_root_is_left(
    tmp_path: Path,
) -> None:
    rows = measured(tmp_path, "peers")
    found = {row[3] for row in rows}
    # Horovod's own ends, and is told as not measured, where a new process takes too long to start.
    assert found >= {"", *PEERS[1:]}
    check(rows, [goal for goal in PEERS_GOALS if goal[1] in found])
    assert not near_roots(tmp_path)


def near_roots(tmp_path: Path) -> list[str]:
    """The near roots of checkpoint roots in a folder."""
    return [root.url for root in near_root.roots() if os.fspath(tmp_path) in root.url]


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


def check(rows: list[list[str]], goals: Sequence[tuple[str, str, tuple[str, ...], str, str]]) -> None:
    """Each goal has its row, each row with a goal is one of them, and all have values."""
    for what, peer, states, bar, stretch in goals:
        for state in states:
            (row,) = [
                row
                for row in rows
                if row[0].startswith(what)
                and row[3].startswith(peer)
                and row[1].split(",")[0] == STATES[state]
                and row[8]
            ]
            assert row[6] == bar or re.fullmatch(bar, row[6])
            assert row[7] == stretch
    assert sum(bool(row[8]) for row in rows) == sum(len(states) for _, _, states, _, _ in goals)
    for row in rows:
        assert all(math.isfinite(number) for number in numbers(" ".join([row[2], row[4], row[5]])))
        assert min(numbers(row[2])) > 0 or row[0].startswith("steps lost")


def table(text: str) -> list[list[str]]:
    """The cells of the page's table, without its head."""
    section = text.split("<!-- benchmarks/run writes from here -->")[1].split("<!-- to here -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def numbers(text: str) -> list[float]:
    return [
        float(found) for found in re.findall(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]\d+)?|nan|inf)", text)
    ]
