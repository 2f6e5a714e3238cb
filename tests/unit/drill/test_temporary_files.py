"""The temporary files that a process makes in a drill, as they are read from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover.drill.checks import temporary

PROGRAM = """
import os, sys, tempfile
from pathlib import Path
from hvdrecover import config
from hvdrecover.drill.temporary_files import watch
watch(config.read(), "training")
watch(config.read(), "training")
{}
"""
MADE = "os.close(tempfile.mkstemp(prefix='file')[0]); Path(tempfile.mkdtemp(prefix='folder'), 'x').touch()"


def ran(folder: Path, body: str, code: int = 0) -> list[temporary.Ended]:
    drill = folder / "drill"
    environ = {"HVDRECOVER_DRILL": str(drill), "TMPDIR": str(folder), "HOROVOD_HOSTNAME": "host-1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body)],
        env=environ,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return temporary.ended(drill / "temporary")


@pytest.mark.parametrize(
    ("body", "code"), [(MADE, 0), (f"{MADE}\nsys.exit(75)", 75), (f"{MADE}\nraise MemoryError", 1)]
)
def test_what_a_process_that_ends_by_itself_has_made_and_left_is_known(
    body: str, code: int, tmp_path: Path
) -> None:
    (ended,) = ran(tmp_path, body, code)
    assert ended.kind == "training"
    assert [Path(path).name[:4] for path in ended.left] == ["file", "fold"]
    assert all(Path(path).parent == tmp_path for path in ended.left)


@pytest.mark.parametrize(
    "body",
    [
        "with tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile(), tempfile.TemporaryFile(): pass",
        "kept = tempfile.TemporaryDirectory()",  # until the end of the process
        "os.rename(tempfile.mkstemp()[1], 'output')",  # a file that is published when it is whole
    ],
)
def test_what_is_gone_by_then_does_not_count(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (ended,) = ran(tmp_path, body)
    assert ended.left == ()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_a_process_that_can_not_tidy_up_is_none_of_them(end: str, tmp_path: Path) -> None:
    assert ran(tmp_path, f"{MADE}; {end}", code=-9 if "kill" in end else 0) == []


def test_the_end_of_a_forked_child_is_not_that_of_its_parent(tmp_path: Path) -> None:
    body = f"if not os.fork(): {MADE}; sys.exit()\nos.wait(); os.kill(os.getpid(), 9)"
    assert ran(tmp_path, body, code=-9) == []


def test_a_child_that_is_forked_leaves_what_counts_as_its_parents(tmp_path: Path) -> None:
    (ended,) = ran(tmp_path, f"if not os.fork(): {MADE}; os._exit(0)\nos.wait()")
    assert len(ended.left) == 2


def test_outside_of_a_drill_nothing_is_written(tmp_path: Path) -> None:
    program = PROGRAM.format(MADE)
    subprocess.run([sys.executable, "-c", program], env={"TMPDIR": str(tmp_path)}, timeout=60, check=True)
    assert {path.name[:4] for path in tmp_path.iterdir()} == {"file", "fold"}


def test_a_process_that_makes_none_writes_nothing(tmp_path: Path) -> None:
    assert ran(tmp_path, "pass") == []
    assert not (tmp_path / "drill").exists()
