"""The checks of storage: the checkpoint root, and the near tier of each host.

`root` and `near` run on the host that would use the storage; the ``check_`` functions judge their answers.
A trial writes only to a folder that jobs ignore, and removes it. Commits and claims are only read.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover import config
from hvdrecover.checkpoint import inspection, near_root
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.near_root import Room
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.store import check_is_ours
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.doctor.findings import Finding, failure, host_failure, ok, skipped, warning
from hvdrecover.errors import LaunchError, StorageError, UnknownCommitError

ROOT, WRITING, CLAIMS = "checkpoint root", "root: writing", "root: claims"
SHARED, SPACE, CLEANING, NEAR = "root: shared", "root: space", "root: cleaning", "near tier"
NBYTES = 1 << 25  # size of the file that a trial writes and reads
_WRITERS = 4  # writers that create one file at the same time
COMMITS = Keep().last + 1  # commits at a root by default, and one that is being written


class Trial:
    """A checkpoint root that is tried out; with the folder of an earlier trial, to close that."""

    def __init__(self, url: str, folder: str = "") -> None:
        self._storage = open_storage(url)
        self.url = self._storage.url
        self.folder = folder or f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
        self.path = f"{self.folder}/written"
        check_is_ours(self._storage)

    def look(self) -> dict[str, Any]:
        """Return the contents of the root; ``docs/doctor.md`` describes the keys."""
        try:
            entries = inspection.entries(self._storage)
        except UnknownCommitError:  # the root does not exist yet
            entries = []
        usable = next((entry for entry in entries if entry.is_whole), None)
        newest = usable and {"commit": usable.commit, "time": usable.time, "bytes": usable.bytes}
        root = Path(self.url.removeprefix("file://"))
        local = [root, *root.parents] if self.url.startswith("file://") else []
        existing = next((folder for folder in local if folder.exists()), None)
        return {
            "url": self.url,
            "folder": self.folder,
            "path": self.path,
            "commits": Counter(entry.state for entry in entries),
            "broken": sum(not entry.is_whole and entry.state != "incomplete" for entry in entries),
            "newest": newest,
            "claim": Claims(self._storage, job="", host="", clock=SYSTEM_CLOCK).newest(),
            "free": shutil.disk_usage(existing).free if existing is not None else None,
            "made": [str(folder) for folder in local if not folder.exists()],
        }

    def write(self, nbytes: int = NBYTES) -> dict[str, Any]:
        """Write a file and read it; returns ``bytes``, the times, and whether the content is the ``same``."""
        buffer = allocate(nbytes)
        buffer[:] = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)  # cannot be compressed
        began = time.perf_counter()
        self._storage.write(self.path, buffer)
        written = time.perf_counter()
        back: Bytes = allocate(nbytes)
        read = self._storage.read_into(self.path, back)
        return {
            "bytes": nbytes,
            "write_seconds": written - began,
            "read_seconds": time.perf_counter() - written,
            "same": read.size == nbytes and bool(np.array_equal(back, buffer)),
        }

    def create(self) -> dict[str, Any]:
        """Let several writers create one file at the same time, and one more writer afterwards."""
        created, texts = f"{self.folder}/created", [f"writer {number}".encode() for number in range(_WRITERS)]
        with ThreadPoolExecutor(_WRITERS) as pool:
            won = list(pool.map(lambda text: self._storage.create(created, text), texts))
        late = self._storage.create(created, b"late")
        winners = [text for text, mine in zip(texts, won, strict=True) if mine]
        kept = not late and self._storage.read(created) in winners
        return {"writers": _WRITERS, "winners": sum(won), "kept": kept}

    def close(self, made: Sequence[str] = ()) -> None:
        """Remove everything that the trial created; ``made`` are folders that did not exist before it."""
        self._storage.delete(self.folder)
        for folder in made:
            with contextlib.suppress(OSError):  # a job has started to use it
                Path(folder).rmdir()


def root(url: str) -> dict[str, Any]:
    """Return the contents of a root, and what came of a trial; its file is left for other hosts to see."""
    trial = Trial(url)
    found = trial.look()
    try:
        return {**found, **trial.write(), **trial.create(), "refused": ""}
    except StorageError as error:
        return {**found, "refused": str(error)}


def check_root(found: Mapping[str, Any], now: float) -> Finding:
    """The root should hold usable commits, or none."""
    url, newest = found["url"], found["newest"]
    listed = ", ".join(f"{count} {state}" for state, count in found["commits"].items())
    if not listed:
        claimed = f", and generation {found['claim']} has claimed it" if found["claim"] else ""
        return ok(ROOT, f"{url}: no commits yet{claimed}")
    if newest is None:
        remedy = f"Look at it with `hvdrecover verify {url}`; repair it, or name another root."
        return failure(ROOT, f"{url}: no commit is usable: {listed}", remedy)
    minutes = max(0.0, now - newest["time"]) / 60
    what = f"{url}: {listed}; a job resumes from {newest['commit']}, which is {minutes:.0f} min old"
    if found["broken"]:
        return warning(ROOT, what, f"Look at it with `hvdrecover ls {url}`. Jobs skip broken commits.")
    return ok(ROOT, what)


def check_writing(found: Mapping[str, Any], host: str) -> Iterator[Finding]:
    """The root must return the bytes that were written, and let only one writer create a file."""
    if found["refused"]:
        remedy = "Check the root, the permissions and the storage."
        yield host_failure(WRITING, LaunchError(host, found["refused"]), remedy)
        return
    if not found["same"]:
        remedy = "Do not keep commits there. Look for a fault of the disk, the server or the network."
        yield failure(WRITING, f"{host} reads other bytes than it wrote", remedy)
    else:
        write, read = (found["bytes"] / found[f"{name}_seconds"] / 1e6 for name in ("write", "read"))
        speeds = f"write {write:.0f} MB/s, read {read:.0f} MB/s"
        yield ok(WRITING, f"{host} wrote {found['bytes'] / 1e6:.0f} MB and read the same bytes: {speeds}")
    what = f"of {found['writers']} writers that created one file, {found['winners']} succeeded"
    if found["winners"] == 1 and found["kept"]:
        yield ok(CLAIMS, what)
    else:  # two jobs could write to the root at the same time
        what += "" if found["kept"] else "; a later writer replaced the file"
        yield failure(CLAIMS, what, "Use a storage with conditional writes: S3, Azure, GCS, SFTP, POSIX.")


def check_shared(seen: Mapping[str, bool | LaunchError], writer: str) -> Finding:
    """All hosts should see the file that the writer wrote, since rank 0 may move to any host."""
    if not seen:
        return skipped(SHARED, "no other host answers")
    if broken := [str(error) for error in seen.values() if isinstance(error, LaunchError)]:
        remedy = "Give these hosts the same access to the root: packages, credentials, mounts."
        return failure(SHARED, f"not all hosts can open the root: {'; '.join(broken)}", remedy)
    if blind := [host for host, sees in seen.items() if not sees]:
        what = f"{', '.join(blind)} cannot see the file that {writer} wrote"
        remedy = "Use a folder that all hosts share, or an object store. Rank 0 may move to any host."
        return warning(SHARED, what, remedy)
    return ok(SHARED, f"{', '.join(seen)} can see the file that {writer} wrote")


def check_space(free: int | None, state: int | None) -> Finding:
    """The root needs space for the commits that it keeps."""
    if free is None:
        return skipped(SPACE, "this storage does not report free space")
    fits = f"enough for a state of {near_root.size(free / COMMITS)}"
    what = f"{near_root.size(free)} free, {fits}: by default, a root has up to {COMMITS} commits"
    remedy = "Free space, keep fewer commits (Checkpoint(keep=...)), or name a larger root."
    if state is not None and free < state:
        return failure(SPACE, what, remedy)
    if state is not None and free < COMMITS * state:
        return warning(SPACE, what, remedy)
    return ok(SPACE, what)


def near(checkpoint: str | None) -> dict[str, Any] | None:
    """Return the near roots of this host, and the space for another one; None if the near tier is off."""
    setting = config.read().near
    if setting == "off":
        return None
    own = None if checkpoint is None else near_root.folder(setting, near_root.named(checkpoint))
    roots, top = near_root.roots(setting), near_root.base(setting)
    return {
        "folder": str(top),
        "room": asdict(near_root.look(next(each for each in top.parents if each.is_dir()))),
        "held": sum(each.nbytes for each in roots if each.path == own and not each.in_use),
        "roots": len(roots),
        "in_use": sum(each.in_use for each in roots),
        "bytes": sum(each.nbytes for each in roots),
    }


def check_near(found: Mapping[str, Mapping[str, Any] | None], state: int | None) -> Finding:
    """All hosts should have space for a near root."""
    on = {host: each for host, each in found.items() if each is not None}
    if not on:
        return skipped(NEAR, "HVDRECOVER_NEAR is off")
    lines, refusals = [], []
    for host, each in on.items():
        free, held = Room(**each["room"]), each["held"]
        line = f"{host} has space for a state of {near_root.size(near_root.largest(free, held))}"
        if each["roots"]:
            in_use = f"{near_root.size(each['bytes'])}, {each['in_use']} in use"
            line += f" beside {each['roots']} near roots ({in_use})"
        lines.append(line)
        if state is not None and (refusal := near_root.refusal(free, state, held)):
            refusals.append(f"{host}: {refusal}, so the near tier would be off")
    if not refusals:
        return ok(NEAR, "; ".join(lines))
    folders = ", ".join(sorted({str(Path(each["folder"]).parent) for each in on.values()}))
    remedy = (
        f"Make {folders} larger (in a container: --shm-size), delete near roots of ended jobs with "
        "`hvdrecover prune --near`, or set HVDRECOVER_NEAR to a folder on a local disk."
    )
    return warning(NEAR, "; ".join([*refusals, *lines]), remedy)
