from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.doctor import probing, roots
from hvdrecover.doctor.probing import Probe
from hvdrecover.errors import ForeignRootError, StorageError
from tests.unit.checkpoint.roots import make_snapshot, make_store

NBYTES = 100_000
NEWEST = {"commit": "g0001-c00000007", "time": 0.0, "host": "h1", "bytes": 5}


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_root_that_is_not_there_yet_is_tried_out_and_is_not_there_afterwards(tmp_path: Path) -> None:
    probe = Probe(str(tmp_path / "a" / "b"))
    found = probe.look()
    assert (found["commits"], found["newest"], found["claim"]) == ({}, None, 0)
    assert found["free"] > 0
    written = probe.try_writing(NBYTES)
    assert written["same"] and written["bytes"] == NBYTES
    assert probing.sees(str(tmp_path / "a" / "b"), probe.path)
    assert probe.try_creating() == {"rivals": 4, "winners": 1, "whole": True, "kept": True}
    probe.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_root_holds_stays_as_it_is(tmp_path: Path) -> None:
    store = make_store(LocalStorage(tmp_path), keep=9)
    store.claim_next()
    store.write(make_snapshot(1, 7), rank=0)
    before = everything(tmp_path)
    probe = Probe(str(tmp_path))
    found = probe.look()
    assert (found["commits"], found["newest"]["commit"], found["claim"]) == (
        {"complete": 1},
        "g0001-c00000007",
        1,
    )
    probe.try_writing(NBYTES)
    probe.try_creating()
    assert LocalStorage(tmp_path).names() == ["claims", "g0001-c00000007"]  # a job sees nothing of it
    probe.close()
    assert everything(tmp_path) == before


def test_what_a_killed_probe_leaves_is_in_no_jobs_way(tmp_path: Path) -> None:
    Probe(f"memory://{tmp_path}").try_writing(NBYTES)
    assert Probe(f"memory://{tmp_path}").look()["commits"] == {}


def test_a_folder_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ForeignRootError, match=r"thesis\.txt"):
        Probe(str(tmp_path))


def test_bytes_that_change_on_the_way_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: LocalStorage, path: str, buffer: Any) -> str:
        changed = buffer.copy()
        changed[NBYTES // 2] ^= 1
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(changed)
        return "what was meant"

    monkeypatch.setattr(LocalStorage, "write", write)
    probe = Probe(str(tmp_path))
    assert not probe.try_writing(NBYTES)["same"]
    probe.close()


def test_a_storage_that_tells_everybody_to_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: LocalStorage, path: str, data: bytes) -> bool:
        self.publish(path, data)
        return True

    monkeypatch.setattr(LocalStorage, "create", create)
    probe = Probe(str(tmp_path))
    found = probe.try_creating()
    assert (found["winners"], found["kept"]) == (4, False)
    probe.close()
    assert roots.judge_creating(found).outcome == "failure"


def test_a_storage_that_refuses_to_create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: LocalStorage, path: str, data: bytes) -> bool:
        raise StorageError("file:///root", "it is full")

    monkeypatch.setattr(LocalStorage, "create", create)
    with pytest.raises(StorageError, match="it is full"):
        Probe(str(tmp_path)).try_creating()


@pytest.mark.parametrize(
    ("commits", "newest", "outcome"),
    [
        ({}, None, "ok"),
        ({"complete": 3, "incomplete": 1}, NEWEST, "ok"),
        ({"complete": 3, "quarantined": 1}, NEWEST, "warning"),
        ({"broken": 2}, None, "failure"),
    ],
)
def test_what_a_root_holds_is_judged(
    commits: dict[str, int], newest: dict[str, Any] | None, outcome: str
) -> None:
    found = {"url": "s3://b/run", "commits": commits, "newest": newest, "claim": 1}
    finding = roots.judge_root(found, 180.0)
    assert finding.outcome == outcome
    assert newest is None or "g0001-c00000007, which is 3 min old" in finding.what


def test_other_bytes_than_were_written_are_a_failure() -> None:
    found = {"bytes": 10**7, "write_seconds": 0.1, "read_seconds": 0.05, "same": True}
    finding = roots.judge_writing(found, "h1")
    assert (finding.outcome, "write 100 MB/s, read 200 MB/s" in finding.what) == ("ok", True)
    assert finding.facts["bytes_per_second"] == {"write": pytest.approx(1e8), "read": pytest.approx(2e8)}
    assert roots.judge_writing({**found, "same": False}, "h1").outcome == "failure"


@pytest.mark.parametrize(
    ("winners", "whole", "kept", "outcome"),
    [
        (1, True, True, "ok"),
        (2, True, True, "failure"),
        (1, False, True, "failure"),
        (1, True, False, "failure"),
    ],
)
def test_creating_is_for_one_only(winners: int, whole: bool, kept: bool, outcome: str) -> None:
    found = {"rivals": 4, "winners": winners, "whole": whole, "kept": kept}
    assert roots.judge_creating(found).outcome == outcome


@pytest.mark.parametrize(
    ("free", "state", "outcome"),
    [
        (None, 1, "skipped"),
        (5, None, "ok"),
        (40, 10, "ok"),
        (39, 10, "warning"),
        (10, 10, "warning"),
        (9, 10, "failure"),
    ],
)
def test_there_is_space_for_what_is_kept(free: int | None, state: int | None, outcome: str) -> None:
    assert roots.judge_space(free, state).outcome == outcome


def test_all_hosts_have_to_see_the_same_root() -> None:
    assert roots.judge_shared({}, "h1").outcome == "skipped"
    assert roots.judge_shared({"h2": True}, "h1").outcome == "ok"
    blind = roots.judge_shared({"h2": True, "h3": False}, "h1")
    assert (blind.outcome, blind.what) == ("warning", "h3 can't see there what h1 writes")
    broken = roots.judge_shared({"h2": "no credentials", "h3": False}, "h1")
    assert broken.outcome == "failure"
    assert "h2: no credentials" in broken.what
