from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover_ray.slot_actor import Slot, python_path
from hvdrecover_ray.slot_pool import by_host, replace_file


def slot(node: str, port: int, *devices: str, address: str = "10.0.0.1") -> Slot:
    return Slot(node, address, port, "eth0", devices)


PACKAGE_FOLDER = str(Path(__file__).parents[1])


def test_the_slots_of_a_node_are_one_host_in_the_order_in_which_they_started() -> None:
    found = by_host([slot("a" * 56, 2, "1"), slot("b" * 56, 1, address="10.0.0.2"), slot("a" * 56, 1, "0")])
    assert {host: [each["port"] for each in slots] for host, slots in found.items()} == {
        "10.0.0.1-aaaaaaaa": [2, 1],
        "10.0.0.2-bbbbbbbb": [1],
    }
    assert found["10.0.0.1-aaaaaaaa"][0]["devices"] == ("1",)


def test_nodes_that_share_an_address_are_several_hosts() -> None:
    assert len(by_host([slot("a" * 56, 1), slot("b" * 56, 2)])) == 2


def test_a_replaced_file_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    for text in ("one", "two"):
        replace_file(path, text)
        assert (path.read_text(), path.stat().st_mode & 0o777) == (text, 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["slots.json"]


def test_programs_find_the_modules_that_this_process_finds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json, hvdrecover_ray\nprint('found')\n")
    program = "from hvdrecover_ray.slot_actor import python_path; print(python_path())"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), PACKAGE_FOLDER, "/nowhere"])}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert told.stdout.strip().split(os.pathsep)[0] == str(tmp_path)
    assert "/nowhere" not in told.stdout and "lib-dynload" not in told.stdout
    done = subprocess.run(
        [sys.executable, "-m", "mine"],
        env={**os.environ, "PYTHONPATH": told.stdout.strip()},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
    )
    assert done.stdout == "found\n", done.stderr


def test_the_folder_of_rays_worker_program_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, workers = tmp_path / "mine", tmp_path / "ray" / "_private" / "workers"
    own.mkdir()
    workers.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(workers), str(own)])
    assert python_path() == str(own)
