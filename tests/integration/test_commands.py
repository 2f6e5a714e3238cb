"""The commands that look at a checkpoint root, on a root that a job has written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.commands import call, call_json
from tests.support.jobs import run_job

SCRIPT = Path(__file__).with_name("scripts") / "few_steps.py"
MODEL = {"0.weight": [16, 8], "0.bias": [16], "2.weight": [1, 16], "2.bias": [1]}

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the commits of a finished run."""
    folder = tmp_path_factory.mktemp("run")
    environ = {"HVDRECOVER_CHECKPOINT": str(folder / "root"), "OMP_NUM_THREADS": "1"}
    run_job([sys.executable, str(SCRIPT)], folder / "log", environ)
    return folder / "root"


@pytest.fixture(scope="module")
def listed(root: Path) -> list[dict[str, Any]]:
    """Its commits before any of them is pruned, newest first."""
    found: list[dict[str, Any]] = call_json("ls", root)["commits"]
    return found


@pytest.fixture(scope="module")
def names(listed: list[dict[str, Any]]) -> list[str]:
    return [each["commit"] for each in listed]


def test_ls_lists_the_commits_and_verify_reads_them(root: Path, listed: list[dict[str, Any]]) -> None:
    assert [each["state"] for each in listed] == ["finished"] + ["complete"] * (len(listed) - 1)
    assert len(listed) > 2
    numbers = [each["number"] for each in listed]
    assert numbers == sorted(numbers, reverse=True)
    verified = call_json("verify", root)
    assert verified["intact"]
    assert [each["commit"] for each in verified["commits"]] == [each["commit"] for each in listed]


def test_a_table_for_people_names_each_commit(root: Path, names: list[str]) -> None:
    done = call("ls", root)
    assert done.returncode == 0
    assert all(name in done.stdout for name in names)


def test_show_names_each_tensor_of_a_commit(root: Path, names: list[str]) -> None:
    shown = call_json("show", root, names[0])
    assert shown["commit"] == names[0]
    tensors = {file["name"]: file["tensors"] for file in shown["files"]}["model.safetensors"]
    assert {each["name"]: each["shape"] for each in tensors} == MODEL


def test_diff_names_what_has_changed(root: Path, names: list[str]) -> None:
    newest, *_, oldest = names
    compared = call_json("diff", root, oldest, newest)
    assert {f"model.{name}" for name in MODEL} <= {each["name"] for each in compared["differences"]}
    assert (compared["a"], compared["b"]) == (oldest, newest)


def test_export_writes_files_that_other_libraries_read(root: Path, names: list[str], tmp_path: Path) -> None:
    newest = names[0]
    call_json("export", root, newest, "--only", "model", "-o", tmp_path / "model.safetensors")
    call_json("export", root, newest, "-o", tmp_path / "state.pt")
    alone = safetensors.torch.load_file(tmp_path / "model.safetensors")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 6
    assert {name: list(tensor.shape) for name, tensor in alone.items()} == MODEL
    assert all(torch.equal(state["model"][name], alone[name]) for name in MODEL)
    assert call("export", root, newest, "-o", tmp_path / "state.pt").returncode == 1  # it exists


def test_prune_keeps_what_its_rules_ask_for(
    root: Path, listed: list[dict[str, Any]], names: list[str]
) -> None:
    assert call("prune", root, "--keep-last", "1", "--dry-run").returncode == 0
    assert call_json("ls", root)["commits"] == listed
    pruned = call_json("prune", root, "--keep-last", "2", "--yes")
    assert {each["commit"] for each in pruned["deleted"]} == set(names[2:])
    assert [each["commit"] for each in call_json("ls", root)["commits"]] == names[:2]


def test_a_root_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = call("ls", tmp_path / "nothing")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert str(tmp_path / "nothing") in done.stderr
