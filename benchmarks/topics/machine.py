"""The machine at its best: the limits of the other topics."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.measure import GB, Reserve, by_turns, stopwatch
from benchmarks.peers import Disk
from benchmarks.rows import Fact
from benchmarks.states import Setting, Training
from hvdrecover.checkpoint.arena import PAGE, Bytes, allocate, digest


def measure(setting: Setting) -> list[Fact]:
    """Memory, disk and processor, each alone."""
    training = Training(setting.shape, trained=True)
    nbytes = -(-training.nbytes // PAGE) * PAGE
    buffer = allocate(nbytes)
    tensors = [tensor for tensor in training.tensors().values() if tensor.ndim]
    copies = [torch.empty_like(tensor).zero_() for tensor in tensors]
    disk = Disk(setting.folder, buffer.data)
    buffer[:] = 1
    reserve = Reserve(nbytes)
    takes = [
        lambda: stopwatch(lambda: torch._foreach_copy_(copies, tensors)),
        disk.write,
        disk.read,
        lambda: stopwatch(lambda: digest(buffer)),
        lambda: _first_touch(reserve, nbytes, allocate),
        lambda: _first_touch(reserve, nbytes, _small_pages),
    ]
    copy, write, read, hashing, huge, small = (
        nbytes / GB / statistics.median(seconds) for seconds in by_turns(setting.rounds(5), takes)
    )
    return [
        Fact("cores, all used by torch", str(torch.get_num_threads())),
        Fact("torch", str(torch.__version__)),
        Fact("copy of all tensors", f"{copy:.0f} GB/s"),
        Fact("raw O_DIRECT write, read", f"{write:.1f} GB/s, {read:.1f} GB/s"),
        Fact("xxh3-128 on one core", f"{hashing:.0f} GB/s"),
        Fact("first touch of new memory", f"{1 / huge:.2f} s/GB in huge pages, {1 / small:.2f} s/GB without"),
    ]


def _first_touch(reserve: Reserve, nbytes: int, make: Callable[[int], Bytes]) -> float:
    memory = make(nbytes)
    with reserve.freed():
        return stopwatch(lambda: memory[::PAGE].fill(1))


def _small_pages(nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
