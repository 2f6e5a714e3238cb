from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvdrecover.ray.actor import Place, python_path
from hvdrecover.ray.roster import by_host, replace


def place(node: str, port: int, *devices: str, address: str = "10.0.0.1") -> Place:
    return Place(node, address, port, "eth0", devices)


def test_slots_of_a_node_are_one_host_in_the_order_in_which_they_came() -> None:
    found = by_host(
        [place("a" * 56, 2, "1"), place("b" * 56, 1, address="10.0.0.2"), place("a" * 56, 1, "0")]
    )
    assert {host: [seat["port"] for seat in seats] for host, seats in found.items()} == {
        "10.0.0.1-aaaaaaaa": [2, 1],
        "10.0.0.2-bbbbbbbb": [1],
    }
    assert found["10.0.0.1-aaaaaaaa"][0]["devices"] == ("1",)


def test_several_nodes_of_one_address_are_several_hosts() -> None:
    assert len(by_host([place("a" * 56, 1), place("b" * 56, 2)])) == 2


def test_a_file_is_replaced_in_one_step_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "seats.json"
    for text in ("one", "two"):
        replace(path, text)
        assert (path.read_text(), path.stat().st_mode & 0o777) == (text, 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["seats.json"]


def test_programs_find_the_modules_that_this_process_finds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json, hvdrecover\nprint('found')\n")
    program = "from hvdrecover.ray.actor import python_path; print(python_path())"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), "/nowhere"])}
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


def test_the_folder_of_rays_own_programs_is_left_out(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    folder = "/usr/lib/python3/site-packages/ray/_private/workers"
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    monkeypatch.setattr(sys, "path", ["/mine", folder])
    assert python_path() == "/mine"
