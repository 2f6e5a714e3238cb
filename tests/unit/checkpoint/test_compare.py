"""The differences between two commits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import compare, decoding
from hvdrecover.checkpoint.layout import TensorSpec, plan
from hvdrecover.checkpoint.snapshot import Snapshot
from tests.unit.checkpoint.roots import content, make_store

CODES = {
    np.dtype(name): code
    for code, name in {"BOOL": "?", "U8": "u1", "I8": "i1", "I64": "i8", "U64": "u8"}.items()
} | {np.dtype(name): code for code, name in {"F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8"}.items()}
A, B = CommitId(1, 1), CommitId(1, 2)


def measured(a, b, code=None):
    """Return how the tensor ``a`` becomes ``b``."""
    a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
    spec = TensorSpec("t", code or CODES[a.dtype], a.shape)
    return compare.measure("t", spec, a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


def test_the_relative_change_is_the_largest_change_over_the_largest_value():
    change = measured(np.array([1.0, -4.0, 2.0]), np.array([1.5, -4.0, 0.0]))
    assert (change.changed, change.largest, change.scale, change.relative) == (2, 2.0, 4.0, 0.5)


def test_a_change_from_zeros_is_infinite():
    assert measured(np.zeros(2), np.array([0.0, 1e-30])).relative == math.inf


@pytest.mark.parametrize(
    ("a", "b"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (math.inf, 1.0)]
)
def test_what_is_not_finite_is_counted_and_left_out_of_the_change(a, b):
    change = measured(np.array([2.0, a]), np.array([3.0, b]))
    assert (change.changed, change.non_finite, change.largest, change.scale) == (2, 1, 1.0, 2.0)


def test_integers_are_compared_exactly():
    change = measured(np.array([2**63 - 1, -(2**63)]), np.array([2**63 - 2, 2**63 - 1]))
    assert (change.changed, change.largest, change.scale) == (2, 2**64 - 1, 2**63)
    change = measured(np.array([2**64 - 1], "u8"), np.array([2**64 - 2], "u8"))
    assert (change.largest, change.scale) == (1, 2**64 - 1)
    assert measured(np.array([200], "u1"), np.array([100], "u1")).largest == 100
    assert measured(np.array([-128], "i1"), np.array([127], "i1")).largest == 255


def test_booleans_and_complex_numbers():
    assert measured(np.array([True, False]), np.array([False, False])).relative == 1.0
    assert measured(np.array([3 + 4j], "c8"), np.array([0], "c8")).relative == 1.0


def test_half_precision_does_not_overflow():
    assert measured(np.array([-60000], "f2"), np.array([60000], "f2")).largest == 120000


@pytest.mark.parametrize("code", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_types_that_numpy_lacks_are_compared_by_value(code):
    items = {"BF16": "u2"}.get(code, "u1")
    one, two = {"BF16": (0x3F80, 0x4000), "F8_E4M3": (0x38, 0x40), "F8_E5M2": (0x3C, 0x40)}[code]
    a, b = np.array([one, two], items), np.array([two, two], items)
    change = measured(a, b, code)
    assert (change.changed, change.largest, change.scale) == (1, 1.0, 2.0)


def test_the_extremes_of_the_small_types():
    every = np.arange(256, dtype=np.uint8)
    e4m3, e5m2 = decoding.decode(every, "F8_E4M3"), decoding.decode(every, "F8_E5M2")
    assert np.nanmax(e4m3) == 448
    assert np.isnan(e4m3).sum() == 2
    assert (e4m3[1], e4m3[0x81], e4m3[8]) == (2**-9, -(2**-9), 2**-6)
    assert np.isfinite(e5m2).sum() == 256 - 8
    assert (e5m2[0x7B], e5m2[0x7C], e5m2[0xFC], e5m2[1]) == (57344, math.inf, -math.inf, 2**-16)


def test_a_tensor_of_many_chunks_is_compared_whole(monkeypatch):
    monkeypatch.setattr(compare, "CHUNK", 7)
    a = np.linspace(-1, 1, 100)
    b = a.copy()
    b[[3, 50, 99]] += [0.5, 0.25, 0.125]
    b[20] = math.nan
    change = measured(a, b)
    assert (change.changed, change.non_finite, change.largest, change.scale) == (4, 1, 0.5, 1.0)


# -- commits -------------------------------------------------------------------------------------------


def snapshot(commit, tensors, **objects):
    arenas = {}
    for attribute, arrays in tensors.items():
        arenas[attribute] = Arena(
            plan([TensorSpec(name, CODES[array.dtype], array.shape) for name, array in arrays.items()])
        )
        for name, array in arrays.items():
            arenas[attribute].bytes_of(name)[:] = array.reshape(-1).view(np.uint8)
    state = {"attributes": objects, "samplers": {"sampler": {"epoch": commit.commit}}, "random": {"seed": 5}}
    return Snapshot(commit, arenas, state, 2, {"torch": "2.13.0"})


@pytest.fixture
def storage(root):
    store = make_store(root)
    store.claim_next()
    one = np.ones(4, "f4")
    store.write(
        snapshot(
            A,
            {
                "model": {"same": one, "moved": one, "leapt": one, "gone": one, "wide": one},
                "extra": {"x": one},
            },
            epoch=1,
            config={"rate": 0.1, "name": "a"},
        ),
        rank=0,
    )
    half = one.copy()
    half[2] = np.nan
    store.write(
        snapshot(
            B,
            {"model": {"same": one, "moved": one + 8, "leapt": half, "new": one, "wide": one.astype("f8")}},
            epoch=2,
            config={"rate": 0.2, "name": "a", "more": None},
        ),
        rank=0,
    )
    return root


def test_the_difference_of_two_commits(storage):
    before, told = content(storage), []
    found = compare.compare(storage, A, B, told.append)
    assert {name: str(spec) for name, spec in found.added.items()} == {"model.new": "F32[4]"}
    assert list(found.removed) == ["extra.x", "model.gone"]
    assert {name: (str(a), str(b)) for name, (a, b) in found.reshaped.items()} == {
        "model.wide": ("F32[4]", "F64[4]")
    }
    assert [(change.tensor, change.relative, change.non_finite) for change in found.changes] == [
        ("model.leapt", 0.0, 1),
        ("model.moved", 8.0, 0),
    ]
    assert found.unchanged == ["model.same"]
    assert found.objects == {
        "epoch": ("1", "2"),
        "config.rate": ("0.1", "0.2"),
        "config.more": (None, "None"),
        "sampler.epoch": ("1", "2"),
    }
    assert sum(told) == sum(len(data) for path, data in before.items() if path.endswith(".safetensors"))
    assert content(storage) == before
