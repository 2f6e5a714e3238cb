"""Plain objects as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.checkpoint.inspection import readable
from hvdrecover.checkpoint.values import encode
from hvdrecover.redaction import printable
from tests.unit.checkpoint import golden

TEXTS = {
    "z first": "1",
    "a later": "[None, True, 1180591620717411303424, 0.1, -0.0, 'ü']",
    "infinite": "inf",
    "complex": "(1-2j)",
    "bytes": r"b'\x00\xff'",
    "tuple": "(1, (2,))",
    "frozenset": "frozenset({2})",
    "deque": "deque([1, 2], maxlen=2)",
    "keys": "{1: 'one', (2, 3): 'pair', '$tag': 'text'}",
    "ordered": "OrderedDict({'b': 1, 'a': 2})",
    "counter": "Counter({'a': 2, 'b': 1})",
    "array": "array([[0, 1], [2, 3]], dtype='>i2')",
    "scalar": "np.float32(0.5)",
    "path": "PosixPath('/data/run')",
    "date": "datetime.date(2024, 2, 29)",
    "enum": "Phase.TRAIN",
    "flags": "Access.READ|WRITE",
    "named": "Point(1, 2)",
    "dataclass": "Schedule(rate=0.1, steps=[1, 2])",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_value_reads_as_in_python(name):
    assert readable.text(encode(golden.OBJECTS[name], "")) == TEXTS[name]


def test_nothing_that_a_terminal_obeys_gets_through():
    hostile = "\x1b[2J\x07\r\u202e\u0085"
    value = {
        hostile: [hostile, {"$enum": [f"m:{hostile}", hostile]}],
        "$": 1,
        "d": {"$dataclass": [hostile, {hostile: {"$tensor": hostile}}, {}]},
    }
    assert readable.text(value).isprintable()
    assert printable(hostile).isprintable()
    assert printable("plain ü") == "plain ü"
    paths = readable.differences(value, {**value, "d": 0, hostile: [1, 2]})
    assert all(path.isprintable() for path in paths)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(), inner)
            | st.dictionaries(
                st.sampled_from(
                    ["$tuple", "$dict", "$enum", "$dataclass", "$deque", "$numpy", "$int", "$tensor"]
                ),
                inner,
                min_size=1,
                max_size=2,
            )
        ),
    )
)
def test_any_json_has_a_text_that_is_printable(value):
    value = json.loads(json.dumps(value))
    assert readable.text(value).isprintable()
    assert readable.differences(value, None) in ({"": (readable.shortened(value), "None")}, {})


def test_differences_name_the_way_to_each():
    a = {"group": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}], "keys": {"$dict": [[1, "x"], [2, "y"]]}}
    b = {"group": [{"lr": 0.2, "betas": {"$tuple": [0.9, 0.9]}}], "keys": {"$dict": [[1, "x"], [3, "y"]]}}
    assert readable.differences(a, b) == {
        "group[0].lr": ("0.1", "0.2"),
        "group[0].betas": ("(0.9, 0.99)", "(0.9, 0.9)"),
        "keys[2]": ("'y'", None),
        "keys[3]": (None, "'y'"),
    }
    assert readable.differences({"a": 1}, {"a": True}) == {"a": ("1", "True")}


def test_tensors_that_come_and_go_are_no_differences_of_objects():
    assert readable.differences({"w": {"$tensor": "w"}, "n": 1}, {"v": [{"$tensor": "v"}], "n": 1}) == {}
