"""The promises of `hvdrecover.checkpoint.storage.Storage`, held against every kind of storage."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import digest
from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.checkpoint.store import load_newest
from hvdrecover.errors import FencedError, StorageError
from tests.contracts.conftest import REAL, core
from tests.contracts.storages import SECRET, Backend, buffer, every_call, noise
from tests.unit.checkpoint.roots import assert_is, make_snapshot, make_store

# The clients of Azure and GCS try for minutes before they report that a server is away.
RESTARTED = [each for each in REAL if each.values == ("seaweedfs",)]


# -- files ---------------------------------------------------------------------------------------------


@core
@pytest.mark.parametrize("data", [b"", bytes(range(256)) * 1000])
def test_what_was_written_is_read(storage: Storage, data: bytes) -> None:
    assert storage.write("folder/file", buffer(data)) == digest(data)
    storage.publish("folder/small", data)
    into = np.zeros(len(data), dtype=np.uint8)
    assert storage.read_into("folder/file", into) == (len(data), digest(data))
    assert into.tobytes() == data
    assert storage.read("folder/small") == data
    assert storage.size("folder/file") == storage.size("folder/small") == len(data)


@core
@pytest.mark.parametrize("more", [-1, 1])
def test_files_of_many_pieces(backend: Backend, more: int) -> None:
    storage, content = backend.open_in_pieces(), noise(backend.large + more)
    assert storage.write("folder/file", content) == digest(content)
    assert (storage.names(), storage.names("folder")) == (["folder"], ["file"])
    into = np.zeros(len(content), dtype=np.uint8)
    assert storage.read_into("folder/file", into) == (len(content), digest(content))
    assert np.array_equal(into, content)


@core
def test_names_are_those_directly_below_and_sorted(storage: Storage) -> None:
    assert (storage.names(), storage.names("claims"), storage.size("claims/g0001.json")) == ([], [], None)
    for path in ("b/2", "b/1", "a/deep/er/3", "c"):
        storage.publish(path, b"")
    assert storage.names() == ["a", "b", "c"]
    assert storage.names("b") == ["1", "2"]
    assert storage.names("a") == ["deep"]
    assert storage.names("a/deep") == ["er"]
    assert storage.names("nowhere") == []
    assert storage.size("a/deep") is None  # a folder has no size


@core
def test_a_shorter_file_replaces_a_longer_one_whole(backend: Backend) -> None:
    storage = backend.open_in_pieces()
    storage.write("f", noise(backend.large))
    storage.write("f", noise(backend.large - 99, seed=1))
    assert storage.size("f") == backend.large - 99
    storage.write("f", buffer(b"short"))
    storage.publish("g", b"long content")
    storage.publish("g", b"short")
    assert (storage.read("f"), storage.read("g")) == (b"short", b"short")


@core
def test_read_into_begins_where_it_is_told_and_tells_how_much_there_was(storage: Storage) -> None:
    storage.write("f", buffer(b"0123456789"))
    for start, expected in ((0, b"0123"), (3, b"3456"), (8, b"89"), (10, b""), (12, b"")):
        into = np.zeros(4, dtype=np.uint8)
        assert storage.read_into("f", into, start) == (len(expected), digest(expected))
        assert into.tobytes() == expected.ljust(4, b"\0")


@core
def test_remove_takes_one_file_and_delete_a_folder_with_all_below(storage: Storage) -> None:
    for path in ("a/0", "a/1", "a/deep/2", "ab/3"):
        storage.publish(path, b"")
    for path in ("a/0", "a/0", "nowhere/1"):
        storage.remove(path)
    assert storage.names("a") == ["1", "deep"]
    storage.delete("a")
    storage.delete("a")
    assert storage.names() == ["ab"]
    assert storage.size("a/1") is None


# -- exclusive creation --------------------------------------------------------------------------------


@core
def test_create_is_for_files_that_are_not_there(storage: Storage) -> None:
    assert storage.create("claims/g0001.json", b"mine") is True
    assert storage.create("claims/g0001.json", b"theirs") is False
    assert storage.create("claims/g0001.json", b"mine") is False
    assert storage.read("claims/g0001.json") == b"mine"
    assert storage.names("claims") == ["g0001.json"]


_COMPETITOR = """
import sys
from hvdrecover.checkpoint.storage import open_storage
storage, content = open_storage(sys.argv[1]), sys.argv[2].encode()
storage.names()
print("ready", flush=True)
sys.stdin.readline()
print(sum(storage.create(f"claims/{number}", content) for number in range(20)), flush=True)
"""


@pytest.mark.parametrize("kind", ["local", "s3", "sftp", *REAL])
def test_one_of_two_processes_creates_a_file(request: pytest.FixtureRequest, kind: str) -> None:
    backend: Backend = request.getfixturevalue(kind)
    environment = {**os.environ, **backend.environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _COMPETITOR, url, name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, url in zip("ab", cycle(backend.urls), strict=False)
    ]
    try:
        assert all(process.stdout and process.stdout.readline() == "ready\n" for process in processes)
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        won = {name: int(process.communicate()[0]) for name, process in zip("ab", processes, strict=True)}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    storage = backend.open()
    found = [storage.read(f"claims/{number}").decode() for number in range(20)]
    assert {name: found.count(name) for name in "ab"} == won


# -- failures ------------------------------------------------------------------------------------------


@core
def test_reading_what_is_not_there_is_a_storage_error_that_names_it(storage: Storage) -> None:
    storage.publish("a/1", b"")
    for read in (storage.read, lambda path: storage.read_into(path, np.zeros(1, dtype=np.uint8))):
        with pytest.raises(StorageError) as caught:
            read("a/2")
        assert caught.value.url == f"{storage.url}/a/2"
        assert str(caught.value).startswith(f"{storage.url}/a/2: ")
        assert caught.value.__cause__ is not None


def test_a_root_that_is_a_file_is_a_storage_error(backend: Backend) -> None:
    backend.open().publish("file", b"content")
    below = open_storage(f"{backend.url}/file")
    if backend.folders:  # else a name is a name, and others may begin like it
        for call in (
            lambda: below.create("claims/g0001.json", b""),
            lambda: below.publish("claims/g0001.json", b""),
            lambda: below.write("g0001-c00000001/model.safetensors", buffer(b"x")),
        ):
            with pytest.raises(StorageError):
                call()
    assert backend.open().read("file") == b"content"


@pytest.mark.parametrize("kind", ["s3", "sftp", *RESTARTED])
def test_all_fails_while_the_server_is_away_and_continues_when_it_is_back(
    request: pytest.FixtureRequest, kind: str
) -> None:
    backend: Backend = request.getfixturevalue(kind)
    assert backend.stop and backend.start
    storage = backend.open_in_pieces()
    storage.publish("f", b"content")
    backend.stop()
    try:
        for name, call in every_call(storage).items():
            with pytest.raises(StorageError) as caught:
                call()
                pytest.fail(f"{name} went through")
            assert str(caught.value).startswith(f"{storage.url}")
            assert SECRET not in str(caught.value)
        with pytest.raises(StorageError):
            backend.open().names()
    finally:
        backend.start()
    for call in every_call(storage).values():
        call()
    assert (storage.names(), storage.read("g")) == (["g"], b"1")


# -- commits -------------------------------------------------------------------------------------------


@core
def test_retention_and_leftovers_delete_commits(backend: Backend) -> None:
    storage = backend.open()
    store = make_store(storage, keep=1)
    store.claim_next()
    for commit in (1, 2, 3):
        store.write(make_snapshot(1, commit), rank=0)
    storage.write("g0001-c00000004/model.safetensors", buffer(b"half a commit"))
    following = make_store(backend.open(), job="next", keep=1)
    following.claim_next()
    following.write(make_snapshot(2, 5), rank=0)
    assert_is(load_newest(make_store(backend.open())), make_snapshot(2, 5))
    assert [name for name in storage.names() if name.startswith("g")] == ["g0002-c00000005"]


@core
def test_of_two_jobs_that_claim_one_root_the_older_is_fenced(backend: Backend) -> None:
    older = make_store(backend.open(), job="older")
    newer = make_store(open_storage(backend.urls[-1]), job="newer")  # perhaps on another host
    assert older.claim_next() == 1
    older.write(make_snapshot(1, 1), rank=0)
    older.claims.check(1)  # so that there is something to remember
    assert newer.claim_next() == 2
    with pytest.raises(FencedError, match=f"^{backend.url}: generation 2 "):
        older.write(make_snapshot(1, 2), rank=0)
    newer.write(make_snapshot(2, 2), rank=0)
    assert_is(load_newest(make_store(backend.open())), make_snapshot(2, 2))


@core
def test_a_commit_that_is_late_is_not_published(backend: Backend) -> None:
    older, newer = make_store(backend.open(), job="older"), make_store(backend.open(), job="newer")
    older.claim_next()
    write = older.storage.write

    def interrupted(path: str, content: Any) -> str:
        done = write(path, content)
        newer.claim_next()  # when the older one has looked for a newer claim, and is nearly done
        return done

    older.storage.write = interrupted  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        older.write(make_snapshot(1, 1), rank=0)
    assert load_newest(make_store(backend.open())) is None
