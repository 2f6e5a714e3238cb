"""The comparison with peers starts what is there, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.jobs import launchers
from benchmarks.jobs.peers import environment
from benchmarks.topics import peers


def test_each_peer_is_named_with_the_version_that_is_installed() -> None:
    titles = [each.title.lower() for each in launchers.peers("python")]
    for package in environment._PACKAGES:
        name, version = package.split("==")
        assert any(title.startswith(name) and title.endswith(version) for title in titles), package


def test_what_killed_peers_leave_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "RAY_FOLDERS", tmp_path / "ray-")
    monkeypatch.setattr(peers, "_DLROVERS", tmp_path / "shm_")
    (tmp_path / "ray-of-others").mkdir()
    with peers._forgotten():
        (tmp_path / "ray-1" / "session").mkdir(parents=True)
        (tmp_path / "shm_1").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["ray-of-others"]
