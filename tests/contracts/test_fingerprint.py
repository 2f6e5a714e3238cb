"""The fingerprint of files on every kind of storage, and what is peculiar to servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.data.fingerprint import Fingerprint, differences, fingerprint
from hvdrecover.data.fingerprints import files
from hvdrecover.data.fingerprints.places import RemoteReader
from hvdrecover.errors import ConfigError, StorageError
from tests.contracts.servers import S3Server, SftpServer, kill
from tests.contracts.storages import SECRET, Backend
from tests.contracts.test_storage import buffer, noise
from tests.fakes.clock import FakeClock


def names(taken: Fingerprint) -> list[str]:
    assert isinstance(taken.content, files.Files)
    return [each.first for each in taken.content.ranges]


@pytest.fixture
def data(backend: Backend) -> str:
    """The URL of three files, one of them large enough to be sampled in blocks."""
    write(
        backend.url,
        {"a.bin": noise(1000), "train/b.bin": noise(300_001, 2), "train/deep/c.bin": buffer(b"c")},
    )
    return backend.url


def write(url: str, content: dict[str, Any]) -> None:
    storage = open_storage(url)
    for name, written in content.items():
        storage.write(name, written)


# -- every storage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_the_same_files_have_the_same_fingerprint(data: str, full: bool) -> None:
    before, after = (fingerprint(data, full=full) for _ in range(2))
    assert before == after
    assert names(before) == ["a.bin", "train/b.bin", "train/deep/c.bin"]
    assert names(fingerprint(f"{data}/train/b.bin")) == ["b.bin"]
    assert names(fingerprint([f"{data}/train", f"{data}/a.bin"])) == names(before)


@pytest.mark.parametrize("full", [False, True])
def test_every_kind_of_change_is_named(data: str, full: bool) -> None:
    before = fingerprint(data, full=full)
    altered = noise(300_001, 2)
    altered[300_000] ^= 1
    write(data, {"a.bin": noise(999), "train/b.bin": altered, "new": buffer(b"new")})
    open_storage(data).remove("train/deep/c.bin")
    assert differences(before, fingerprint(data, full=full)) == [
        "removed: train/deep/c.bin (1 byte)",
        "added: new (3 bytes)",
        "resized: a.bin (from 1000 to 999 bytes)",
        "altered: train/b.bin",
    ]


def test_a_copy_on_a_local_disk_is_the_same(data: str, tmp_path: Path) -> None:
    copy = f"file://{tmp_path}/copy"
    write(copy, {"a.bin": noise(1000), "train/b.bin": noise(300_001, 2), "train/deep/c.bin": buffer(b"c")})
    for full in (False, True):
        assert differences(fingerprint(data, full=full), fingerprint(copy, full=full)) == []
    here, there = fingerprint(copy, full=True).content, fingerprint(data, full=True).content
    assert isinstance(here, files.Files) and isinstance(there, files.Files)
    assert [each.content for each in here.ranges] == [each.content for each in there.ranges]
    altered = noise(300_001, 2)
    altered[150_000] ^= 1
    write(copy, {"train/b.bin": altered})
    assert differences(fingerprint(data, full=True), fingerprint(copy, full=True)) == ["altered: train/b.bin"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.bin", ["a.bin"]),
        ("*/*.bin", ["train/b.bin"]),
        ("**/c.bin", ["train/deep/c.bin"]),
        ("t[a-z]ai*", ["train/b.bin", "train/deep/c.bin"]),
    ],
)
def test_wildcards_mean_the_same_everywhere(data: str, pattern: str, expected: list[str]) -> None:
    assert names(fingerprint(f"{data}/{pattern}")) == expected


def test_large_files_are_read_piece_by_piece(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteReader, "buffer", 5 << 20)
    write(backend.url, {"large": noise(12 << 20), "small": noise(3)})
    before = fingerprint(backend.url, full=True)
    altered = noise(12 << 20)
    altered[(12 << 20) - 100_000] ^= 1
    write(backend.url, {"large": altered})
    assert differences(before, fingerprint(backend.url, full=True)) == ["altered: large"]


def test_where_nothing_is_the_url_is_named(data: str) -> None:
    with pytest.raises(ConfigError, match=r"^data: .*'.*/nowhere'"):
        fingerprint(f"{data}/nowhere")


# -- S3 ------------------------------------------------------------------------------------------------


def test_a_store_with_tags_is_listed_once_and_no_file_is_read(s3: Backend, s3_server: S3Server) -> None:
    write(s3.url, {f"folder-{number}/x": buffer(b"x") for number in range(10)})
    s3_server.requests.clear()
    taken = fingerprint(s3.url)
    assert isinstance(taken.content, files.Files)
    assert (taken.content.tag, taken.content.samples) == ("ETag", {})
    listings = [request for request in s3_server.requests if "list-type=2" in request]
    assert len(listings) <= 2
    bucket = s3.url.split("/")[2]
    read = [request for request in s3_server.requests if request.startswith("GET") and "folder-" in request]
    assert not read
    assert all(bucket in request for request in s3_server.requests)


def test_an_object_that_was_uploaded_in_other_parts_is_the_same_if_all_is_read(s3: Backend) -> None:
    content = noise(11 << 20)
    write(s3.url, {"large": content})
    before = [fingerprint(s3.url, full=full) for full in (False, True)]
    s3.open_in_pieces().write("large", content)
    assert differences(before[0], fingerprint(s3.url)) == ["altered: large"]
    assert differences(before[1], fingerprint(s3.url, full=True)) == []


@pytest.mark.parametrize("step", ["list-type=2", "delimiter=&", "GET /bucket", "folder/x"])
def test_a_refused_request_is_a_storage_error_without_the_secret(
    s3: Backend, s3_server: S3Server, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(s3.url, {"folder/x": buffer(b"x")})
    monkeypatch.setattr(s3_server, "fault", lambda request: step in request)
    clock = FakeClock()
    with pytest.raises(StorageError, match=r"look|read") as caught:
        files.take([s3.url], True, clock)
    assert caught.value.url in (s3.url, f"{s3.url}/folder/x")
    assert len(clock.waits) == 4
    assert SECRET.strip("/") not in str(caught.value)


def test_a_request_that_fails_at_first_is_made_again(
    s3: Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(s3.url, {"folder/x": buffer(b"x" * 100)})
    expected = fingerprint(s3.url, full=True)
    asked: list[str] = []

    def once(request: str) -> bool:
        kind = "list" if "list-type=2" in request else request.split()[0]
        asked.append(kind)
        return kind != "HEAD" and asked.count(kind) == 1  # s3fs makes do without an answer to HEAD

    monkeypatch.setattr(s3_server, "fault", once)
    clock = FakeClock()
    assert Fingerprint("files", True, files.take([s3.url], True, clock)) == expected
    assert len(clock.waits) == len(set(asked) - {"HEAD"}) == 2


def test_a_bucket_that_is_not_there_is_named(s3: Backend) -> None:
    with pytest.raises(ConfigError, match="s3://no-such-bucket"):
        fingerprint("s3://no-such-bucket/data")


# -- SFTP ----------------------------------------------------------------------------------------------


def test_a_lost_connection_is_made_anew(sftp: Backend, sftp_server: SftpServer) -> None:
    write(sftp.url, {"folder/x": noise(200_000)})
    before = fingerprint(sftp.url, full=True)
    kill(sftp_server.sessions())
    clock = FakeClock()
    assert Fingerprint("files", True, files.take([sftp.url], True, clock)) == before


def test_links_to_files_are_followed_and_to_folders_refused(sftp: Backend, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(sftp.url, {"folder/x": noise(1000)})
    (root / "link").symlink_to(root / "folder" / "x")
    taken = fingerprint(sftp.url)
    assert isinstance(taken.content, files.Files)
    assert [(each.first, each.nbytes) for each in taken.content.ranges] == [
        ("folder/x", 1000),
        ("link", 1000),
    ]
    (root / "link").unlink()
    (root / "link").symlink_to(root / "folder")
    with pytest.raises(ConfigError, match=r"^data: '.*root/link' .*folder"):
        fingerprint(sftp.url)
    (root / "link").unlink()
    (root / "link").symlink_to(root / "gone")
    with pytest.raises(ConfigError, match=r"^data: '.*root/link' .*nothing"):
        fingerprint(sftp.url)


def test_a_pipe_on_a_server_is_refused(sftp: Backend, tmp_path: Path) -> None:
    write(sftp.url, {"folder/x": noise(1000)})
    os.mkfifo(tmp_path / "root" / "pipe")
    with pytest.raises(ConfigError, match=r"^data: '.*root/pipe' "):
        fingerprint(sftp.url)


def test_credentials_in_a_url_are_shown_nowhere(sftp: Backend, sftp_server: SftpServer) -> None:
    url = sftp.url.replace("sftp://", f"sftp://{sftp_server.user}:hunter2@")
    with pytest.raises(ConfigError) as caught:
        fingerprint(f"{url}/nowhere")
    assert f"'{sftp.url}/nowhere'" in str(caught.value)
    write(sftp.url, {"a": buffer(b"a")})
    assert "hunter2" not in repr(fingerprint(url))


def test_a_server_that_is_away_is_a_storage_error(sftp: Backend) -> None:
    write(sftp.url, {"a": buffer(b"a")})
    assert sftp.stop is not None and sftp.start is not None
    sftp.stop()
    try:
        with pytest.raises(StorageError) as caught:
            files.take([sftp.url], False, FakeClock())
        assert caught.value.url == sftp.url
    finally:
        sftp.start()


def test_memory_has_no_tags_and_is_sampled(memory: Backend) -> None:
    write(memory.url, {"x": buffer(b"1")})
    taken = files.take([memory.url], False, SYSTEM_CLOCK)
    assert (taken.tag, list(taken.samples)) == (None, ["x"])
    assert fsspec.filesystem("memory").exists(memory.url)
