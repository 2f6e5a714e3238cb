"""Trees taken apart along the outline of the one before: never other than from scratch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.elastic.commits.outline import Outline
from hvdrecover.errors import UnsupportedValueError


def is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def of(tree: Any) -> tuple[Outline, list[Any]]:
    return Outline.of(tree, "state.it", is_tensor)


def renew(before: Any, after: Any) -> tuple[Outline, list[Any]] | None:
    return of(before)[0].renew(after, is_tensor)


def check_same(found: tuple[Outline, list[Any]], expected: tuple[Outline, list[Any]]) -> None:
    """Equal to the last byte of JSON, with the very tensors, under the same names."""
    assert json.dumps(found[0].structure) == json.dumps(expected[0].structure)
    assert found[0].names == expected[0].names
    assert [id(tensor) for tensor in found[1]] == [id(tensor) for tensor in expected[1]]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, 2.5, float("nan"), float("inf")]),
    st.sampled_from(["", "a", "0", "$tensor"]),
)
LEAVES = st.one_of(SCALARS, st.builds(lambda: np.zeros(1)), st.builds(lambda: b"bytes"))
KEYS = st.one_of(st.sampled_from(["a", "b", "0", "$tensor"]), st.integers(0, 1), st.booleans())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


@st.composite
def successors(draw: st.DrawFn) -> tuple[Any, Any]:
    """A tree, and one that a few training steps may make of it: most of it is as it was."""

    def next_one(value: Any) -> Any:
        fate = draw(st.integers(0, 9))
        if fate == 0:
            return draw(TREES)
        if isinstance(value, np.ndarray):
            return value if fate < 5 else np.zeros(1)
        if isinstance(value, list | tuple):
            return type(value)(map(next_one, value))
        if isinstance(value, dict):
            items = [(key, next_one(item)) for key, item in value.items()]
            return dict(items[::-1] if fate == 1 else items)
        return draw(SCALARS) if fate < 4 else value

    before = draw(TREES)
    return before, next_one(before)


@given(successors())
def test_a_renewed_outline_is_what_taking_apart_from_scratch_gives(trees: tuple[Any, Any]) -> None:
    before, after = trees
    first = of(before)[0]
    as_it_was = json.dumps(first.structure)
    if (found := first.renew(after, is_tensor)) is not None:
        check_same(found, of(after))
    assert json.dumps(first.structure) == as_it_was


@given(TREES)
def test_the_same_tree_has_the_very_same_outline(tree: Any) -> None:
    outline, tensors = of(tree)
    found = outline.renew(tree, is_tensor)
    if found is not None:
        check_same(found, (outline, tensors))


def test_a_tree_of_an_optimizer_is_renewed_and_shares_what_has_not_changed() -> None:
    def tree(rate: float) -> dict[str, Any]:
        averages = {number: {"step": np.zeros(()), "average": np.zeros(3)} for number in range(3)}
        return {"state": averages, "param_groups": [{"lr": rate, "betas": (0.9, 0.999), "params": [0, 1, 2]}]}

    renewed = of(tree(0.0))[0].renew(tree(0.1), is_tensor)
    assert renewed is not None
    outline = renewed[0]
    after = tree(0.2)
    found = outline.renew(after, is_tensor)
    assert found is not None
    check_same(found, of(after))
    assert found[0].structure["state"] is outline.structure["state"]
    assert found[0].structure["param_groups"][0]["lr"] == 0.2
    assert outline.structure["param_groups"][0]["lr"] == 0.1


def test_a_renewed_outline_can_be_renewed() -> None:
    outline = of({"w": np.zeros(1), "step": 0})[0]
    for step in range(1, 4):
        found = outline.renew({"w": np.zeros(1), "step": step}, is_tensor)
        assert found is not None
        outline = found[0]
        assert outline.structure["step"] == step


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(1), 1.0),
        (1.0, np.zeros(1)),
        ([np.zeros(1)], [np.zeros(1), np.zeros(1)]),
        ([np.zeros(1)], (np.zeros(1),)),
        ({"a": np.zeros(1)}, {"b": np.zeros(1)}),
        ({"a": np.zeros(1)}, {"a": np.zeros(1), "b": 1}),
        ({"a": np.zeros(1), "b": np.zeros(1)}, {"b": np.zeros(1), "a": np.zeros(1)}),
        ({"a": [1, 2], "b": np.zeros(1)}, {"a": [1, np.zeros(1)], "b": np.zeros(1)}),
    ],
)
def test_a_tree_of_another_structure_is_not_renewed(before: Any, after: Any) -> None:
    assert renew(before, after) is None


@pytest.mark.parametrize("tree", [(np.zeros(1), 2), {"a": {"b": (1, [np.zeros(1)])}}])
def test_tensors_in_a_tuple_are_found_from_scratch_each_time(tree: Any) -> None:
    outline, tensors = of(tree)
    assert len(tensors) == len(outline.names) == 1
    assert outline.renew(tree, is_tensor) is None


def test_a_value_that_has_become_one_that_can_not_be_kept_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"state\.it\['rate'\]"):
        renew({"w": np.zeros(1), "rate": 0.5}, {"w": np.zeros(1), "rate": object()})


def test_a_list_that_was_changed_in_place_is_seen() -> None:
    losses = [1.0, 2.0]
    tree = {"w": np.zeros(1), "losses": losses}
    outline = of(tree)[0]
    losses.append(3.0)
    found = outline.renew(tree, is_tensor)
    assert found is not None
    assert found[0].structure["losses"] == [1.0, 2.0, 3.0]
    assert outline.structure["losses"] == [1.0, 2.0]
