"""The promises of `hvdrecover.state.adapter.Framework`, held against every adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.arena import Arena, TensorSpec, plan
from hvdrecover.errors import UnsupportedTensorError
from hvdrecover.state.adapter import Component, Copier, Framework, Tree, rebuild
from hvdrecover.state.rank_local import stream
from tests.contracts.adapters import Adapter, some_bytes

SHAPES = [(), (1,), (3, 5), (2, 0, 3), (1, 1, 4097)]


def stored(framework: Framework, tree: Tree) -> tuple[Any, Arena | None]:
    """A tree as a commit holds it: JSON, and the bytes of a file."""
    copier = Copier(framework)
    parts = copier.take_apart({"it": tree})
    layout = parts["it"].plan.layout
    arenas = {} if layout is None else {"it": Arena(layout)}
    copier.copy(parts, arenas)
    return json.loads(json.dumps(parts["it"].structure)), arenas.get("it")


def load(framework: Framework, component: Component, structure: Any, arena: Arena | None) -> list[str]:
    """Load a component as the core does it; return the differences."""
    tree, differences = framework.fit("it", component, rebuild(framework, structure, arena, own=False))
    framework.load(component, tree)
    return differences


def same(one: Mapping[str, npt.NDArray[Any]], other: Mapping[str, npt.NDArray[Any]]) -> bool:
    return {name: value.tobytes() for name, value in one.items()} == {
        name: value.tobytes() for name, value in other.items()
    }


def every_dtype(adapter: Adapter, shape: tuple[int, ...]) -> dict[str, Any]:
    count = int(np.prod(shape))
    return {dtype: adapter.tensor(dtype, shape, some_bytes(dtype, count)) for dtype in adapter.dtypes}


# -- tensors -------------------------------------------------------------------------------------------


def test_tensors_match_their_own_specs_and_no_others(adapter: Adapter) -> None:
    framework = adapter.framework
    tensors = [tensor for shape in SHAPES for tensor in every_dtype(adapter, shape).values()]
    specs = [framework.spec(tensor, str(number)) for number, tensor in enumerate(tensors)]
    assert framework.match(tensors, specs)
    assert framework.match([], [])
    for number, tensor in enumerate(tensors):
        for other in range(len(tensors)):
            assert framework.match([tensor], [specs[other]]) is (other == number)
    assert not framework.match([*tensors[1:], tensors[0]], specs)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_of_every_dtype_comes_back(adapter: Adapter, shape: tuple[int, ...], own: bool) -> None:
    tensors = every_dtype(adapter, shape)
    structure, arena = stored(adapter.framework, tensors)
    found = rebuild(adapter.framework, structure, arena, own=own)
    for dtype, tensor in tensors.items():
        assert adapter.framework.spec(found[dtype], "t") == TensorSpec("t", dtype, shape)
        assert adapter.content(found[dtype]) == adapter.content(tensor), dtype
        assert arena is not None and arena.bytes_of(dtype).tobytes() == adapter.content(tensor), dtype


def test_a_clone_has_memory_of_its_own(adapter: Adapter) -> None:
    arena = Arena(plan([TensorSpec("t", "F32", (3,))]))
    clone = adapter.framework.clone(adapter.framework.views(arena)["t"])
    arena.bytes_of("t")[:] = 0xFF
    assert adapter.content(clone) == bytes(12)


def test_elements_are_copied_in_order_wherever_they_lie(adapter: Adapter) -> None:
    for kind, tensor in adapter.not_contiguous().items():
        structure, arena = stored(adapter.framework, tensor)
        found = rebuild(adapter.framework, structure, arena, own=True)
        assert adapter.framework.spec(found, "t") == adapter.framework.spec(tensor, "t"), kind
        assert adapter.content(found) == adapter.content(tensor), kind


@pytest.mark.parametrize("count", [6, 1 << 19])
def test_one_bit_makes_a_difference(adapter: Adapter, count: int) -> None:
    specs = [TensorSpec(dtype, dtype, (2, count // 2)) for dtype in adapter.dtypes if dtype != "BOOL"]
    arena = Arena(plan(specs))
    views = adapter.framework.views(arena)
    tensors = [adapter.tensor(spec.dtype, spec.shape, some_bytes(spec.dtype, count)) for spec in specs]
    pairs = [(tensor, views[spec.name]) for tensor, spec in zip(tensors, specs, strict=True)]
    adapter.framework.copy_out(tensors, [view for _, view in pairs])
    assert adapter.framework.equal(pairs)
    for spec in specs:
        arena.bytes_of(spec.name)[-1] ^= 1
        assert not adapter.framework.equal(pairs), spec.dtype
        arena.bytes_of(spec.name)[-1] ^= 1
    assert adapter.framework.equal(pairs)
    adapter.framework.copy_out([], [])


def test_an_unsupported_tensor_is_named_and_matches_nothing(adapter: Adapter) -> None:
    for kind, tensor in adapter.unsupported().items():
        with pytest.raises(UnsupportedTensorError, match=r"^encoder\.weight: ") as caught:
            adapter.framework.spec(tensor, "encoder.weight")
        assert caught.value.path == "encoder.weight", kind
        assert not adapter.framework.match([tensor], [TensorSpec("t", "F32", tuple(tensor.shape))]), kind


def test_tensors_and_components_are_told_from_plain_values(adapter: Adapter) -> None:
    framework = adapter.framework
    model = adapter.model()
    optimizer = adapter.optimizer(model)
    assert [framework.is_component(value) for value in (model, optimizer)] == [True, True]
    assert [isinstance(value, framework.tensors) for value in (model, optimizer)] == [False, False]
    for plain in (None, 1, 0.5, "text", [], {}, {"state_dict": 1}):
        assert not isinstance(plain, framework.tensors)
        assert not framework.is_component(plain)
    tensor = adapter.tensor("F32", (1,), bytes(4))
    assert isinstance(tensor, framework.tensors)
    assert not framework.is_component(tensor)


# -- what ranks must have in common --------------------------------------------------------------------


def test_equal_components_are_described_alike_and_others_are_not(adapter: Adapter) -> None:
    framework, fresh = adapter.framework, adapter.model(seed=2)
    for mine, other in zip(trained(adapter), (fresh, adapter.optimizer(fresh)), strict=True):
        entries = [each for each in framework.describe(mine) if not each.setting]
        assert entries == [each for each in framework.describe(other) if not each.setting]
        assert len({each.name for each in entries}) == len(entries) > 0
    assert framework.describe(fresh) != framework.describe(adapter.optimizer(fresh))


def test_what_is_trained_is_shared_by_all_ranks(adapter: Adapter) -> None:
    framework = adapter.framework
    model, optimizer = trained(adapter)
    local = set(framework.rank_local(model))
    assert local <= framework.tree(model).keys()
    assert len(framework.tree(model).keys() - local) == len(adapter.parameters(model))
    assert not framework.rank_local(optimizer)


def spoil(adapter: Adapter, model: Component, value: float) -> str:
    """Put a number into one trained tensor of a model; its name."""
    framework = adapter.framework
    tree, local = framework.tree(model), framework.rank_local(model)
    name = sorted(tree.keys() - local)[0]
    spec = framework.spec(tree[name], name)
    dtype = {"F32": np.float32, "F64": np.float64}[spec.dtype]
    array = np.frombuffer(adapter.content(tree[name]), dtype).copy()
    array[-1] = value
    framework.load(model, {**tree, name: adapter.tensor(spec.dtype, spec.shape, array.tobytes())})
    return name


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_parameters_that_are_not_finite_are_named(adapter: Adapter, bad: float) -> None:
    model, optimizer = trained(adapter)
    framework = adapter.framework
    spoil(adapter, model, 1e38)
    assert framework.not_finite(model) == []
    name = spoil(adapter, model, bad)
    assert framework.not_finite(model) == [name]
    assert framework.not_finite(optimizer) == []


# -- models and optimizers -----------------------------------------------------------------------------


def trained(adapter: Adapter, steps: int = 3) -> tuple[Component, Component]:
    model = adapter.model(seed=1)
    optimizer = adapter.optimizer(model)
    for _ in range(steps):
        adapter.train_one_step(model, optimizer)
    return model, optimizer


def test_a_step_changes_all_parameters(adapter: Adapter) -> None:
    """Or else the tests below could not fail."""
    before, after = (adapter.parameters(trained(adapter, steps)[0]) for steps in (1, 2))
    assert all(before[name].tobytes() != after[name].tobytes() for name in before)
    with_new_optimizer, _ = trained(adapter, 1)
    adapter.train_one_step(with_new_optimizer, adapter.optimizer(with_new_optimizer))
    assert not same(adapter.parameters(with_new_optimizer), after)


@pytest.mark.parametrize("twin_has_stepped", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_twin_continues_with_the_same_bits(adapter: Adapter, steps: int, twin_has_stepped: bool) -> None:
    framework = adapter.framework
    model, optimizer = trained(adapter, steps)
    twin = adapter.model(seed=2)
    twins_optimizer = adapter.optimizer(twin)
    if twin_has_stepped:
        adapter.train_one_step(twin, twins_optimizer)
    for one, other in ((model, twin), (optimizer, twins_optimizer)):
        structure, arena = stored(framework, framework.tree(one))
        assert load(framework, other, structure, arena) == []
        if arena is not None:
            arena.buffer[:] = 0xFF  # what was loaded keeps nothing of the arena
    for _ in range(2):
        assert same(adapter.parameters(twin), adapter.parameters(model))
        adapter.train_one_step(model, optimizer)
        adapter.train_one_step(twin, twins_optimizer)
    assert same(adapter.parameters(twin), adapter.parameters(model))


# -- what does not fit ---------------------------------------------------------------------------------


def a_models_tree(adapter: Adapter) -> dict[str, Any]:
    framework = adapter.framework
    return dict(rebuild(framework, *stored(framework, framework.tree(trained(adapter)[0])), own=True))


def test_a_missing_tensor_and_an_extra_one_are_named(adapter: Adapter) -> None:
    tree = a_models_tree(adapter)
    fitting, lines = adapter.framework.fit("net", adapter.model(), tree)
    assert (fitting.keys(), lines) == (tree.keys(), [])
    missing = next(iter(tree))
    changed = {**tree, "old.weight": adapter.tensor("F32", (1,), bytes(4))}
    del changed[missing]
    fitting, lines = adapter.framework.fit("net", adapter.model(), changed)
    by_name = dict(line.split(": ", 1) for line in lines)
    assert by_name.keys() == {f"net.{missing}", "net.old.weight"}
    assert by_name[f"net.{missing}"].startswith("in the model, but not in the commit")
    assert by_name["net.old.weight"].startswith("in the commit, but not in the model")
    assert fitting.keys() == tree.keys() - {missing}


@pytest.mark.parametrize(("dtypes", "more"), [((), (2,)), (("U8", "BOOL"), ())], ids=["reshaped", "retyped"])
def test_another_tensor_is_named_with_both_shapes_and_dtypes(
    adapter: Adapter, dtypes: tuple[str, ...], more: tuple[int, ...]
) -> None:
    tree = a_models_tree(adapter)
    for name in list(tree):
        mine = adapter.framework.spec(tree[name], name)
        dtype = next((each for each in dtypes if each != mine.dtype), mine.dtype)
        theirs = TensorSpec(name, dtype, (*mine.shape, *more))
        changed = {**tree, name: adapter.tensor(theirs.dtype, theirs.shape, bytes(theirs.nbytes))}
        fitting, lines = adapter.framework.fit("net", adapter.model(), changed)
        assert lines == [f"net.{name}: {theirs} in the commit, {mine} in the model"]
        assert fitting.keys() == tree.keys() - {name}


def test_what_fits_is_loaded_and_the_rest_stays(adapter: Adapter) -> None:
    framework = adapter.framework
    tree = a_models_tree(adapter)
    model = adapter.model(seed=2)
    before = a_copy(adapter, model)
    left_out, *others = list(tree)
    fitting, _ = framework.fit("net", model, {name: tree[name] for name in others})
    framework.load(model, fitting)
    after = a_copy(adapter, model)
    assert adapter.content(after[left_out]) == adapter.content(before[left_out])
    assert [adapter.content(after[name]) for name in others] == [
        adapter.content(tree[name]) for name in others
    ]


def a_copy(adapter: Adapter, model: Component) -> dict[str, Any]:
    return {name: adapter.framework.clone(tensor) for name, tensor in adapter.framework.tree(model).items()}


# -- random generators ---------------------------------------------------------------------------------


SEED, COMMIT, RANK = 2**62 + 1, 3, 1


@pytest.mark.parametrize(
    "other",
    [(SEED + 1, COMMIT, RANK), (SEED - 2**62, COMMIT, RANK), (SEED, COMMIT + 1, RANK), (SEED, COMMIT, 0)],
)
def test_every_generator_has_a_stream_for_each_seed_commit_and_rank(
    adapter: Adapter, other: tuple[int, int, int]
) -> None:
    draws = []
    for place in ((SEED, COMMIT, RANK), other):
        adapter.framework.seed(stream(*place))
        draws.append(adapter.draw())
    assert all(draws[0][name] != draws[1][name] for name in draws[0])


def test_every_generator_takes_the_seed_of_its_name(adapter: Adapter) -> None:
    asked: list[str] = []

    def derive(name: str) -> int:
        asked.append(name)
        return 2**63 - 1

    adapter.framework.seed(derive)
    assert len(set(asked)) == len(asked) >= len(adapter.draw())


def test_states_of_generators_survive_json(adapter: Adapter) -> None:
    framework = adapter.framework
    framework.seed(stream(SEED, COMMIT, RANK))
    adapter.draw()  # somewhere in the midst of the streams
    text = json.dumps(values.encode(framework.generators(), "rng"))
    expected = [adapter.draw() for _ in range(700)]  # more than a Mersenne twister makes at a time
    framework.seed(stream(SEED, COMMIT, 0))
    framework.set_generators(values.decode(json.loads(text)))
    assert [adapter.draw() for _ in range(700)] == expected


def test_taking_the_states_of_generators_does_not_move_them(adapter: Adapter) -> None:
    draws = []
    for takes in (0, 2):
        adapter.framework.seed(stream(SEED, COMMIT, RANK))
        for _ in range(takes):
            adapter.framework.generators()
        draws.append(adapter.draw())
    assert draws[0] == draws[1]


def test_a_seed_is_drawn_from_a_global_generator(adapter: Adapter) -> None:
    drawn = []
    for _ in range(2):
        adapter.framework.seed(stream(SEED, COMMIT, RANK))
        drawn.append([adapter.framework.draw_seed() for _ in range(20)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 20
    assert all(0 <= seed < 2**63 for seed in drawn[0])
    assert max(drawn[0]) > 2**60
