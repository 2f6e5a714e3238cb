"""The peers that hvdrecover is measured against, each used as well as it can be."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.measure import Reserve, Take, by_turns, stopwatch, sync_all
from benchmarks.states import Training

_PIECE = 1 << 24  # bytes


def torch_save(training: Training, path: Path) -> None:
    """``torch.save``, durable on return."""
    torch.save(training.tree(), path)
    sync_all(path)


def safetensors_save(training: Training, path: Path) -> None:
    """safetensors' own ``save_file``, durable on return."""
    safetensors.torch.save_file(training.tensors(), path)
    sync_all(path)


def dcp_save(training: Training, path: Path) -> None:
    """Torch's distributed checkpoint, for one process; durable on return."""
    dcp.save(training.tree(), checkpoint_id=path, no_dist=True)  # fsyncs its files
    sync_all(path)


def until_durable(
    save: Callable[[Training, Path], None], training: Training, path: Path, reserve: Reserve
) -> Take:
    """Return how long a peer takes to make a changed state durable, in seconds."""

    def take() -> float:
        training.step()
        with reserve.freed():
            seconds = stopwatch(lambda: save(training, path))
        remove(path)
        return seconds

    return take


class AsyncSave:
    """Return how long torch's ``async_save`` holds the training loop up, in each of its configurations.

    Pinned memory and asynchronous staging need CUDA, and are tried for a state that is on a device.
    """

    def __init__(self, training: Training, folder: Path, reserve: Reserve) -> None:
        self._training = training
        self._folder = folder
        self._reserve = reserve
        self._stagers = {
            "a new stager each time": None,
            "a stager that is kept": DefaultStager(StagingOptions(False, False, False, False)),
            "a stager that is kept, shared memory": DefaultStager(StagingOptions(False, True, False, False)),
        }
        if training.device.type == "cuda":
            pinned = StagingOptions(True, False, False, True)
            self._stagers["a stager that is kept, pinned memory"] = DefaultStager(pinned)

    def best(self) -> tuple[str, Take]:
        """The configuration that is fastest here."""
        takes = {name: functools.partial(self._take, stager) for name, stager in self._stagers.items()}
        trials = by_turns(2, list(takes.values()))
        _, name = min(zip(map(min, trials), takes, strict=True))
        return name, takes[name]

    def close(self) -> None:
        """Give up what the stagers hold."""
        for stager in self._stagers.values():
            if stager is not None:
                stager.close()

    def _take(self, stager: DefaultStager | None) -> float:
        self._training.step()
        self._training.wait()
        path = self._folder / "dcp"
        running: list[Future[object]] = []

        def save() -> None:
            tree = self._training.tree()
            future = dcp.async_save(tree, checkpoint_id=path, no_dist=True, async_stager=stager)
            running.append(future)  # type: ignore[arg-type]
            self._training.wait()

        with self._reserve.freed():
            seconds = stopwatch(save)
            running[0].result()
        remove(path)
        return seconds


class Disk:
    """The disk itself: one thread, 16 MB pieces past the page cache, a new file, fsync.

    Args:
        folder: on the disk.
        buffer: what to write; page-aligned, its length a multiple of the page size.
    """

    def __init__(self, folder: Path, buffer: memoryview) -> None:
        self._path = folder / "raw"
        self._buffer = buffer

    def write(self) -> float:
        """Seconds to write the buffer."""
        seconds = stopwatch(self._write)
        self._path.unlink()
        return seconds

    def read(self) -> float:
        """Seconds to read the buffer back from a file that was written before."""
        self._write()
        seconds = stopwatch(self._read)
        self._path.unlink()
        return seconds

    def _write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
        try:
            for start in range(0, len(self._buffer), _PIECE):
                os.write(descriptor, self._buffer[start : start + _PIECE])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            for start in range(0, len(self._buffer), _PIECE):
                os.readv(descriptor, [self._buffer[start : start + _PIECE]])
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
