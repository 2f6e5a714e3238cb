"""The needs of the storage contract, for each kind of storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.checkpoint.storage.remote import RemoteStorage
from tests.contracts.servers import BUCKET, HOST, ObjectStore, S3Server, SftpServer

SECRET = "it-is-s3cret/"


@dataclass
class Backend:
    """One kind of storage, ready for use."""

    url: str  # an empty checkpoint root, which is not there yet
    large: int  # bytes of a file that storages of `open_in_pieces` transfer in at least three pieces
    piece: int | None = None  # bytes of those pieces; None for those that the storage has anyway
    folders: bool = True  # whether folders are real, so that nothing can lie below a file
    environment: dict[str, str] = field(default_factory=dict)  # needed by other processes to open the root
    stop: Callable[[], None] | None = None  # takes the server away; None if there is none
    start: Callable[[], None] | None = None  # brings it back, with all it had
    others: tuple[str, ...] = ()  # the same root's URLs by other mounts, as other hosts have it

    @property
    def urls(self) -> tuple[str, ...]:
        """The root by each mount."""
        return (self.url, *self.others)

    def open(self) -> Storage:
        return open_storage(self.url)

    def open_in_pieces(self) -> Storage:
        storage = self.open()
        if isinstance(storage, RemoteStorage) and self.piece is not None:
            storage.piece = self.piece
        return storage


def buffer(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)


def noise(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def every_call(storage: Storage) -> dict[str, Callable[[], object]]:
    return {
        "names": lambda: storage.names(),
        "size": lambda: storage.size("f"),
        "read": lambda: storage.read("f"),
        "read_into": lambda: storage.read_into("f", np.zeros(7, dtype=np.uint8)),
        "write": lambda: storage.write("g", buffer(b"1")),
        "publish": lambda: storage.publish("g", b"1"),
        "create": lambda: storage.create("g", b"1"),
        "remove": lambda: storage.remove("f"),
        "delete": lambda: storage.delete("a"),
    }


def kill_when_it_says(word: str, script: str, backend: Backend) -> None:
    """Run a script with a backend's root as its argument, and kill it as soon as it has printed a word."""
    writer = subprocess.Popen(
        [sys.executable, "-c", script, backend.url],
        env={**os.environ, **backend.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout and writer.stdout.readline() == f"{word}\n"
    writer.kill()
    writer.communicate()


def local(folder: Path, *elsewhere: Path) -> Backend:
    """A folder; ``elsewhere`` it is seen by other mounts."""
    others = tuple(f"file://{other}/root" for other in elsewhere)
    return Backend(f"file://{folder}/root", (1 << 25) + 5, others=others)


def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Backend:
    options = s3_options(server.port)
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    bucket = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    server.reset()
    return Backend(
        f"s3://{bucket}/runs/one",
        12 << 20,
        5 << 20,
        folders=False,
        environment={"FSSPEC_S3": json.dumps(options)},
        stop=server.stop,
        start=server.start,
    )


def object_store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setitem(fsspec.config.conf, server.protocol, server.options)
    return Backend(
        f"{server.protocol}://{BUCKET}/{uuid.uuid4().hex}/root",
        12 << 20,
        5 << 20 if server.protocol == "s3" else 1 << 20,
        folders=False,
        environment=server.variables(),
        stop=server.stop,
        start=server.start,
    )


def s3_options(port: int, **config: Any) -> dict[str, Any]:
    """Return what a user would put into fsspec's configuration, but less patient."""
    return {
        "key": "user",
        "secret": SECRET,
        "endpoint_url": f"http://{HOST}:{port}",
        "config_kwargs": {"retries": {"total_max_attempts": 1}, **config},
    }


def sftp(server: SftpServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    options = sftp_options(server)
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)
    return Backend(
        f"sftp://{HOST}:{server.port}{folder}/root",
        (3 << 20) + 5,
        1 << 20,
        environment={"FSSPEC_SFTP": json.dumps(options)},
        stop=server.stop,
        start=server.start,
    )


def sftp_options(server: SftpServer) -> dict[str, Any]:
    """Return what a user would put into fsspec's configuration; nothing of the user's own is looked at."""
    known = server.folder / "known_hosts"
    known.write_text(server.known_hosts())
    return {
        "known_hosts": str(known),
        "username": server.user,
        "key_filename": str(server.key),
        "look_for_keys": False,
        "allow_agent": False,
    }
