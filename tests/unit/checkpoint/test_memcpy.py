"""Copies and comparisons of memory: every byte, and no other."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.checkpoint import memcpy
from hvdrecover.checkpoint._memcpy import copy as native

GUARD = 64  # bytes on each side that must not be touched
LARGE = (1 << 25) + 12_345
WAYS = [native, memcpy._memmove]


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def pack(*spans: memcpy.Span) -> bytes:
    return np.array(spans, dtype=np.uint64).tobytes()


@pytest.mark.parametrize("way", WAYS)
@given(nbytes=st.integers(0, 700), target_at=st.integers(0, 70), source_at=st.integers(0, 70))
def test_exactly_the_bytes_of_a_span_are_copied(way, nbytes: int, target_at: int, source_at: int) -> None:
    source = noise(source_at + nbytes + GUARD)
    target = noise(GUARD + target_at + nbytes + GUARD, seed=1)
    expected = target.copy()
    start = GUARD + target_at
    expected[start : start + nbytes] = source[source_at : source_at + nbytes]
    way(pack((target.ctypes.data + start, source.ctypes.data + source_at, nbytes)))
    assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize("sizes", [[], [1], [LARGE], [LARGE, 1, 0, 77], [1, 0, LARGE], [LARGE // 3] * 4])
def test_all_spans_are_copied_on_however_many_threads(sizes: list[int]) -> None:
    sources = [noise(size, seed) for seed, size in enumerate(sizes)]
    targets = [np.zeros_like(source) for source in sources]
    pairs = zip(targets, sources, strict=True)
    memcpy.copy([(target.ctypes.data, source.ctypes.data, source.nbytes) for target, source in pairs])
    assert all(map(np.array_equal, targets, sources))


@given(st.lists(st.integers(0, 3 * memcpy._PIECE), max_size=6))
def test_pieces_are_the_same_bytes_in_order_and_all_but_the_last_of_one_size(sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes]).tolist()
    spans = [(start, 10**9 + start, size) for start, size in zip(starts, sizes, strict=False)]
    packed = [np.frombuffer(piece, dtype=np.uint64).reshape(-1, 3) for piece in memcpy.pieces(spans)]
    at = 0
    for target, source, size in (span for piece in packed for span in piece.tolist()):
        assert (target, source) == (at, 10**9 + at)
        assert size > 0
        at += size
    assert at == starts[-1]
    totals = [int(piece[:, 2].sum()) for piece in packed]
    assert set(totals[:-1]) <= {memcpy._PIECE}
    assert all(total <= memcpy._PIECE for total in totals)


def test_an_error_on_either_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(piece: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(memcpy, "_copy", fail)
    with pytest.raises(MemoryError):
        memcpy.copy([(0, 0, LARGE)])


@pytest.mark.parametrize("nbytes", [1, 63, memcpy._PIECE + 1, LARGE])
def test_a_difference_is_found_wherever_it_is(nbytes: int) -> None:
    one, other = noise(nbytes + 2), noise(nbytes + 2)
    first, half = (one.ctypes.data + 1, other.ctypes.data + 1), nbytes // 2
    spans = [(*first, half), (first[0] + half, first[1] + half, nbytes - half)]
    for outside in (0, nbytes + 1):
        other[outside] ^= 1
    assert memcpy.equal(spans)
    for place in {1, 1 + nbytes - half, nbytes} - {nbytes + 1}:
        other[place] ^= 1
        assert not memcpy.equal(spans)
        other[place] ^= 1
    assert memcpy.equal([])


@pytest.mark.parametrize("spans", [b"x", b"x" * 25])
def test_what_is_no_list_of_spans_is_refused(spans: bytes) -> None:
    with pytest.raises(ValueError, match="spans"):
        native(spans)


def test_without_the_compiled_part_copies_are_made_all_the_same() -> None:
    script = """
import sys
sys.modules["hvdrecover.checkpoint._memcpy"] = None  # an ImportError
from hvdrecover.checkpoint import memcpy
import numpy as np
assert memcpy._copy is memcpy._memmove
source = np.arange(5_000_000)
target = np.zeros_like(source)
memcpy.copy([(target.ctypes.data, source.ctypes.data, source.nbytes)])
assert (target == source).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_here_the_compiled_part_is_in_use() -> None:
    assert memcpy._copy is native
