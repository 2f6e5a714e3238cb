from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from hvdrecover.errors import UnsupportedTensorError
from hvdrecover.torch.framework import TorchFramework
from tests.fakes.root import FakeRoots
from tests.unit.torch.jobs import bits, joined

pytestmark = pytest.mark.usefixtures("roots")

FRAMEWORK = TorchFramework()


def test_plain_tensors_come_to_the_device_of_those_in_their_place() -> None:
    tree = {"best": torch.ones(2), "seen": [(torch.ones(1), 7)], "name": "x"}
    elsewhere = [torch.ones(3, device="meta"), {"more": 1}]
    moved = FRAMEWORK.move(tree, elsewhere)
    assert (moved["best"].is_meta, moved["seen"][0][0].is_meta) == (True, True)
    assert (moved["seen"][0][1], moved["name"]) == (7, "x")
    for present in ([torch.ones(1)], [torch.ones(1), *elsewhere], "nothing"):
        assert FRAMEWORK.move(tree, present) is tree


# -- tensors that can't be kept ------------------------------------------------------------------------

UNSUPPORTED = {
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "without data": lambda: torch.ones(2, device="meta"),
    "made of two": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_a_tensor_that_can_not_be_kept_is_refused_when_the_state_is_made(make: Any) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"weight: .*\(.*Tensor.*\).* dense "):
        joined(box={"weight": make()})


def test_a_tensor_that_is_sharded_over_ranks_is_refused_in_words() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(UnsupportedTensorError, match=r"weight: replicated state only, .*DTensor"):
            joined(box={"weight": sharded})
    finally:
        torch.distributed.destroy_process_group()


def test_a_lazy_module_is_refused_until_its_shapes_are_known() -> None:
    model = torch.nn.LazyLinear(3)
    with pytest.raises(UnsupportedTensorError, match="lazy"):
        joined(model=model)
    model(torch.ones(1, 2))
    assert joined(model=model).model is model


def test_sparse_momentum_is_refused_at_the_commit_and_spoils_nothing() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = joined(model=model, optimizer=optimizer)
    before = bits(model.state_dict())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedTensorError, match=r"state\.model\.weight\.momentum_buffer: .*sparse_coo"):
        state.commit()
    state.restore()
    assert bits(model.state_dict()) == before


# -- modules -------------------------------------------------------------------------------------------


class WithExtraTensor(torch.nn.Module):
    """Has a number as its extra state at first, and a tensor later."""

    extra: Any = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [torch.ones(3), "text", None, {"scale": torch.ones(2), "calls": 3, "names": ("a", "b")}]
)
def test_extra_state_may_change_its_kind(extra: Any) -> None:
    model = WithExtraTensor()
    state = joined(model=model)
    model.extra = extra
    state.restore()
    assert model.extra == 0
    model.extra = extra
    state.commit()
    for _ in range(2):
        model.extra = 1
        state.restore()
        assert bits(model.extra) == bits(extra)


def test_extra_state_that_json_can_not_hold_is_named() -> None:
    from hvdrecover.errors import UnsupportedValueError

    model = WithExtraTensor()
    model.extra = object()
    with pytest.raises(UnsupportedValueError, match=r"state\.model\['_extra_state'\]"):
        joined(model=model)


class OnItsOwnTerms(torch.nn.Linear):
    """Overrides ``load_state_dict`` without torch's other arguments."""

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(dict(state_dict))


def test_a_module_with_a_load_state_dict_of_its_own() -> None:
    model = OnItsOwnTerms(2, 2)
    state = joined(model=model)
    before = bits(model.state_dict())
    torch.nn.init.zeros_(model.weight)
    state.restore()
    assert bits(model.state_dict()) == before


class OfVersionThree(torch.nn.Module):
    """Converts what it takes for the state of an old release, as some of torch's layers do."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 3:
            state_dict[f"{prefix}scale"] = 1 / state_dict[f"{prefix}scale"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_layers_are_told_that_the_state_is_of_their_version() -> None:
    model = torch.nn.Sequential(OfVersionThree())
    model[0].scale.fill_(4.0)
    state = joined(model=model)
    model[0].scale.fill_(5.0)
    state.restore()
    assert model[0].scale.tolist() == [4.0]


# -- random generators ---------------------------------------------------------------------------------


def test_an_unfinished_pair_of_normal_numbers_is_part_of_a_generators_state() -> None:
    """Generators make normal numbers in pairs, and keep the second for the next time."""

    def draw() -> list[float]:
        return [random.gauss(0, 1), np.random.standard_normal(), torch.randn(()).item()]

    FRAMEWORK.seed(lambda name: 3)
    draw()
    states = FRAMEWORK.generators()
    expected = [draw() for _ in range(3)]
    FRAMEWORK.seed(lambda name: 3)
    FRAMEWORK.set_generators(states)
    assert [draw() for _ in range(3)] == expected


def test_seeding_does_not_wake_devices_that_are_not_in_use() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("devices are in use")
    before = list(torch.cuda._queued_calls)
    FRAMEWORK.seed(lambda name: 3)
    assert torch.cuda._queued_calls == before


def test_states_of_generators_that_this_process_lacks_are_left_out(roots: FakeRoots) -> None:
    states = FRAMEWORK.generators()
    FRAMEWORK.set_generators({**states, "cuda": [np.zeros(16, dtype=np.uint8)]})
    assert torch.get_rng_state().numpy().tobytes() == states["torch"].tobytes()
