"""A framework without a framework: numpy arrays are its tensors, and one counter is its random generator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import Arena, TensorSpec
from hvdrecover.data.order import SampleOrder, Tail
from hvdrecover.errors import UnsupportedTensorError
from hvdrecover.state.adapter import Entry, StepReport, fit_tensors

Array = npt.NDArray[Any]

_CODES = {"float64": "F64", "float32": "F32", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()}
_STEP = 0x9E3779B97F4A7C15


class FakeGenerator:
    """splitmix64: its whole state is one int, so that streams are easy to compare."""

    def __init__(self, state: int = 1) -> None:
        self.state = state

    def draw(self) -> int:
        """A number below 2**64."""
        self.state = (self.state + _STEP) % 2**64
        mixed = ((self.state ^ (self.state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        return mixed ^ (mixed >> 31)

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return self.draw() / 2**64


class FakeModel:
    """Named weights; like a torch module it copies what it is loaded from."""

    def __init__(self, **weights: Any) -> None:
        self.weights: dict[str, Array] = {name: np.array(value) for name, value in weights.items()}

    def state_dict(self) -> dict[str, Array]:
        return dict(self.weights)

    def load_state_dict(self, tree: Mapping[str, Array]) -> None:
        for name, value in tree.items():
            self.weights[name][...] = value


class FakeOptimizer:
    """SGD with momentum. Like torch's, it makes arrays at the first step and keeps those it is given."""

    def __init__(self, model: FakeModel, rate: float = 0.1, momentum: float = 0.9) -> None:
        self.model = model
        self.rate = rate
        self.momentum = momentum
        self.velocity: dict[str, Array] = {}

    def step(self, gradients: Mapping[str, Array]) -> None:
        for name, gradient in gradients.items():
            velocity = self.velocity.setdefault(name, np.zeros_like(self.model.weights[name]))
            velocity *= self.momentum
            velocity += gradient
            self.model.weights[name] -= self.rate * velocity

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": dict(self.velocity), "rate": self.rate}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        self.velocity = dict(tree["velocity"])
        self.rate = tree["rate"]


class FakeSchedule:
    """A component without tensors."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, tree: Mapping[str, int]) -> None:
        self.steps = tree["steps"]


class FakeSampler:
    """An elastic sampler as the core sees an adapter's: something with an ``order``."""

    def __init__(self, length: int, *, seed: int = 0, shuffle: bool = True, tail: Tail = "pad") -> None:
        self.order = SampleOrder(length, shuffle=shuffle, seed=seed, tail=tail)

    def __iter__(self) -> Iterator[int]:
        indices = self.order.begin()
        if self.order.on_iterate is not None:
            self.order.on_iterate()
        yield from indices.tolist()

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)


class FakeLoader:
    """Draws a base seed from the global generator when its iterator is made, as torch's loader does."""

    def __init__(self, sampler: FakeSampler, batch_size: int, generator: FakeGenerator) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.draw()
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch:
            yield batch


class FakeFramework:
    """The fake framework's side of the core; see `hvdrecover.state.adapter.Framework`."""

    name = "fake"
    tensors: type | UnionType = np.ndarray

    def __init__(self, seed: int = 1) -> None:
        self.attributes: Mapping[str, Any] = {}
        self.generator = FakeGenerator(seed)  # the process's global generator
        self.tear: int | None = None  # how many more arrays can be copied before `copy_out` breaks, once
        self.reports: dict[StepReport, Any] = {}  # the hooks that asked for reports of steps

    def versions(self) -> dict[str, str]:
        return {"fake": "1.0"}

    def is_component(self, value: Any) -> bool:
        return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

    def spec(self, tensor: Array, name: str) -> TensorSpec:
        if tensor.dtype.name not in _CODES:
            raise UnsupportedTensorError(name, f"an array of {tensor.dtype}")
        return TensorSpec(name, _CODES[tensor.dtype.name], tensor.shape)

    def match(self, tensors: Sequence[Array], specs: Sequence[TensorSpec]) -> bool:
        found = [(_CODES.get(tensor.dtype.name), tensor.shape) for tensor in tensors]
        return found == [(spec.dtype, spec.shape) for spec in specs]

    def views(self, arena: Arena, sources: Sequence[Array] = ()) -> dict[str, Array]:
        return {
            spec.name: arena.bytes_of(spec.name).view(_DTYPES[spec.dtype]).reshape(spec.shape)
            for spec in arena.layout.specs
        }

    def clone(self, tensor: Array) -> Array:
        return tensor.copy()

    def equal(self, pairs: Iterable[tuple[Array, Array]]) -> bool:
        return all(tensor.tobytes() == view.tobytes() for tensor, view in pairs)

    def move(self, tree: Any, present: Any) -> Any:
        return tree

    def copy_out(self, tensors: Sequence[Array], views: Sequence[Array]) -> None:
        for tensor, view in zip(tensors, views, strict=True):
            if self.tear == 0:
                self.tear = None
                raise RuntimeError("the device is gone")
            if self.tear is not None:
                self.tear -= 1
            view[...] = tensor

    def tree(self, component: Any) -> Any:
        return component.state_dict()

    def fit(self, name: str, component: Any, tree: Any) -> tuple[Any, list[str]]:
        if not isinstance(component, FakeModel):
            return tree, []
        if not isinstance(tree, dict):
            return {}, [f"{name}: a {type(tree).__name__} in the commit, a FakeModel in this state"]
        return fit_tensors(self, name, "model", component.weights, tree)

    def load(self, component: Any, tree: Any, *, keep: bool = False) -> None:
        component.load_state_dict(tree if keep else copy.deepcopy(tree))

    def unkept(self, component: Any) -> list[str]:
        return []

    def forget_passes(self, component: Any) -> None:
        pass

    def describe(self, component: Any) -> list[Entry]:
        entries = [Entry("", type(component).__name__)]
        if isinstance(component, FakeModel):
            entries += [
                Entry(f".{name}", f"{value.dtype}{list(value.shape)}")
                for name, value in component.weights.items()
            ]
        if isinstance(component, FakeOptimizer):
            entries.append(Entry(".rate", str(component.rate), setting=True, stored=True))
        return entries

    def rank_local(self, component: Any) -> set[str]:
        """Weights whose name says so."""
        if not isinstance(component, FakeModel):
            return set()
        return {name for name in component.weights if name.startswith("local")}

    def not_finite(self, component: Any) -> list[str]:
        weights = component.weights if isinstance(component, FakeModel) else {}
        return [name for name, value in weights.items() if not np.isfinite(value).all()]

    def draw_seed(self) -> int:
        return self.generator.draw() >> 1

    def seed(self, derive: Callable[[str], int]) -> None:
        self.generator.state = derive("fake")

    def generators(self) -> Any:
        return {"fake": self.generator.state}

    def set_generators(self, states: Any) -> None:
        self.generator.state = states["fake"]

    def original(self, error: BaseException) -> BaseException | None:
        return None

    def report(self, what: StepReport, hook: Any) -> None:
        self.reports[what] = hook  # the tests report
