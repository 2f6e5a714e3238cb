"""A process that writes durable commits and is killed, and what must hold for its root after any crash."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Arena, TensorSpec, plan
from hvdrecover.checkpoint.manifest import FILE_NAME, Snapshot
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.store import BackgroundWriter, Store, load_newest
from hvdrecover.machine import SYSTEM_CLOCK, Clock
from tests.unit.checkpoint.roots import Recorder, assert_is

KEEP = 2
_PERIOD = 65_521  # bytes after which a commit's content repeats: a prime, so that no piece equals another
TIMEOUT = 60.0  # seconds; a child that says nothing for so long hangs

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])

Message = tuple[str, Any]


def make_commit(commit: CommitId, nbytes: int = 4096) -> Snapshot:
    """A commit whose bytes tell which commit it is of; made much faster than it is written."""
    arenas = {}
    for name, count in (("model", nbytes), ("optimizer", nbytes // 2 + 13)):
        arena = Arena(plan([TensorSpec("weight", "U8", (count,))]))
        stream = np.random.default_rng([commit.generation, commit.commit, len(name)])
        arena.bytes_of("weight")[:] = np.resize(
            np.frombuffer(stream.bytes(min(count, _PERIOD)), np.uint8), count
        )
        arenas[name] = arena
    state = {"attributes": {"nbytes": nbytes, "commit": commit.commit}, "samplers": {}}
    return Snapshot(commit, arenas, state, world_size=2, versions={"torch": "2.13.0"})


class Reports:
    """Events that go to the parent at once; a child that is killed afterwards has been heard all the same."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def emit(self, kind: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        self._send((kind, {**facts, "message": message}))


def open_store(root: Path, events: Any, clock: Clock = SYSTEM_CLOCK, keep: int = KEEP) -> Store:
    """The root as a new job sees it."""
    job = uuid.uuid4().hex
    return Store(LocalStorage(root), keep=keep, job=job, host="host", events=events, clock=clock)


def write_commits(root: Path, nbytes: int, send: Callable[[Message], None], count: int) -> None:
    """Start as a job does, and write ``count`` commits after the one that is found."""
    store = open_store(root, Reports(send))
    generation = store.claim_next()
    send(("claimed", generation))
    found = load_newest(store)
    first = 1 if found is None else found.id.commit + 1
    writer = BackgroundWriter(store, rank=0)
    for commit in range(first, first + count):
        writer.submit(make_commit(CommitId(generation, commit), nbytes))
        writer.wait()
    assert writer.wait_for_cleanup(TIMEOUT)


def _run(work: Callable[..., None], arguments: tuple[Any, ...], channel: Connection) -> None:
    logging.getLogger("hvdrecover").setLevel(logging.CRITICAL)
    try:
        work(*arguments, channel.send)
    except BaseException:
        channel.send(("raised", traceback.format_exc()))
        raise


class Child:
    """A process that does ``work(*arguments, send)``; ``send(message)`` adds to what is `heard` here."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._ear, mouth = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(work, arguments, mouth))
        self._process.start()
        mouth.close()
        self.heard: list[Message] = []

    def told(self, kind: str) -> list[Any]:
        """The facts of the messages of one kind, in the order they were told."""
        return [facts for found, facts in self.heard if found == kind]

    def acknowledged(self) -> list[CommitId]:
        """The commits that the child has been told are durable."""
        return [CommitId(facts["generation"], facts["commit"]) for facts in self.told("durable")]

    def join(self) -> int:
        """Wait until it has gone; its exit code, negative for a signal."""
        with contextlib.suppress(EOFError):
            while wait([self._ear], TIMEOUT):
                self.heard.append(self._ear.recv())
        self._process.join(TIMEOUT)
        code = self._process.exitcode
        assert code is not None, f"the child hangs; it said {self.heard}"
        self._process.close()
        self._ear.close()
        assert not self.told("raised"), self.told("raised")[0]
        assert code in (0, -signal.SIGKILL), f"the child ended with {code}; it said {self.heard}"
        return code


def check_opens(root: Path, acknowledged: CommitId | None) -> CommitId | None:
    """The root opens, and the newest acknowledged commit or a later complete one is there bit for bit."""
    events = Recorder()
    found = load_newest(open_store(root, events))
    if acknowledged is not None:
        assert found is not None, f"{acknowledged} was acknowledged, and nothing is there"
        assert found.id >= acknowledged, f"{acknowledged} was acknowledged, and {found.id} is the newest"
    if found is not None:
        assert_is(found, make_commit(found.id, found.state["attributes"]["nbytes"]))
    for skipped in events.of("skipped"):
        # A crash leaves commits that were never completed, and no broken ones.
        assert "never completed" in skipped["reason"], skipped
    return None if found is None else found.id


def check_start(root: Path, acknowledged: CommitId | None) -> None:
    """A later start continues, and collects what was left behind; only the newest commits are then there."""
    newest = check_opens(root, acknowledged)
    store = open_store(root, Recorder())
    claimed = [int(claim.stem.removeprefix("g")) for claim in root.glob("claims/g*.json")]
    generation = store.claim_next()
    assert generation > max(claimed, default=0)
    first = 0 if newest is None else newest.commit
    written = [CommitId(generation, first + 1), CommitId(generation, first + 2)]
    for commit in written:
        store.write(make_commit(commit), rank=0)
        for folder in _commit_folders(root):
            assert (folder / FILE_NAME).is_file(), f"{folder.name} was left behind half-written"
    assert len(written) == KEEP
    assert [folder.name for folder in _commit_folders(root)] == [commit.name for commit in written]
    for path in root.rglob("*"):
        assert not path.name.startswith("."), f"{path} was left behind"
    assert check_opens(root, written[-1]) == written[-1]


def _commit_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if CommitId.parse(path.name))
