"""The parts that S3's storage sends, and those that the store copies, counted at real servers' client."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import TensorSpec, plan
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.storage import Storage, uploads
from hvdrecover.errors import StorageError
from tests.contracts.servers import S3Server, stored
from tests.contracts.storages import Backend, kill_when_it_says
from tests.contracts.test_storage import noise
from tests.integration.conftest import LONG
from tests.unit.checkpoint.roots import make_snapshot, make_store

MIB = 1 << 20
PART = 5 * MIB  # of `Backend.open_in_pieces`
Answer = dict[str, Any]


class Requests:
    """The requests about parts that a storage makes; each is made.

    Attributes:
        sent: numbers of the parts whose bytes were sent.
        nbytes: how many bytes that were.
        copied: numbers of those that the store was asked to copy and did, and the keys they came from.
        before, after: called around each copy with its number, and its answer, which may be changed.
    """

    def __init__(self, storage: Any) -> None:
        self._call = storage._fs.call_s3
        self.sent: list[int] = []
        self.copied: dict[int, str] = {}
        self.nbytes = 0
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int, Answer], None] = lambda number, answer: None

    def __call__(self, method: str, **named: Any) -> Answer:
        number = named.get("PartNumber", 0)
        if method == "upload_part_copy":
            self.before(number)
            answer: Answer = self._call(method, **named)
            self.copied[number] = named["CopySource"]["Key"]
            self.after(number, answer)
            return answer
        if method == "upload_part":
            self.sent.append(number)
            self.nbytes += len(named["Body"])
        answer = self._call(method, **named)
        return answer

    def take(self) -> tuple[list[int], list[int]]:
        """The parts that were sent, and those that were copied, since the last time."""
        found = sorted(self.sent), sorted(self.copied)
        self.sent, self.copied, self.nbytes = [], {}, 0
        return found


@pytest.fixture(params=["s3", pytest.param("seaweedfs", marks=LONG)])
def each(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def backend(s3: Backend) -> Backend:
    return s3


def spied(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> tuple[Storage, Requests]:
    storage: Any = backend.open_in_pieces()
    requests = Requests(storage)
    monkeypatch.setattr(storage._fs, "call_s3", requests)
    return storage, requests


def content(storage: Storage, path: str) -> Any:
    nbytes = storage.size(path)
    assert nbytes is not None
    into = np.zeros(nbytes, dtype=np.uint8)
    storage.read_into(path, into)
    return into


def write(storage: Storage, requests: Requests, commit: int, data: Any) -> tuple[list[int], list[int]]:
    """Write a file of a commit, read it back, and return which parts were sent and which copied."""
    storage.write(f"{commit}/model", data)
    assert np.array_equal(content(storage, f"{commit}/model"), data)
    return requests.take()


# -- what is copied ------------------------------------------------------------------------------------


def test_parts_that_did_not_change_are_copied_from_the_commit_before_the_last_one(
    each: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(each, monkeypatch)
    data = noise(12 * MIB)
    assert write(storage, requests, 1, data) == ([1, 2, 3], [])
    assert write(storage, requests, 2, data) == ([1, 2, 3], [])
    data[PART + 7] += 1
    storage.write("3/model", data)
    assert requests.nbytes == PART
    assert set(requests.copied.values()) == {f"{each.url.split('/', 3)[3]}/1/model"}
    assert requests.take() == ([2], [1, 3])
    assert np.array_equal(content(storage, "3/model"), data)
    assert write(storage, requests, 4, data) == ([2], [1, 3])  # a part that changed is sent twice
    assert write(storage, requests, 5, data) == ([], [1, 2, 3])
    data[-1] += 1
    assert write(storage, requests, 6, data) == ([3], [1, 2])


def test_files_of_other_names_and_small_ones_are_not_mixed_up(
    each: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(each, monkeypatch)
    model, optimizer = noise(12 * MIB), noise(11 * MIB, seed=1)
    for commit in (1, 2, 3):
        storage.write(f"{commit}/model", model)
        storage.write(f"{commit}/optimizer", optimizer)
        storage.write(f"{commit}/small", noise(PART))
    assert len(requests.copied) == 3 and len(requests.sent) == 12
    for name, data in (("model", model), ("optimizer", optimizer), ("small", noise(PART))):
        assert np.array_equal(content(storage, f"3/{name}"), data)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (12 * MIB + 1, ([3], [1, 2])),
        (21 * MIB, ([3, 4, 5], [1, 2])),
        (12 * MIB - 1, ([3], [1, 2])),
        (10 * MIB, ([], [1, 2])),
    ],
)
def test_a_file_that_grew_or_shrank(
    each: Backend, monkeypatch: pytest.MonkeyPatch, nbytes: int, expected: Any
) -> None:
    storage, requests = spied(each, monkeypatch)
    data = noise(21 * MIB)
    for commit in (1, 2):
        write(storage, requests, commit, data[: 12 * MIB])
    assert write(storage, requests, 3, data[:nbytes]) == expected


def test_parts_of_another_size_are_sent(each: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, requests = spied(each, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    monkeypatch.setattr(storage, "_piece", 6 * MIB)
    assert write(storage, requests, 3, noise(12 * MIB)) == ([1, 2], [])


def test_another_process_knows_nothing_and_sends_all(each: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, requests = spied(each, monkeypatch)
    for commit in (1, 2, 3):
        write(storage, requests, commit, noise(12 * MIB))
    other: Any = each.open_in_pieces()
    assert write(other, requests, 4, noise(12 * MIB)) == ([1, 2, 3], [])


def test_a_line_of_copies_ends(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "LONGEST_LINE", 2)
    storage, requests = spied(backend, monkeypatch)
    whole = [not write(storage, requests, commit, noise(12 * MIB))[1] for commit in range(1, 13)]
    assert whole == [True, True, False, False, False, False] * 2


def test_commits_of_a_store_verify_while_retention_deletes_the_ones_they_came_from(
    each: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(each, monkeypatch)
    store = make_store(storage, keep=2)
    store.claim_next()
    arena = Arena(plan([TensorSpec("weight", "U8", (16 * MIB,))]))
    arena.bytes_of("weight")[:] = noise(16 * MIB)
    for commit in range(1, 7):
        arena.bytes_of("weight")[-1] = commit
        snapshot = make_snapshot(1, commit)
        snapshot.arenas["model"] = arena
        store.write(snapshot, rank=0)
        assert requests.take() == (([1, 2, 3, 4], []) if commit < 3 else ([4], [1, 2, 3]))
        found = load_newest(make_store(each.open()))
        assert found is not None and found.arenas["model"].buffer.tobytes() == arena.buffer.tobytes()


# -- sources that are not what they were ---------------------------------------------------------------


def test_what_has_been_deleted_is_sent(each: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, requests = spied(each, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    storage.delete("1")
    assert write(storage, requests, 3, noise(12 * MIB)) == ([1, 2, 3], [])
    assert write(storage, requests, 4, noise(12 * MIB)) == ([], [1, 2, 3])


def test_what_is_deleted_between_two_parts_is_sent_from_there_on(
    each: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(each, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    deleted = threading.Event()

    def before(number: int) -> None:
        assert number == 1 or deleted.wait(60)

    def after(number: int, answer: Answer) -> None:
        storage.delete("1")
        deleted.set()

    requests.before, requests.after = before, after
    assert write(storage, requests, 3, noise(12 * MIB)) == ([2, 3], [1])


def test_what_has_been_replaced_is_sent(each: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, requests = spied(each, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    other: Any = each.open_in_pieces()
    other.write("1/model", noise(12 * MIB, seed=1))
    requests.take()
    assert write(storage, requests, 3, noise(12 * MIB)) == ([1, 2, 3], [])


def test_a_commit_that_is_written_again_is_sent_whole(each: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lines of copies would be one otherwise."""
    storage, requests = spied(each, monkeypatch)
    for commit in (1, 2, 3):
        write(storage, requests, commit, noise(12 * MIB))
    assert write(storage, requests, 3, noise(12 * MIB)) == ([1, 2, 3], [])
    assert write(storage, requests, 4, noise(12 * MIB)) == ([], [1, 2, 3])


def test_what_rots_in_the_store_is_not_copied_on(
    backend: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(backend, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    rotten = stored(backend.url.split("/")[2], "runs/one/1/model")
    data = bytearray(rotten.value)
    data[PART + 99] ^= 1
    rotten.value = bytes(data)
    assert not np.array_equal(content(storage, "1/model"), noise(12 * MIB))
    storage.write("3/model", noise(12 * MIB))
    assert np.array_equal(content(storage, "3/model"), noise(12 * MIB))
    assert requests.take() == ([1, 2, 3], [1, 2, 3])


# -- stores that copy badly, or not --------------------------------------------------------------------


@pytest.mark.parametrize("known", ["400", "501"])
def test_a_store_that_does_not_copy_is_asked_once(
    backend: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    storage, requests = spied(backend, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    s3_server.requests.clear()
    s3_server.fault = lambda request: request.startswith("COPY")
    s3_server.refusal = f"{known} Refused"
    for commit in (3, 4, 5, 6):
        assert write(storage, requests, commit, noise(12 * MIB)) == ([1, 2, 3], [])
    asked = [request for request in s3_server.requests if request.startswith("COPY")]
    assert asked and all("/3/model" in request for request in asked)


def test_a_store_that_does_not_heed_the_condition_is_found_out(
    backend: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(backend, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    backend.open_in_pieces().write("1/model", noise(12 * MIB, seed=1))
    requests.take()
    s3_server.conditions = False
    assert write(storage, requests, 3, noise(12 * MIB)) == ([1, 2, 3], [1, 2, 3])
    assert write(storage, requests, 4, noise(12 * MIB)) == ([1, 2, 3], [])


@pytest.mark.parametrize("right", [True, False])
def test_a_store_whose_digests_say_nothing_is_believed_after_a_look(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    storage, requests = spied(backend, monkeypatch)
    call, fetched, named = requests._call, list[str](), dict[str, str]()

    def otherwise(method: str, **arguments: Any) -> Answer:
        if method == "upload_part_copy" and not right:
            arguments["CopySourceRange"] = "bytes=0-" + arguments["CopySourceRange"].split("-")[1]
        if method == "complete_multipart_upload":
            for part in arguments["MultipartUpload"]["Parts"]:
                part["ETag"] = named.get(part["ETag"], part["ETag"])
        answer: Answer = call(method, **arguments)
        if method == "upload_part_copy":
            result = answer["CopyPartResult"]
            named[other := f'"{len(named):032x}"'] = result["ETag"]
            result["ETag"] = other
        return answer

    def cat(path: str, **arguments: Any) -> bytes:
        fetched.append(path)
        data: bytes = cat_file(path, **arguments)
        return data

    requests._call = otherwise
    filesystem = storage._fs  # type: ignore[attr-defined]
    cat_file = filesystem.cat_file
    monkeypatch.setattr(filesystem, "cat_file", cat)
    data = noise(12 * MIB)
    for commit in range(1, 6):
        storage.write(f"{commit}/model", data)
    assert [re.sub(".*/one/", "", path) for path in fetched] == ["3/model"]
    assert sorted(requests.sent) == sorted([1, 2, 3] * (2 if right else 5))
    for commit in range(1, 6):
        assert np.array_equal(content(storage, f"{commit}/model"), data)


def test_a_store_that_is_away_while_it_is_to_copy_is_asked_again_later(
    backend: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, requests = spied(backend, monkeypatch)
    for commit in (1, 2):
        write(storage, requests, commit, noise(12 * MIB))
    s3_server.fault = lambda request: "partNumber" in request
    with pytest.raises(StorageError, match=r"/3/model: .*write"):
        storage.write("3/model", noise(12 * MIB))
    s3_server.reset()
    requests.take()
    assert storage.temporaries() == []
    assert write(storage, requests, 3, noise(12 * MIB)) == ([], [1, 2, 3])


# -- a killed writer -----------------------------------------------------------------------------------


_WRITER = """
import sys
import numpy as np
from hvdrecover.checkpoint.storage import open_storage
from tests.unit.checkpoint.roots import make_store
storage = open_storage(sys.argv[1])
make_store(storage, job="killed").claim_next()
data = np.ones(40 << 20, dtype=np.uint8)
for commit in (1, 2):
    storage.write(f"g0001-c0000000{commit}/model.safetensors", data)
call = storage._fs.call_s3
def call_and_wait(method, *args, **named):
    answer = call(method, *args, **named)
    if method == "upload_part_copy":
        print("copied", flush=True)
        sys.stdin.read()
    return answer
storage._fs.call_s3 = call_and_wait
storage.write("g0001-c00000003/model.safetensors", data)
"""


def test_the_next_writer_aborts_the_copying_of_one_that_was_killed(each: Backend) -> None:
    kill_when_it_says("copied", _WRITER, each)
    assert [left.folder for left in each.open().temporaries()] == ["g0001-c00000003"]
    following = make_store(each.open(), job="next")
    following.claim_next()
    following.write(make_snapshot(2, 5), rank=0)
    assert each.open().temporaries() == []
