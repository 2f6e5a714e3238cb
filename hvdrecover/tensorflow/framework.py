"""Facts about TensorFlow and Keras: their tensors, variables and random generators."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from hvdrecover.checkpoint.arena import WORTH_A_SPAN, Arena, TensorSpec, copy_spans, spans_equal
from hvdrecover.errors import UnsupportedTensorError
from hvdrecover.state import horovod
from hvdrecover.state import rank_local as streams
from hvdrecover.state.adapter import Entry, StepReport, Tree, fit_tensors
from hvdrecover.tensorflow import collectives
from hvdrecover.tensorflow.averaging import sums_of, watch
from hvdrecover.tensorflow.optimizer import hooks_of, report_gradients
from hvdrecover.tensorflow.variables import is_seed, mean_the_same, named, raw, variables_of, without_numbers

Array = npt.NDArray[Any]

_DTYPES = {
    tf.bool: "BOOL",
    tf.uint8: "U8",
    tf.int8: "I8",
    tf.dtypes.experimental.float8_e4m3fn: "F8_E4M3",
    tf.dtypes.experimental.float8_e5m2: "F8_E5M2",
    tf.uint16: "U16",
    tf.int16: "I16",
    tf.float16: "F16",
    tf.bfloat16: "BF16",
    tf.uint32: "U32",
    tf.int32: "I32",
    tf.float32: "F32",
    tf.uint64: "U64",
    tf.int64: "I64",
    tf.float64: "F64",
    tf.complex64: "C64",
}
_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}


class View(np.ndarray):
    """A tensor over memory of an arena, as an array: TensorFlow's tensors are immutable."""


class TensorFlowFramework:
    """The TensorFlow side of the core; see `hvdrecover.state.adapter.Framework`."""

    name = "tensorflow"
    tensors: type | UnionType = tf.Tensor | tf.Variable | View

    def __init__(self) -> None:
        self.attributes: Mapping[str, Any] = {}
        self.step_observers: list[Any] = []  # want to know when ``model.fit`` begins a step
        # States of generators that were part of a commit, by identity, in the order in which they were found.
        self._seeds = weakref.WeakValueDictionary[int, tf.Variable]()
        global_seed_generator()  # Keras makes it at the first use, with a seed from Python's: better now

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__, "keras": keras.__version__, "horovod": horovod.version()}

    def is_component(self, value: Any) -> bool:
        return variables_of(value) is not None

    def spec(self, tensor: tf.Tensor | tf.Variable | View, name: str) -> TensorSpec:
        dtype, attribute = tf.as_dtype(tensor.dtype), name.removeprefix("state.").partition(".")[0]
        if isinstance(tensor, tf.Variable) and not self._is_in_a_component(attribute):
            raise UnsupportedTensorError(
                name,
                "it is a variable among other values, and going back to a commit would put a tensor in its "
                "place; keep variables in attributes of their own: alone, in lists, in dicts, or in modules",
            )
        if dtype not in _DTYPES or not _has_a_value(tensor):
            raise UnsupportedTensorError(
                name,
                f"a tensor of this kind ({type(tensor).__name__}, {dtype.name}) can't be part of a commit; "
                "make it a dense eager tensor of a plain dtype",
            )
        return TensorSpec(name, _DTYPES[dtype], tuple(tensor.shape))

    def _is_in_a_component(self, attribute: str) -> bool:
        value = self.attributes.get(attribute)  # None: a part that the state adds
        if value is None or isinstance(value, streams.PerRank) or hasattr(type(value), "variables"):
            return True  # quickly: this is asked for each variable of a model
        return self.is_component(value)

    def match(self, tensors: Sequence[Any], specs: Sequence[TensorSpec]) -> bool:
        return all(
            _DTYPES.get(tensor.dtype) == spec.dtype
            and tuple(tensor.shape) == spec.shape
            and _has_a_value(tensor)
            for tensor, spec in zip(tensors, specs, strict=True)
        )

    def views(self, arena: Arena, sources: Sequence[Any] = ()) -> dict[str, View]:
        found = {}
        for spec in arena.layout.specs:
            array = arena.bytes_of(spec.name).view(_BY_CODE[spec.dtype].as_numpy_dtype)
            found[spec.name] = array.reshape(spec.shape).view(View)
        return found

    def clone(self, tensor: Any) -> tf.Tensor:
        return _own(tensor)

    def move(self, tree: Tree, present: Any) -> Tree:
        return tree  # operations take tensors from any device

    def copy_out(self, tensors: Sequence[tf.Tensor | tf.Variable], views: Sequence[View]) -> None:
        sources = [_on_host(tensor) for tensor in tensors]  # kept, so that the addresses stay valid
        pairs = zip(views, sources, strict=True)
        copy_spans([(_address(view), _address(source), source.nbytes) for view, source in pairs])

    def equal(self, pairs: Iterable[tuple[tf.Tensor | tf.Variable, View]]) -> bool:
        large: list[tuple[Array, View]] = []  # kept, so that the addresses stay valid
        for tensor, view in pairs:
            mine = _on_host(tensor)
            if mine.nbytes >= WORTH_A_SPAN:
                large.append((mine, view))
            elif mine.tobytes() != view.tobytes():
                return False
        return spans_equal([(_address(view), _address(mine), mine.nbytes) for mine, view in large])

    def tree(self, component: Any) -> Tree:
        """The component's variables by Keras path or name, but for seeds, which are generators."""
        for seed in map(raw, filter(is_seed, variables_of(component) or [])):
            self._seeds.setdefault(id(seed), seed)
        return named(component)

    def fit(self, name: str, component: Any, tree: Tree) -> tuple[Tree, list[str]]:
        mine = named(component)
        if not isinstance(tree, dict):
            kind = f"a {type(tree).__name__} in the commit, a {type(component).__name__} in this state"
            return mine, [f"{name}: {kind}"]
        what = "optimizer" if isinstance(component, keras.optimizers.Optimizer) else "model"
        if tree.keys() != mine.keys() and mean_the_same(list(tree), list(mine)):
            tree = dict(zip(mine, tree.values(), strict=True))
        return fit_tensors(self, name, what, mine, tree)

    def load(self, component: Any, tree: Tree, *, keep: bool = False) -> None:
        mine = named(component)
        for name, value in tree.items():
            tf.raw_ops.AssignVariableOp(resource=mine[name].handle, value=_own(value))
        self.forget_passes(component)

    def unkept(self, component: Any) -> list[str]:
        return []  # variables are all that a component holds

    def forget_passes(self, component: Any) -> None:
        hooks_of(component).forget_sums()

    def describe(self, component: Any) -> list[Entry]:
        entries = []
        for number, (name, variable) in enumerate(named(component).items()):
            value = f"{variable.dtype.name}{list(variable.shape)}{', trained' if variable.trainable else ''}"
            # Without the numbers that Keras gives: these depend on earlier layers of the process.
            entries.append(Entry(f".{number}.{without_numbers(name)}", value))
        if isinstance(component, keras.optimizers.Optimizer):
            entries.insert(0, Entry("", f"a {type(component).__name__}"))
            entries += [
                Entry(
                    f".{name}",
                    json.dumps(value, default=str, sort_keys=True),
                    setting=True,
                    # Other settings are attributes of the optimizer, which a commit does not hold.
                    stored=name == "learning_rate" and isinstance(value, float),
                )
                for name, value in sorted(component.get_config().items())
                if name != "name"
            ]
        return entries

    def rank_local(self, component: Any) -> set[str]:
        return {name for name, each in _of_model(component).items() if not each.trainable}

    def not_finite(self, component: Any) -> list[str]:
        trained = {name: each for name, each in _of_model(component).items() if each.trainable}
        floats = {name: each for name, each in trained.items() if each.dtype.is_floating}
        if not floats or np.isfinite(sums_of(list(floats.values())).numpy()).all():
            return []
        return [name for name, each in floats.items() if not np.isfinite(each.numpy()).all()]

    def draw_seed(self) -> int:
        return random.getrandbits(63)  # from Python's generator, which ``keras.utils.set_random_seed`` seeds

    def seed(self, derive: Callable[[str], int]) -> None:
        random.seed(derive("python"))
        np.random.seed(_halves(derive("numpy")))
        _tensorflow_generator().reset_from_seed(derive("tensorflow"))
        for number, state in enumerate(self._keras_states()):
            state.assign(np.array(_halves(derive(f"keras/{number}")), dtype=state.dtype.as_numpy_dtype))

    def generators(self) -> Any:
        return {
            "python": streams.python_state(),
            "numpy": np.random.get_state(legacy=False),
            "tensorflow": _tensorflow_generator().state.numpy(),
            "keras": [state.numpy() for state in self._keras_states()],
        }

    def set_generators(self, states: Any) -> None:
        streams.set_python(states["python"])
        streams.set_numpy(states["numpy"])
        _tensorflow_generator().state.assign(states["tensorflow"])
        for mine, stored in zip(self._keras_states(), states["keras"], strict=False):
            mine.assign(stored)

    def original(self, error: BaseException) -> BaseException | None:
        return collectives.original(error)

    def report(self, what: StepReport, hook: Any) -> None:
        if what == "steps":
            self.step_observers.append(hook)
        elif what == "times":
            watch(hook)
        elif what == "gradients":
            components = {name: each for name, each in self.attributes.items() if self.is_component(each)}
            report_gradients(components, hook)
        # A gradient that is missing on some ranks is an error of `Reduction`.

    def _keras_states(self) -> Iterator[tf.Variable]:
        yield global_seed_generator().state.value
        yield from self._seeds.values()


def _tensorflow_generator() -> tf.random.Generator:
    try:
        return tf.random.get_global_generator()
    except RuntimeError:  # with op determinism, TensorFlow does not make one by itself
        tf.random.set_global_generator(tf.random.Generator.from_seed(0, alg="philox"))
        return tf.random.get_global_generator()


def _halves(seed: int) -> list[int]:
    return [seed & 0xFFFFFFFF, seed >> 32]


def _has_a_value(tensor: Any) -> bool:
    return isinstance(tensor, tf.Variable | View) or hasattr(tensor, "numpy")


def _on_host(tensor: tf.Tensor | tf.Variable) -> Array:
    """Return a tensor's content as an array, without a copy if it is in this host's memory."""
    if isinstance(tensor, tf.Variable):  # `read_value` takes several times as long
        tensor = tf.raw_ops.ReadVariableOp(resource=tensor.handle, dtype=tensor.dtype)
    # As long as the array lives, an assignment to the variable goes to new memory.
    return np.ascontiguousarray(tensor._numpy())


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _own(tensor: Any) -> tf.Tensor:
    """A tensor of the same bits that shares no memory with an arena; `tf.constant` alone might."""
    is_view = isinstance(tensor, View)
    return tf.constant(np.array(tensor, copy=True, subok=False)) if is_view else tf.identity(tensor)


def _of_model(component: Any) -> dict[str, tf.Variable]:
    return {} if isinstance(component, keras.optimizers.Optimizer) else named(component)
