"""The throughput of commits to other storages, beside what copies a file there otherwise, on one machine.

Each is a server of the storage tests (tests/contracts), started here; one that is not installed is left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest

from benchmarks.measure import GB, by_turns, stopwatch
from benchmarks.rows import Row
from benchmarks.states import Setting
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.storage import open_filesystem, open_storage
from tests.contracts.servers import BUCKET, HOST, STORES, SftpServer, moosefs
from tests.contracts.storages import sftp_options

_NBYTES = {"full": 64 << 20, "small": 12 << 20}
Peer = Callable[[Path], None]
Opened = tuple[str, str, Peer]  # the root's URL, the peer's name, and the peer


def measure(setting: Setting) -> list[Row]:
    """Throughput of one large file, until the store has it."""
    content = allocate(_NBYTES[setting.size])
    content[:] = np.random.default_rng().integers(0, 256, len(content), dtype=np.uint8)
    (source := setting.folder / "source").write_bytes(content)
    rows = []
    for name, opened in _stores(setting.folder):
        try:
            with opened as (url, peer, copy):
                rows.append(_row(setting, name, url, peer, copy, content, source))
        except pytest.skip.Exception as reason:
            print(f"{name}: {reason}")
    return rows


def _row(setting: Setting, name: str, url: str, peer: str, copy: Peer, content: Bytes, source: Path) -> Row:
    storage = open_storage(url)
    storage.publish("there", b"")  # a first connection, and the folder
    ours, theirs = by_turns(
        setting.rounds(3),
        [lambda: stopwatch(lambda: storage.write("file", content)), lambda: stopwatch(lambda: copy(source))],
    )
    size, unit = len(content) / GB * 1000, "MB/s"
    title = f"{size:.0f} MB"
    rates = [[size / seconds for seconds in values] for values in (ours, theirs)]
    return Row("stores", f"writing to {name}", title, unit, rates[0], peer, rates[1])


def _stores(folder: Path) -> Iterator[tuple[str, object]]:
    for name in STORES:
        yield name, _object_store(name, _made(folder / name))
    yield "sftp", _sftp(_made(folder / "sftp"))
    yield "moosefs", _moosefs(_made(folder / "moosefs"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _object_store(name: str, folder: Path) -> Iterator[Opened]:
    server = STORES[name](folder)
    try:
        server.start()
        fsspec.config.conf[server.protocol] = server.options
        url = f"{server.protocol}://{BUCKET}/root"
        client = fsspec.filesystem(server.protocol)
        yield (
            url,
            f"{type(client).__module__.split('.')[0]}'s put_file",
            lambda path: client.put_file(os.fspath(path), f"{BUCKET}/theirs"),
        )
    finally:
        server.stop()


@contextmanager
def _sftp(folder: Path) -> Iterator[Opened]:
    server = SftpServer(folder)
    server.start()
    try:
        fsspec.config.conf["sftp"] = sftp_options(server)
        url = f"sftp://{HOST}:{server.port}{folder}"
        client, _ = open_filesystem(url, "url")
        yield f"{url}/root", "paramiko's put", lambda path: client.ftp.put(str(path), f"{folder}/theirs")
    finally:
        server.stop()


@contextmanager
def _moosefs(folder: Path) -> Iterator[Opened]:
    with moosefs(folder) as (place, _):

        def copy(path: Path) -> None:
            with path.open("rb") as source, (place / "theirs").open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())

        yield f"file://{place}/root", "a copy + fsync", copy
