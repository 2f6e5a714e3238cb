"""The peculiarities of S3: uploads in parts, conditional requests, credentials."""

from __future__ import annotations

import re
import socket
from typing import Any

import fsspec
import moto.settings
import numpy as np
import pytest
from moto.core.responses import ActionAuthenticatorMixin
from moto.iam.models import iam_backends

from hvdrecover.checkpoint.storage import open_storage, remote
from hvdrecover.doctor import host
from hvdrecover.errors import ConfigError, StorageError
from tests.contracts.servers import HOST, S3Server
from tests.contracts.storages import SECRET, Backend, kill_when_it_says, noise, s3_options
from tests.integration.conftest import LONG
from tests.unit.checkpoint.roots import make_snapshot, make_store

MIB = 1 << 20


def unfinished(backend: Backend, prefix: str = "") -> list[str]:
    bucket = backend.url.split("/")[2]
    answer = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return [upload["Key"] for upload in answer.get("Uploads", ())]


def begin_upload(url: str) -> None:
    _, _, bucket, key = url.split("/", 3)
    fsspec.filesystem("s3").call_s3("create_multipart_upload", Bucket=bucket, Key=key)


def test_a_large_file_is_uploaded_in_parts_and_a_small_one_with_one_request(
    s3: Backend, s3_server: S3Server
) -> None:
    storage = s3.open_in_pieces()
    storage.write("small", noise(5 * MIB))
    assert [request.split()[0] for request in s3_server.requests] == ["PUT"]
    s3_server.requests.clear()
    storage.write("large", noise(11 * MIB))
    parts = [re.findall(r"partNumber=(\d+)", request) for request in s3_server.requests]
    assert sorted(number for found in parts for number in found) == ["1", "2", "3"]


def test_tidying_aborts_what_killed_processes_left_below_the_root(s3: Backend) -> None:
    storage = s3.open()
    for path in ("g0001-c00000001/a", "g0001-c00000001/b", "g0001-c00000002/a"):
        begin_upload(f"{s3.url}/{path}")
    begin_upload(f"{s3.url}-other/g0001-c00000001/a")
    assert len(unfinished(s3)) == 4
    storage.tidy(lambda folder: True)
    assert unfinished(s3) == ["runs/one-other/g0001-c00000001/a"]


_WRITER = """
import sys
import numpy as np
from hvdrecover.checkpoint.storage import open_storage
from tests.unit.checkpoint.roots import make_store
storage = open_storage(sys.argv[1])
make_store(storage, job="killed").claim_next()
call = storage._fs._call_s3
async def call_and_wait(method, *args, **named):
    answer = await call(method, *args, **named)
    if method == "upload_part":
        print("uploaded", flush=True)
        sys.stdin.read()
    return answer
storage._fs._call_s3 = call_and_wait
storage.write("g0001-c00000001/model.safetensors", np.ones(40 << 20, dtype=np.uint8))
"""


@pytest.mark.parametrize("kind", ["s3", pytest.param("seaweedfs", marks=LONG)])
def test_the_next_writer_aborts_the_upload_of_one_that_was_killed(
    request: pytest.FixtureRequest, kind: str
) -> None:
    backend: Backend = request.getfixturevalue(kind)
    kill_when_it_says("uploaded", _WRITER, backend)
    assert [each.folder for each in backend.open().temporaries()] == ["g0001-c00000001"]
    following = make_store(backend.open(), job="next")
    following.claim_next()
    following.write(make_snapshot(2, 5), rank=0)
    assert backend.open().temporaries() == []


def test_a_claim_whose_answer_was_lost_is_ones_own(s3: Backend, s3_server: S3Server) -> None:
    lost: list[str] = []

    def lose_the_first(request: str) -> bool:
        if request.startswith("PUT") and "claims/" in request and not lost:
            lost.append(request)
            return True
        return False

    s3_server.lost = lose_the_first
    store = make_store(s3.open())
    assert store.claim_next() == 1
    assert len([request for request in s3_server.requests if request in lost]) == 2
    store.claims.check(1)


def test_a_store_that_ignores_the_condition_is_refused_at_the_start_and_by_the_doctor(
    s3: Backend, s3_server: S3Server
) -> None:
    s3_server.conditions = False
    with pytest.raises(ConfigError, match=r"If-None-Match.*two jobs"):
        make_store(s3.open()).claim_next()
    assert s3.open().names("claims") == []
    with pytest.raises(ConfigError, match="If-None-Match"):
        host.root(s3.url)


def test_a_bucket_that_is_not_there_is_a_storage_error_and_not_made(s3: Backend) -> None:
    storage = open_storage("s3://bucket-of-nobody/run")
    for call in (
        lambda: storage.publish("f", b""),
        lambda: storage.create("f", b""),
        lambda: storage.write("f", noise(1)),
    ):
        with pytest.raises(StorageError, match="bucket does not exist"):
            call()
    assert "bucket-of-nobody" not in fsspec.filesystem("s3").ls("")


def test_a_wrong_secret_is_a_storage_error_without_it(
    s3: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    iam = iam_backends["123456789012"]["aws"]
    iam.create_user("us-east-1", "user-of-the-test")
    key = iam.create_access_key("user-of-the-test").access_key_id
    monkeypatch.setitem(fsspec.config.conf, "s3", {**s3_options(s3_server.port), "key": key})
    monkeypatch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    monkeypatch.setattr(ActionAuthenticatorMixin, "request_count", 0)
    storage = open_storage(s3.url)
    for call in (storage.names, lambda: storage.create("f", b""), lambda: storage.write("f", noise(10))):
        with pytest.raises(StorageError, match=r"signature|Forbidden") as caught:
            call()
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET not in str(error) and key not in str(error)
            error = error.__cause__
    assert SECRET not in caplog.text
    iam.delete_access_key(key, "user-of-the-test")
    iam.delete_user("user-of-the-test")


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that takes connections, and never reads nor answers."""
    with socket.create_server((HOST, 0), backlog=100) as server:
        options = s3_options(server.getsockname()[1], connect_timeout=0.2, read_timeout=0.2)
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        monkeypatch.setattr(remote, "_PATIENCE", 0.5)
        monkeypatch.setattr(remote, "_SLOWEST", 1 << 40)
        yield open_storage("s3://bucket/run")


def test_nothing_waits_for_ever_for_a_server_that_does_not_answer(stalled: Any) -> None:
    for call in (
        lambda: stalled.names(),
        lambda: stalled.write("f", noise(8 * MIB)),
        lambda: stalled.read_into("f", np.zeros(1, dtype=np.uint8)),
    ):
        with pytest.raises(StorageError):
            call()
