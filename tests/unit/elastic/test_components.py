from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.elastic.commits.copier import Copier, rebuild
from hvdrecover.errors import UnsupportedValueError
from tests.fakes.capture import capture
from tests.fakes.framework import FakeFramework


def round_trip(tree: Any, *, own: bool = True) -> Any:
    framework = FakeFramework()
    structure, arenas = capture(framework, {"tree": tree}, {})
    return rebuild(framework, structure["tree"], arenas.get("tree"), own=own)


def names(tree: Any) -> list[str]:
    _, arenas = capture(FakeFramework(), {"tree": tree}, {})
    return sorted(arenas["tree"].layout.by_name)


def test_a_tree_of_tensors_and_plain_values_comes_back() -> None:
    tree = {
        "groups": [{"rate": 0.5, "betas": (0.9, 0.99)}],
        "state": {0: {"step": 3, "average": np.array([1.5, 2.5])}, 1: {"average": np.zeros((2, 0))}},
        "flags": np.array([True, False]),
        "scalar": np.array(7, dtype=np.int64),
    }
    found = round_trip(tree)
    assert found["groups"] == tree["groups"]
    assert found["state"][0]["average"].tolist() == [1.5, 2.5]
    assert found["state"][1]["average"].shape == (2, 0)
    assert found["flags"].tolist() == [True, False]
    assert found["scalar"] == 7
    assert found["scalar"].shape == ()


def test_tensors_inside_plain_objects_go_to_the_arena() -> None:
    structure, arenas = capture(FakeFramework(), {"best": [1, {"loss": np.array([0.25])}]}, {})
    assert arenas["best"].bytes_of("1.loss").view(np.float64).tolist() == [0.25]
    assert structure["best"] == [1, {"loss": {"$tensor": "1.loss"}}]


def test_tensors_are_named_after_their_place() -> None:
    tree = {"state": {0: {"average": np.zeros(1)}}, "list": [np.zeros(1)], "layer.weight": np.zeros(1)}
    assert names(tree) == ["layer.weight", "list.0", "state.0.average"]


def test_a_lone_tensor_has_a_name_as_well() -> None:
    assert names(np.zeros(1)) == ["value"]


def test_tensors_whose_names_would_be_equal_are_told_apart() -> None:
    tree = {"a.b": np.array([1.0]), "a": {"b": np.array([2.0])}}
    assert len(names(tree)) == 2
    found = round_trip(tree)
    assert (found["a.b"].tolist(), found["a"]["b"].tolist()) == ([1.0], [2.0])


def test_a_tree_without_tensors_needs_no_arena() -> None:
    _, arenas = capture(FakeFramework(), {"epoch": 3}, {})
    assert arenas == {}


def test_an_arena_of_the_same_layout_is_used_again() -> None:
    framework = FakeFramework()
    _, first = capture(framework, {"w": np.array([1.0])}, {})
    _, second = capture(framework, {"w": np.array([2.0])}, first)
    assert second["w"] is first["w"]
    assert second["w"].bytes_of("value").view(np.float64).tolist() == [2.0]


@pytest.mark.parametrize("changed", [np.zeros(2), np.zeros(1, dtype=np.float32), {"other": np.zeros(1)}])
def test_an_arena_of_another_layout_is_left_alone(changed: Any) -> None:
    framework = FakeFramework()
    _, first = capture(framework, {"w": np.array([1.0])}, {})
    _, second = capture(framework, {"w": changed}, first)
    assert second["w"] is not first["w"]
    assert first["w"].bytes_of("value").view(np.float64).tolist() == [1.0]


def test_an_arena_is_used_again_by_a_tree_in_another_order() -> None:
    copier = Copier(FakeFramework())
    dtypes = {"a": np.float64, "b": np.uint8}  # the larger come first in an arena, whatever the order
    arenas: dict[str, Arena] = {}
    for names in ["ab", "ba", "ab"]:
        tree = {name: np.array([ord(name)], dtype=dtypes[name]) for name in names}
        parts = copier.take_apart({"it": tree})
        before, arenas = arenas, copier.copy(parts, arenas)
        assert not before or arenas["it"] is before["it"]
        assert arenas["it"].bytes_of("a").view(np.float64).tolist() == [97.0]
        assert arenas["it"].bytes_of("b").view(dtypes["b"]).tolist() == [98]


def test_what_has_been_copied_is_not_kept_alive() -> None:
    copier = Copier(FakeFramework())
    tensor = np.array([1.0])
    arenas = copier.copy(copier.take_apart({"it": tensor}), {})
    gone = [weakref.ref(tensor), weakref.ref(arenas["it"])]
    del tensor, arenas
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_tensors_of_their_own_do_not_share_the_arena() -> None:
    framework = FakeFramework()
    structure, arenas = capture(framework, {"w": np.array([1.0])}, {})
    rebuild(framework, structure["w"], arenas["w"], own=True)[...] = 9.0
    assert arenas["w"].bytes_of("value").view(np.float64).tolist() == [1.0]


def test_other_tensors_are_views_of_the_arena() -> None:
    framework = FakeFramework()
    structure, arenas = capture(framework, {"w": np.array([1.0])}, {})
    view = rebuild(framework, structure["w"], arenas["w"], own=False)
    assert np.shares_memory(view, arenas["w"].buffer)


@pytest.mark.parametrize("structure", [{"$tensor": "missing"}, {"$nonsense": 1}, {"$tensor": ["w"]}])
def test_a_structure_that_makes_no_sense_is_refused(structure: Any) -> None:
    _, arenas = capture(FakeFramework(), {"w": np.array([1.0])}, {})
    with pytest.raises(ValueError, match=r"malformed|unknown"):
        rebuild(FakeFramework(), structure, arenas["w"], own=True)


def test_a_value_that_json_can_not_hold_is_named_by_its_attribute() -> None:
    with pytest.raises(UnsupportedValueError, match=r"state\.box\['x'\]\[0\]: "):
        capture(FakeFramework(), {"box": {"x": [object()]}}, {})


def test_nothing_is_copied_if_one_tree_can_not_be() -> None:
    framework = FakeFramework()
    _, arenas = capture(framework, {"w": np.array([1.0])}, {})
    before = arenas["w"].buffer.tobytes()
    with pytest.raises(UnsupportedValueError):
        capture(framework, {"w": np.array([2.0]), "box": object()}, arenas)
    assert arenas["w"].buffer.tobytes() == before


def test_an_arena_holds_a_file_that_safetensors_reads() -> None:
    from safetensors.numpy import load

    _, arenas = capture(
        FakeFramework(), {"m": {"w": np.array([1.0]), "b": np.array([2], dtype=np.int64)}}, {}
    )
    arena: Arena = arenas["m"]
    found = load(arena.buffer.tobytes())
    assert {name: array.tolist() for name, array in found.items()} == {"w": [1.0], "b": [2]}
