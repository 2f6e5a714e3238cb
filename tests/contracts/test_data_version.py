"""The version of training data on every kind of storage."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.data import version
from hvdrecover.data.version import DataVersion, differences
from hvdrecover.errors import ConfigError, StorageError
from tests.contracts.servers import S3Server, SftpServer
from tests.contracts.storages import SECRET, Backend, buffer, noise
from tests.fakes.clock import FakeClock


@pytest.fixture
def data(backend: Backend) -> str:
    """The URL of three files."""
    write(
        backend.url, {"a.bin": noise(1000), "train/b.bin": noise(3000, 2), "train/deep/c.bin": buffer(b"c")}
    )
    return backend.url


def write(url: str, content: dict[str, Any]) -> None:
    storage = open_storage(url)
    for name, written in content.items():
        storage.write(name, written)


def test_the_same_files_have_the_same_version(data: str) -> None:
    before, after = (DataVersion.of_files(data) for _ in range(2))
    assert before == after
    sizes = {name: size for name, (size, _) in before.files.items()}
    assert sizes == {"a.bin": 1000, "train/b.bin": 3000, "train/deep/c.bin": 1}
    assert list(DataVersion.of_files(f"{data}/train/b.bin").files) == ["b.bin"]


def test_every_kind_of_change_is_named(data: str) -> None:
    before = DataVersion.of_files(data)
    open_storage(data).remove("train/deep/c.bin")
    time.sleep(1.1)  # times of modification count in whole seconds
    write(data, {"a.bin": noise(999), "train/b.bin": noise(3000, 3), "new": buffer(b"new")})
    lines = differences(json.loads(json.dumps(before.as_json())), DataVersion.of_files(data))
    assert lines[:2] == ["removed: train/deep/c.bin", "added: new"]
    assert lines[2].startswith("changed: a.bin (was 1000 bytes of ")
    if before.files["a.bin"][1]:  # fsspec's file system in memory lists no times
        assert len(lines) == 4 and lines[3].startswith("changed: train/b.bin (was 3000 bytes of ")


def test_where_nothing_is_the_url_is_named(data: str) -> None:
    with pytest.raises(ConfigError, match=r"^data: .*'.*/nowhere'"):
        DataVersion.of_files(f"{data}/nowhere")
    if data.startswith("s3:"):
        with pytest.raises(ConfigError, match="s3://no-such-bucket"):
            DataVersion.of_files("s3://no-such-bucket/data")


def test_an_object_store_is_listed_once_and_no_file_is_read(s3: Backend, s3_server: S3Server) -> None:
    write(s3.url, {f"folder-{number}/x": buffer(b"x") for number in range(10)})
    s3_server.requests.clear()
    assert len(DataVersion.of_files(s3.url).files) == 10
    assert len([request for request in s3_server.requests if "list-type=2" in request]) <= 2
    assert not [request for request in s3_server.requests if "GET" in request and "folder-" in request]


def test_the_same_bytes_uploaded_again_are_the_same_object(s3: Backend) -> None:
    write(s3.url, {"x": noise(1000)})
    before = DataVersion.of_files(s3.url)
    time.sleep(1.1)
    write(s3.url, {"x": noise(1000)})
    assert DataVersion.of_files(s3.url) == before


def test_a_refused_request_is_a_storage_error_without_the_secret(
    s3: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(s3.url, {"folder/x": buffer(b"x")})
    monkeypatch.setattr(s3_server, "fault", lambda request: "list-type=2" in request)
    clock = FakeClock()
    monkeypatch.setattr(version, "SYSTEM_CLOCK", clock)
    with pytest.raises(StorageError, match=r"could not (look|list)") as caught:
        DataVersion.of_files(s3.url)
    assert len(clock.waits) == 4
    assert SECRET.strip("/") not in str(caught.value)


def test_credentials_in_a_url_are_shown_nowhere(sftp: Backend, sftp_server: SftpServer) -> None:
    url = sftp.url.replace("sftp://", f"sftp://{sftp_server.user}:hunter2@")
    with pytest.raises(ConfigError) as caught:
        DataVersion.of_files(f"{url}/nowhere")
    assert f"'{sftp.url}/nowhere'" in str(caught.value)
