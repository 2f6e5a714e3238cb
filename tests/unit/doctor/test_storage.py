"""Trials of a checkpoint root, and the checks of storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.doctor import checks, host
from hvdrecover.errors import LaunchError

NEWEST = {"commit": "g0001-c00000007", "time": 0.0, "host": "h1", "bytes": 5}


def test_a_storage_that_changes_bytes_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: LocalStorage, path: str, buffer: Any) -> str:
        changed = buffer.copy()
        changed[changed.size // 2] ^= 1
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(changed)
        return "the digest of the right bytes"

    monkeypatch.setattr(LocalStorage, "write", write)
    found = checks.check_writing(host.root(str(tmp_path))["problem"], "h1")
    assert (found.outcome, found.at_fault) == ("failure", ["h1"])
    assert "reads other bytes" in found.what


@pytest.mark.parametrize(
    ("commits", "broken", "newest", "outcome"),
    [
        ({"complete": 3, "incomplete": 1}, 0, NEWEST, "ok"),
        ({"complete": 3, "quarantined": 1}, 1, NEWEST, "warning"),
        ({"broken": 2}, 2, None, "failure"),
    ],
)
def test_a_root_should_hold_usable_commits(
    commits: dict[str, int], broken: int, newest: dict[str, Any] | None, outcome: str
) -> None:
    root = {"url": "s3://b/run", "commits": commits, "broken": broken, "newest": newest}
    found = checks.check_root(root, 180.0)
    assert found.outcome == outcome
    assert newest is None or "g0001-c00000007, which is 3 min old" in found.what


@pytest.mark.parametrize(
    ("free", "state", "outcome"),
    [
        (None, 1, "skipped"),
        (39, 10, "warning"),
        (9, 10, "failure"),
    ],
)
def test_a_root_needs_space_for_four_commits(free: int | None, state: int | None, outcome: str) -> None:
    assert checks.check_space(free, state).outcome == outcome


def test_all_hosts_have_to_see_the_same_root() -> None:
    assert checks.check_shared({}, "h1").outcome == "skipped"
    assert checks.check_shared({"h2": True}, "h1").outcome == "ok"
    blind = checks.check_shared({"h2": True, "h3": False}, "h1")
    assert (blind.outcome, blind.what) == ("warning", "h3 cannot see the file that h1 wrote")
    broken = checks.check_shared({"h2": LaunchError("h2", "no credentials"), "h3": False}, "h1")
    assert broken.outcome == "failure"
    assert "h2: no credentials" in broken.what
