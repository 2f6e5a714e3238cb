import faulthandler
import os
import re
import resource
import signal
from pathlib import Path

import numpy as np

from hvdrecover.checkpoint.arena import Arena, allocate
from hvdrecover.checkpoint.layout import TensorSpec, plan

SIZE = 1 << 23  # bytes


def in_child(work):
    """Run a function in a forked child; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mapping(array):
    """Return what the kernel says of the mapping in which an array lies, in kB and flags."""
    address, found = array.ctypes.data, {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.split()
    return found


def test_a_forked_child_has_no_part_of_it():
    memory = allocate(SIZE)
    ordinary = np.ones(SIZE, dtype=np.uint8)
    assert in_child(lambda: int(ordinary[-1])) == 1
    assert in_child(lambda: int(memory[0])) == -signal.SIGSEGV
    assert in_child(lambda: int(memory[-1])) == -signal.SIGSEGV


def test_memory_is_offered_back_to_the_system():
    arena = Arena(plan([TensorSpec("w", "U8", (1 << 28,))]))
    arena.bytes_of("w")[:] = 1
    arena.offer_back()
    # A few dozen pages of any size may still be on a core's own list, and are not counted yet.
    assert int(mapping(arena.buffer)["LazyFree"][0]) >= 1 << 17
    arena.take_back()
    arena.bytes_of("w")[:] = 2
    assert int(mapping(arena.buffer)["LazyFree"][0]) == 0
