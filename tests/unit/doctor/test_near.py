from __future__ import annotations

import pytest

from hvdrecover.checkpoint.near import place
from hvdrecover.checkpoint.near.place import Keeper
from hvdrecover.doctor.near import judge, look

GB = 10**9
ROOM = {"total": 100 * GB, "free": 100 * GB, "memory": 40 * GB}


def host(**changed):
    return {"folder": "/dev/shm/hvdrecover-7", "room": ROOM, "held": 0, "roots": [], **changed}


@pytest.fixture
def near(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDRECOVER_NEAR", str(tmp_path))
    path = place.folder(str(tmp_path), "file:///root")
    place.make(path, "file:///root")
    (path / "data").write_bytes(b"x" * 5000)
    return path


def test_a_root_that_is_left_over_is_shown_and_counts_for_its_own_job(near):
    found = look("/root")
    assert found is not None and found["held"] >= 5000
    assert (look("/other") or {})["held"] == 0
    finding = judge({"h1": found}, None, found["roots"][0]["used"] + 7200)
    assert finding.outcome == "ok"
    assert f"h1: {near} of file:///root, " in finding.what and "left over for 2.0 h" in finding.what


def test_a_root_in_use_is_not_taken_over(near):
    keeper = Keeper.take(near)
    assert keeper is not None
    found = look("/root")
    keeper.remove()
    assert found is not None and found["held"] == 0
    assert judge({"h1": found}, 1000, 0.0).what.endswith("in use")


def test_turned_off_it_is_not_looked_at(monkeypatch):
    monkeypatch.setenv("HVDRECOVER_NEAR", "off")
    assert look(None) is None
    assert judge({"h1": None}, None, 0.0).outcome == "skipped"


def test_a_state_that_does_not_fit_is_a_warning():
    finding = judge({"h1": host(), "h2": host(room={**ROOM, "memory": 8 * GB})}, 5 * GB, 0.0)
    assert finding.outcome == "warning"
    assert (
        finding.what == "h2: 3 commits of 5 GB are too much for the 8 GB of memory left, so it would be off"
    )
    assert "/dev/shm" in finding.remedy
    assert judge({"h1": host()}, 5 * GB, 0.0).outcome == "ok"


def test_without_a_size_the_room_is_told():
    assert judge({"h1": host()}, None, 0.0).what == "there is room for states of 10 GB on h1"


def test_of_many_roots_the_largest_are_shown():
    many = [
        {"path": f"/p{n}", "url": "file:///r", "bytes": n * 10**6, "used": 0.0, "in_use": n == 1}
        for n in range(1, 6)
    ]
    what = judge({"h1": host(roots=many)}, None, 3600.0).what
    assert "/p5" in what and "/p3" in what and "/p2" not in what
    assert what.endswith("h1: 2 more, 3 MB, 1 of them in use")
