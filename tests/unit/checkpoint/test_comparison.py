"""The content of commits as text, and the differences between two commits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdrecover.checkpoint import CommitId, inspection
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.values import encode
from hvdrecover.redaction import printable
from tests.unit.checkpoint.roots import CODES, arena_of, content, make_store

A, B = CommitId(1, 1), CommitId(1, 2)


def measured(a, b, code=None):
    """Return how many elements differ, how many of them are not finite, and the largest difference."""
    a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
    return inspection.measure(
        code or CODES[a.dtype], a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (np.array([1.0, -4.0, 2.0]), np.array([1.5, -4.0, 0.0]), (2, 0, 2.0)),
        (np.array([2.0, math.nan, math.nan]), np.array([3.0, 1.0, math.nan]), (2, 1, 1.0)),
        (np.array([2.0, math.inf]), np.array([3.0, -math.inf]), (2, 1, 1.0)),
        (np.array([0.0]), np.array([-0.0]), (1, 0, 0.0)),
        (np.array([2**63 - 1, -(2**63)]), np.array([2**63 - 2, 2**63 - 1]), (2, 0, 2.0**64)),
        (np.array([200], "u1"), np.array([100], "u1"), (1, 0, 100)),
        (np.array([-128], "i1"), np.array([127], "i1"), (1, 0, 255)),
        (np.array([True, False]), np.array([False, False]), (1, 0, 1)),
        (np.array([3 + 4j], "c8"), np.array([0], "c8"), (1, 0, 5.0)),
        (np.array([-60000], "f2"), np.array([60000], "f2"), (1, 0, 120000)),
        (np.zeros(0), np.zeros(0), (0, 0, 0.0)),
    ],
)
def test_elements_that_differ_are_counted_and_measured(a, b, expected):
    assert measured(a, b) == expected


@pytest.mark.parametrize(
    ("code", "items", "one", "two", "expected"),
    [
        ("BF16", "u2", 0x3F80, 0x4000, (1, 0, 1.0)),
        ("F8_E4M3", "u1", 0x38, 0x40, (1, 0, 1.0)),
        ("F8_E4M3", "u1", 0x7E, 0x81, (1, 0, 448 + 2**-9)),
        ("F8_E4M3", "u1", 0x7F, 0x40, (1, 1, 0.0)),
        ("F8_E5M2", "u1", 0x3C, 0x40, (1, 0, 1.0)),
        ("F8_E5M2", "u1", 0x7B, 0x81, (1, 0, 57344 + 2**-16)),
        ("F8_E5M2", "u1", 0x7C, 0x40, (1, 1, 0.0)),
    ],
)
def test_types_that_numpy_lacks_are_compared_by_value(code, items, one, two, expected):
    assert measured(np.array([one, two], items), np.array([two, two], items), code) == expected


def test_a_tensor_of_many_chunks_is_compared_whole(monkeypatch):
    monkeypatch.setattr(inspection, "CHUNK", 7)
    a = np.linspace(-1, 1, 100)
    b = a.copy()
    b[[3, 50, 99]] += [0.5, 0.25, 0.125]
    b[20] = math.nan
    assert measured(a, b) == (4, 1, 0.5)


# -- commits -------------------------------------------------------------------------------------------


def snapshot(commit, tensors, **objects):
    arenas = {attribute: arena_of(arrays) for attribute, arrays in tensors.items()}
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
    found = inspection.compare(storage, A, B, told.append)
    assert [(each.name, each.change, each.largest) for each in found.differences] == [
        ("extra.x", "removed F32[4]", None),
        ("model.gone", "removed F32[4]", None),
        ("model.leapt", "1 of 4 elements, 1 not finite", 0.0),
        ("model.moved", "4 of 4 elements", 8.0),
        ("model.new", "added F32[4]", None),
        ("model.wide", "F32[4] → F64[4]", None),
        ("epoch", "1 → 2", None),
        ("config.rate", "0.1 → 0.2", None),
        ("sampler.epoch", "1 → 2", None),
        ("config.more", "(none) → None", None),
    ]
    assert found.unchanged == 1
    assert sum(told) == sum(len(data) for path, data in before.items() if path.endswith(".safetensors"))
    assert content(storage) == before


# -- plain objects as text -----------------------------------------------------------------------------


def test_a_value_reads_as_in_python():
    value = {"rate": 0.1, "tuple": (1, (2,)), "keys": {1: "ü"}, "bytes": b"\xff", "array": np.arange(2)}
    assert inspection.text(encode(value, "")) == repr(value)
    unknown = {"$enum": ["train:Phase", "TRAIN"]}
    assert inspection.text(unknown) == repr(unknown)


def test_nothing_that_a_terminal_obeys_gets_through():
    hostile = "\x1b[2J\x07\r\u202e\u0085"
    value = {
        hostile: [hostile, {"$enum": [f"m:{hostile}", hostile]}],
        "$": 1,
        "d": {"$dataclass": [hostile, {hostile: {"$tensor": hostile}}, {}]},
    }
    assert inspection.text(value).isprintable()
    assert printable(hostile).isprintable()
    assert printable("plain ü") == "plain ü"
    paths = inspection.differences(value, {**value, "d": 0, hostile: [1, 2]})
    assert all(path.isprintable() for path in paths)


def test_differences_name_the_way_to_each():
    a = {"group": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}], "keys": {"$dict": [[1, "x"], [2, "y"]]}}
    b = {"group": [{"lr": 0.2, "betas": {"$tuple": [0.9, 0.9]}}], "keys": {"$dict": [[1, "x"], [3, "y"]]}}
    assert inspection.differences(a, b) == {
        "group[0].lr": ("0.1", "0.2"),
        "group[0].betas": ("(0.9, 0.99)", "(0.9, 0.9)"),
        "keys[2]": ("'y'", "(none)"),
        "keys[3]": ("(none)", "'y'"),
    }
    assert inspection.differences({"a": 1}, {"a": True}) == {"a": ("1", "True")}


def test_tensors_that_come_and_go_are_no_differences_of_objects():
    assert inspection.differences({"w": {"$tensor": "w"}, "n": 1}, {"v": [{"$tensor": "v"}], "n": 1}) == {}
