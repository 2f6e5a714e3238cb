from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from hvdrecover.errors import UnsupportedTensorError
from tests.unit.torch.jobs import joined

pytestmark = pytest.mark.usefixtures("roots")

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


# -- modules -------------------------------------------------------------------------------------------


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
