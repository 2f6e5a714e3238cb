"""Checkpoint roots in memory, that can be slow, fail, and are cut off from a process that was killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Bytes, digest
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.storage import ReadBytes, Temporary
from hvdrecover.errors import FencedError, StorageError
from tests.fakes.world import HANG_SECONDS, FakeWorld, current_world


@dataclass
class FakeRoot:
    """The contents of one checkpoint root."""

    files: dict[str, bytes] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)  # writes of data files wait for it
    at_the_gate: threading.Event = field(default_factory=threading.Event)  # set while a write waits
    failures: float = 0  # number of the next writes of data files that fail
    refusals: int = 0  # number of the next looks at the root that fail
    attempts: int = 0  # number of writes of data files so far
    published: list[CommitId] = field(default_factory=list)  # in the order of their manifests
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.gate.set()

    def commits(self) -> list[CommitId]:
        """The complete commits, oldest first."""
        folders = [path.split("/")[0] for path in self.files if path.endswith(f"/{FILE_NAME}")]
        return sorted(commit for folder in folders if (commit := CommitId.parse(folder)))

    def claims(self) -> list[str]:
        """The names of the claims."""
        return sorted(path for path in self.files if path.startswith("claims/"))


class FakeRoots:
    """All checkpoint roots, by URL; `open` stands for ``open_storage``."""

    def __init__(self) -> None:
        self.by_url: dict[str, FakeRoot] = {}

    def __getitem__(self, url: str) -> FakeRoot:
        return self.by_url.setdefault(url, FakeRoot())

    def open(self, url: str) -> FakeStorage:
        """One process's access to a root."""
        return FakeStorage(url, self[url], current_world())


class FakeStorage:
    """One process's access to a root. Once the process is killed, nothing that its threads do reaches it."""

    def __init__(self, url: str, root: FakeRoot, process: FakeWorld | None) -> None:
        self.url = url
        self._root = root
        self._process = process

    def names(self, folder: str = "") -> list[str]:
        if self._root.refusals:
            self._root.refusals -= 1
            raise StorageError(self.url, "there is no route to the host")
        prefix = f"{folder}/" if folder else ""
        with self._files() as files:
            below = [path.removeprefix(prefix) for path in files if path.startswith(prefix)]
        return sorted({path.split("/")[0] for path in below})

    def size(self, path: str) -> int | None:
        with self._files() as files:
            return len(files[path]) if path in files else None

    def read(self, path: str) -> bytes:
        with self._files() as files:
            return files[path]

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        data = self.read(path)[start : start + len(buffer)]
        memoryview(buffer)[: len(data)] = data
        return ReadBytes(len(data), digest(data))

    def write(self, path: str, buffer: Bytes) -> str:
        self._root.attempts += 1
        self._wait_at_the_gate()
        with self._files() as files:
            if self._root.failures:
                self._root.failures -= 1
                raise StorageError(self.url, "the disk is full")
            files[path] = buffer.tobytes()
        return digest(buffer)

    def publish(self, path: str, data: bytes) -> None:
        folder, _, name = path.rpartition("/")
        with self._files() as files:
            files[path] = data
            if name == FILE_NAME and (commit := CommitId.parse(folder)):
                self._root.published.append(commit)

    def create(self, path: str, data: bytes) -> bool:
        with self._files() as files:
            return files.setdefault(path, data) is data

    def remove(self, path: str) -> None:
        with self._files() as files:
            files.pop(path, None)

    def delete(self, folder: str) -> None:
        with self._files() as files:
            for path in [path for path in files if path.startswith(f"{folder}/")]:
                del files[path]

    def check(self) -> None:
        pass

    def temporaries(self) -> list[Temporary]:
        return []

    def tidy(self, stale: Callable[[str], bool]) -> None:
        pass

    def close(self) -> None:
        pass

    @contextmanager
    def _files(self) -> Iterator[dict[str, bytes]]:
        """The files of the root, for one thread at a time."""
        if self._process is not None and self._process.dead:
            if current_world() is self._process:
                self._process.check_alive()
            raise FencedError(self.url, "this process was killed")  # ends the threads that it has left
        with self._root.lock:
            yield self._root.files

    def _wait_at_the_gate(self) -> None:
        if not self._root.gate.is_set():
            self._root.at_the_gate.set()
            assert self._root.gate.wait(HANG_SECONDS), "the test never opened the gate"
            self._root.at_the_gate.clear()
