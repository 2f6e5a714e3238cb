"""The things that a drill learns from a training process, and what it has the process do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.settings import Checkpoint
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
