"""The things that an adapter supplies to be tested: objects of its framework, and ways to look at them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import ITEM_BYTES
from hvdrecover.state.adapter import Component, Framework, Tensor

# The safetensors dtypes, as torch and TensorFlow call them.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
assert DTYPES.keys() == ITEM_BYTES.keys()


class Adapter(ABC):
    """One framework under test."""

    framework: Framework
    dtypes: Sequence[str]  # the safetensors dtypes that it has

    @abstractmethod
    def model(self, seed: int = 0) -> Component:
        """A small model; equal for equal seeds. Its tree is a dict from names to tensors."""

    @abstractmethod
    def optimizer(self, model: Component) -> Component:
        """An optimizer of the model that keeps tensors once it has stepped."""

    @abstractmethod
    def train_one_step(self, model: Component, optimizer: Component) -> None:
        """A step that depends on the model's and the optimizer's state alone."""

    @abstractmethod
    def parameters(self, model: Component) -> Mapping[str, npt.NDArray[Any]]:
        """Copies of all that is trained, by name."""

    @abstractmethod
    def tensor(self, dtype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
        """A tensor of the very bytes."""

    @abstractmethod
    def content(self, tensor: Tensor) -> bytes:
        """The bytes of a tensor, in C order."""

    @abstractmethod
    def not_contiguous(self) -> Mapping[str, Tensor]:
        """Tensors whose elements are not in one piece and in order; by what they are."""

    @abstractmethod
    def unsupported(self) -> Mapping[str, Tensor]:
        """Tensors that can't be part of a commit, by what they are."""

    @abstractmethod
    def draw(self) -> Mapping[str, float]:
        """A number from every global generator, by what it is."""


def some_bytes(dtype: str, count: int) -> bytes:
    """Bytes for ``count`` elements of a dtype, with all sorts of bits: those of NaNs of any payload, too."""
    generator = np.random.Generator(np.random.PCG64(len(dtype) * 1000 + count))
    drawn = generator.integers(0, 2 if dtype == "BOOL" else 256, count * ITEM_BYTES[dtype], dtype=np.uint8)
    return drawn.tobytes()
