"""A storage that fails on demand; the contract tests show that it is a storage as any other."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.drill import storage
from hvdrecover.errors import StorageError
from tests.support.processes import answer

FULL = (errno.ENOSPC, "No space left on device")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def opened(root: Path) -> Storage:
    opened = open_storage(storage.url(root))
    opened.publish("old", b"content")
    return opened


def data(nbytes: int = 5) -> np.ndarray:
    return np.ones(nbytes, dtype=np.uint8)


def test_a_fresh_process_opens_the_url(root: Path) -> None:
    open_storage(storage.url(root)).publish("a", b"x")
    code = f"import fsspec; print(fsspec.filesystem('{storage.PROTOCOL}', root='{root}').cat('{root}/a'))"
    assert answer(code) == "b'x'"


def test_another_process_fails_too(opened: Storage, root: Path) -> None:
    storage.set_behaviour(root, "away")
    code = (
        "from hvdrecover.checkpoint.storage import open_storage\n"
        f"try: open_storage('{storage.url(root)}').names()\n"
        "except OSError as error: print(error)"
    )
    assert "the storage is away" in answer(code)


def test_a_full_storage_can_only_be_read_and_tidied_up(opened: Storage, root: Path) -> None:
    opened.publish("other", b"")
    storage.set_behaviour(root, "full")
    for write in (
        lambda: opened.write("new", data()),
        lambda: opened.publish("new", b"x"),
        lambda: opened.create("new", b"x"),
    ):
        with pytest.raises(StorageError, match=FULL[1]) as caught:
            write()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == FULL[0]
    assert (opened.read("old"), opened.names()) == (b"content", ["old", "other"])
    opened.remove("other")
    storage.set_behaviour(root, "well")
    opened.publish("new", b"x")
    assert opened.names() == ["new", "old"]
