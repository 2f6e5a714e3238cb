"""The things that a drill learns from a training process, and what it has the process do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.unit.state.jobs import Process, in_drill, on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "drill"


def drilled(process: Process, folder: Path, checkpoint: Any = None, **attributes: Any) -> State:
    """A state whose process is part of a drill, which has agreed with the others."""
    root = str(folder.parent / "root")
    config = in_drill(process.config, folder, root)
    attributes = {"model": FakeModel(weight=[0.0, 1.0]), "batch": 0, **attributes}
    state = process.state(checkpoint, config=config, **attributes)
    state.sync()
    return state


def told(folder: Path, what: str = "") -> list[dict[str, Any]]:
    (path,) = (folder / "witness").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if what in ("", line["what"])]


def test_the_initial_state_is_kept_so_that_another_run_can_begin_with_it(
    process: Process, folder: Path
) -> None:
    drilled(process, folder, model=FakeModel(weight=[7.0]), batch=3)
    snapshot = read_commit(LocalStorage(folder / "initial"), CommitId(1, 0))
    assert snapshot.state["attributes"]["batch"] == 3
    assert snapshot.arenas["model"].bytes_of("weight").view("float64").tolist() == [7.0]


@pytest.mark.parametrize("checkpoint", [None, "fake://own", Checkpoint("fake://own", keep=7)])
def test_the_jobs_own_root_is_never_touched(checkpoint: Any, process: Process, folder: Path) -> None:
    state = drilled(process, folder, checkpoint)
    assert state._session.durable._settings is not None
    assert state._session.durable._settings.url == str(folder.parent / "root")
    assert state._session.durable._settings.keep == (7 if isinstance(checkpoint, Checkpoint) else 3)


def test_each_rank_tells_what_it_holds_and_which_tensors_it_has_of_its_own(folder: Path) -> None:
    def body(process: Process) -> None:
        state = drilled(process, folder, model=FakeModel(weight=[1.0], local=[0.0]))
        state.model.weights["local"] += process.world.rank()
        state.batch = process.world.rank()
        state.commit()

    on_ranks(2, body)
    first, second = sorted(told(folder, "commit"), key=lambda line: line["rank"])
    assert (first["values"]["batch"], second["values"]["batch"]) == (0, 1)
    assert first["tensors"]["model"]["weight"] == second["tensors"]["model"]["weight"]
    assert first["tensors"]["model"]["local"] != second["tensors"]["model"]["local"]
    assert first["buffers"] == second["buffers"] == {"model": ["local"]}
    assert "samplers" in first and "samplers" not in second


def test_without_a_drill_there_is_no_witness(process: Process, tmp_path: Path) -> None:
    state = process.state(model=FakeModel(weight=[0.0]))
    state.sync()
    assert "steps" not in process.framework.reports


@pytest.mark.parametrize(
    ("order", "error"), [("out-of-memory", "MemoryError"), ("script-error", "RuntimeError")]
)
def test_a_process_fails_once_as_it_is_asked_to(order: str, error: str, folder: Path) -> None:
    script = """
import sys
from pathlib import Path
from hvdrecover.drill import witness
folder = Path(sys.argv[1])
(folder / "orders").mkdir(parents=True)
(folder / "orders" / "0").write_text(sys.argv[2])
class World:
    rank = staticmethod(lambda: 0)
told = witness.Witness.__new__(witness.Witness)
told._folder, told._world = folder, World
try:
    told._follow_order()
finally:
    assert not (folder / "orders" / "0").exists()
"""
    command = [sys.executable, "-c", script, str(folder), order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and error in done.stderr
