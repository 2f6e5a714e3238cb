from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.contracts.adapters import Adapter
from tests.fakes.framework import FakeFramework, FakeModel, FakeOptimizer

_DTYPES = {"F64": "float64", "F32": "float32", "I64": "int64", "U8": "uint8", "BOOL": "bool"}
Array = npt.NDArray[Any]


class FakeAdapter(Adapter):
    """The framework that the core is tested with."""

    def __init__(self) -> None:
        self.framework: FakeFramework = FakeFramework()
        self.dtypes = list(_DTYPES)

    def model(self, seed: int = 0) -> FakeModel:
        return FakeModel(w=np.arange(4.0) + seed, b=0.5 * seed)

    def optimizer(self, model: FakeModel) -> FakeOptimizer:
        return FakeOptimizer(model)

    def train_one_step(self, model: FakeModel, optimizer: FakeOptimizer) -> None:
        optimizer.step({name: np.cos(weight) for name, weight in model.weights.items()})

    def parameters(self, model: FakeModel) -> Mapping[str, Array]:
        return {name: weight.copy() for name, weight in model.weights.items()}

    def tensor(self, dtype: str, shape: tuple[int, ...], content: bytes) -> Array:
        return np.frombuffer(content, _DTYPES[dtype]).reshape(shape).copy()

    def content(self, tensor: Array) -> bytes:
        return tensor.tobytes()

    def not_contiguous(self) -> Mapping[str, Array]:
        base = np.arange(24.0).reshape(4, 6)
        return {
            "transposed": base.T,
            "strided": base[::2, 1::3],
            "broadcast": np.broadcast_to(base[0], (3, 6)),
        }

    def unsupported(self) -> Mapping[str, Array]:
        return {"of objects": np.array([object()]), "of text": np.array(["a"])}

    def draw(self) -> Mapping[str, float]:
        return {"fake": self.framework.generator.uniform()}


made = FakeAdapter
