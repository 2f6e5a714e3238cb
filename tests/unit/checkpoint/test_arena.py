"""Copies and comparisons of memory: every byte, and no other."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hvdrecover.checkpoint import arena

LARGE = (1 << 25) + 12_345


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("sizes", [[], [1], [LARGE], [LARGE, 1, 0, 77], [1, 0, LARGE], [LARGE // 3] * 4])
def test_all_spans_are_copied_on_however_many_threads(sizes: list[int]) -> None:
    sources = [noise(size, seed) for seed, size in enumerate(sizes)]
    targets = [np.zeros_like(source) for source in sources]
    pairs = zip(targets, sources, strict=True)
    arena.copy_spans([(target.ctypes.data, source.ctypes.data, source.nbytes) for target, source in pairs])
    assert all(map(np.array_equal, targets, sources))


def test_an_error_on_either_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(piece: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(arena, "_copy", fail)
    with pytest.raises(MemoryError):
        arena.copy_spans([(0, 0, LARGE)])


@pytest.mark.parametrize("nbytes", [1, 63, arena._PIECE + 1, LARGE])
def test_a_difference_is_found_wherever_it_is(nbytes: int) -> None:
    one, other = noise(nbytes + 2), noise(nbytes + 2)
    first, half = (one.ctypes.data + 1, other.ctypes.data + 1), nbytes // 2
    spans = [(*first, half), (first[0] + half, first[1] + half, nbytes - half)]
    for outside in (0, nbytes + 1):
        other[outside] ^= 1
    assert arena.spans_equal(spans)
    for place in {1, 1 + nbytes - half, nbytes} - {nbytes + 1}:
        other[place] ^= 1
        assert not arena.spans_equal(spans)
        other[place] ^= 1
    assert arena.spans_equal([])


def test_without_the_compiled_part_copies_are_made_all_the_same() -> None:
    script = """
import sys
sys.modules["hvdrecover.checkpoint._memcpy"] = None  # an ImportError
from hvdrecover.checkpoint import arena
import numpy as np
assert arena._copy is arena._memmove
source = np.arange(5_000_000)
target = np.zeros_like(source)
arena.copy_spans([(target.ctypes.data, source.ctypes.data, source.nbytes)])
assert (target == source).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_forked_child_has_zeros_and_keeps_its_own_memory_when_it_drops_an_arena() -> None:
    script = """
import mmap, os
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.arena import TensorSpec, plan
hidden, shown = (Arena(plan([TensorSpec("weight", "U8", (1 << 26,))])) for _ in range(2))
for each in (hidden, shown):
    each.bytes_of("weight")[:] = 7
shown.show_to_children()
if (child := os.fork()) == 0:
    assert (shown.bytes_of("weight")[-1], hidden.bytes_of("weight")[-1]) == (7, 0)
    own = mmap.mmap(-1, 1 << 26)
    own[:3] = b"abc"
    del hidden, shown, each
    os._exit(own[:3] != b"abc")
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
