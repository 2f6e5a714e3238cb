"""Roots in file systems that several hosts have mounted."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.doctor import host
from hvdrecover.errors import ConfigError, FencedError
from tests.contracts import mounts
from tests.contracts.mounts import Mounts
from tests.integration.conftest import LONG
from tests.unit.checkpoint.roots import assert_is, make_snapshot, make_store

pytestmark = LONG


def test_jobs_on_two_hosts_of_one_moosefs_see_each_other(moosefs_mounts: Mounts) -> None:
    name = uuid.uuid4().hex
    older, newer = (
        make_store(open_storage(f"file://{place}/{name}"), job=job)
        for place, job in zip(moosefs_mounts, ("older", "newer"), strict=True)
    )
    older.claim_next()
    older.write(make_snapshot(1, 1), rank=0)
    older.claims.check(1)  # so that there is something to remember
    assert newer.claim_next() == 2
    with pytest.raises(FencedError):
        older.write(make_snapshot(1, 2), rank=0)
    newer.write(make_snapshot(2, 2), rank=0)
    assert_is(load_newest(older), make_snapshot(2, 2))


def test_sshfs_is_refused_at_the_start_and_by_the_doctor_as_it_shows_what_was(tmp_path: Path) -> None:
    with mounts.sshfs(tmp_path) as (one, other):
        (one / "claims").mkdir()
        assert list((other / "claims").iterdir()) == []
        (one / "claims" / "g0001.json").touch()
        assert list((other / "claims").iterdir()) == []  # for this it is refused
        url = f"file://{other}/root"
        for start in (lambda: make_store(open_storage(url)).claim_next(), lambda: host.root(url)):
            with pytest.raises(ConfigError, match=r"sshfs.*sftp://"):
                start()
        assert open_storage(url).names() == []  # reading is not refused
