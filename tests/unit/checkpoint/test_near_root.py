from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover.checkpoint import near_root
from hvdrecover.checkpoint.near_root import Keeper
from hvdrecover.errors import StorageError

KEEP = "import sys, pathlib; from hvdrecover.checkpoint.near_root import Keeper; "
KEEP += "k = Keeper.take(pathlib.Path(sys.argv[1])); print(k is not None, flush=True); sys.stdin.read()"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = near_root.folder(str(tmp_path), "file:///root")
    near_root.make(found, "file:///root")
    (found / "data").write_bytes(b"x" * 5000)
    return found


def test_a_near_root_is_private_and_says_whose_it_is(tmp_path, path):
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
    (seen,) = near_root.roots(str(tmp_path))
    assert (seen.path, seen.url, seen.in_use) == (path, "file:///root", False)
    assert seen.nbytes >= 5000


def test_a_folder_that_others_can_write_to_is_refused(tmp_path, path):
    path.parent.chmod(0o777)
    with pytest.raises(StorageError) as caught:
        near_root.make(path, "file:///root")
    assert caught.value.url == str(path.parent)
    with pytest.raises(StorageError):
        near_root.roots(str(tmp_path))


def test_what_another_process_keeps_is_in_use_until_that_ends(tmp_path, path):
    command = [sys.executable, "-c", KEEP, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        assert near_root.roots(str(tmp_path))[0].in_use
        assert Keeper.take(path) is None and not near_root.remove(path)
        assert path.is_dir()
        other.kill()
    assert not near_root.roots(str(tmp_path))[0].in_use
    assert near_root.remove(path)
    assert not path.parent.exists()


def test_looking_does_not_lose_this_processs_own_lock(tmp_path, path):
    keeper = Keeper.take(path)
    assert keeper is not None and near_root.roots(str(tmp_path))[0].in_use
    command = [sys.executable, "-c", KEEP, str(path)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).stdout == b"False\n"
    keeper.release()
    assert Keeper.take(path) is not None
    near_root._kept.discard(path)


def test_a_root_whose_owner_is_unreadable_is_still_listed(tmp_path, path):
    (path / "root.json").write_text("[1")
    assert near_root.roots(str(tmp_path))[0].url == ""
