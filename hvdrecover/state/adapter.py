"""The adapter protocol: the part that a framework and Horovod supply to a state; and trees of its tensors."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.arena import Arena, Bytes, Layout, TensorSpec
from hvdrecover.checkpoint.arena import plan as layout_of
from hvdrecover.checkpoint.values import Json

Tensor = Any
Component = Any
Tree = Any
"""Nested containers of plain values and tensors, such as a ``state_dict()``."""
Buffer = bytes | memoryview
# The reports that a hook can ask for:
# steps: each step of an optimizer, before it begins
# times: the time of each step, and the norm of its gradients
# missing: parameters that had no gradient at a step
# gradients: steps whose gradients are not finite, before they are applied
StepReport = Literal["steps", "times", "missing", "gradients"]


@dataclass(frozen=True)
class Entry:
    """One property of a component that all ranks must have in common."""

    name: str  # such as ``.0.weight``; it follows the attribute's name
    value: str  # such as ``F32[64, 128], trained``
    # Whether it is a hyper-parameter. A script may choose it by the number of ranks, and training changes it:
    # a rank that joins later takes it over.
    setting: bool = False
    stored: bool = False  # whether a commit holds it, so that the script's value is ignored in a resumed run


class Framework(Protocol):
    """Facts about a framework; its methods may be called at any time."""

    name: str  # ``torch`` or ``tensorflow``
    tensors: type | UnionType  # the types of its tensors
    attributes: Mapping[str, Any]  # the state's, by name; `Contents` sets it

    def versions(self) -> dict[str, str]:
        """Versions of the framework and of Horovod."""

    # Tensors.

    def spec(self, tensor: Tensor, name: str) -> TensorSpec:
        """Dtype and shape of a tensor; an UnsupportedTensorError if safetensors cannot hold it."""

    def match(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> bool:
        """Return whether `spec` would return equal specs. Must be fast; False if that is uncertain."""

    def views(self, arena: Arena, sources: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return a tensor over each tensor's bytes in an arena, into which ``sources`` will be copied."""

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor."""

    def move(self, tree: Tree, present: Any) -> Tree:
        """Return the tree of a plain value, with its tensors moved to the device of the present value."""

    def copy_out(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Copy tensors into views of an arena; done on return."""

    def equal(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Return whether each tensor equals its view bit for bit. Compares the pairs in the given order."""

    # Components: models, optimizers, schedulers.

    def is_component(self, value: Any) -> bool:
        """Return whether a value has its own training state: a model, an optimizer, a scheduler."""

    def tree(self, component: Component) -> Tree:
        """The component's state; its tensors may share the component's memory."""

    def fit(self, name: str, component: Component, tree: Tree) -> tuple[Tree, list[str]]:
        """Return the part of a stored tree that fits a component, and a line for each difference."""

    def load(self, component: Component, tree: Tree, *, keep: bool = False) -> None:
        """Load a tree that fits. Unless ``keep``, the component must not keep the tree's tensors."""

    def unkept(self, component: Component) -> list[str]:
        """Names of a component's tensors that `tree` leaves out, so that a recovery loses them."""

    def forget_passes(self, component: Component) -> None:
        """Reset the accumulated backward passes of an optimizer."""

    def describe(self, component: Component) -> list[Entry]:
        """Return the properties of a component that must be equal on all ranks, in a fixed order."""

    def rank_local(self, component: Component) -> Collection[str]:
        """Names of the tensors of `tree` that differ between ranks, such as running statistics."""

    def not_finite(self, component: Component) -> list[str]:
        """Names of the trained tensors of a model that hold NaN or infinity; empty for other components."""

    # Global random generators.

    def draw_seed(self) -> int:
        """A number below 2**63 from the global generator."""

    def seed(self, derive: Callable[[str], int]) -> None:
        """Seed every global generator with ``derive(its name)``, a number below 2**63."""

    def generators(self) -> Any:
        """The states of all global generators, as plain values and numpy arrays."""

    def set_generators(self, states: Any) -> None:
        """Restore the states that `generators` returned; skip generators that this process lacks."""

    def original(self, error: BaseException) -> BaseException | None:
        """Return the original error if the framework has wrapped it in this one."""

    def report(self, what: StepReport, hook: Any) -> None:
        """Report steps to a hook; each report is asked for at most once for a state."""


class HiddenAttribute(Protocol):
    """An attribute that an adapter adds to the user's, such as the state of Keras callbacks."""

    def tree(self) -> Tree | None:
        """Return the state for a commit; None leaves it out."""

    def load(self, tree: Tree | None) -> None:
        """Load the state from a commit, or None if it has none. It may keep the tensors."""


@dataclass
class Past:
    """The earlier training functions of this process."""

    functions: int = 0  # number of those that have begun
    finished: set[str] = field(default_factory=set)  # checkpoint roots of those that are finished


class World(Protocol):
    """The ranks of the job, the collectives that recovery needs, and this process's `Past`."""

    past: Past

    # `init` and `shutdown` alternate. All ranks call everything else in between, in the same order.

    def rank(self) -> int:
        pass

    def size(self) -> int:
        pass

    def init(self) -> None:
        """Rendezvous with the other ranks; a RemovedError if this host was removed, or a RendezvousError."""

    def shutdown(self) -> None:
        pass

    def allow_stalls(self, seconds: int) -> None:
        """Set the seconds after which a collective fails that waits for a missing rank; 0: never."""

    def lost(self, error: BaseException) -> bool:
        """Return whether a framework has made this error of a `HorovodInternalError`."""

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        """Return the values of all ranks, as int64 of shape ``[size, len(values)]``."""

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        """Begin an `allgather`. The returned function waits for its result, or raises its error."""

    def gather(self, mine: bytes, name: str) -> Sequence[Buffer]:
        """Return the bytes of all ranks, by rank. Lengths may differ. Takes one collective."""

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer``, a uint8 array of the same length on all ranks, with the root's, in place."""


def gather_json(world: World, value: Any, name: str) -> list[Any]:
    """Return the JSON values of all ranks, by rank; all ranks call this."""
    mine = json.dumps(value, default=dict).encode()  # a commit's state has mappings of other types
    return [json.loads(bytes(text)) for text in world.gather(mine, name)]


def fit_tensors(
    framework: Framework,
    name: str,
    what: str,  # the component's kind for messages, such as ``model``
    mine: Mapping[str, Any],
    stored: Mapping[str, Any],
    fits_anyway: Callable[[str], bool] = lambda key: False,
) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a component's ``stored`` tensors that fits, and a line for each difference."""

    def kind(value: Any, key: str) -> str:
        is_tensor = isinstance(value, framework.tensors)
        return str(framework.spec(value, key)) if is_tensor else f"a {type(value).__name__}"

    absent = {True: f"in the {what}, but not in the commit", False: f"in the commit, but not in the {what}"}
    differences = [f"{name}.{key}: {absent[key in mine]}" for key in stored.keys() ^ mine.keys()]
    fitting = {}
    for key in stored.keys() & mine.keys():
        theirs, ours = kind(stored[key], key), kind(mine[key], key)
        if theirs == ours or fits_anyway(key):
            fitting[key] = stored[key]
        else:
            differences.append(f"{name}.{key}: {theirs} in the commit, {ours} in the {what}")
    return fitting, differences


# -- trees: copied into JSON and arenas at every commit, and rebuilt from them -----------------------------
# A tree becomes JSON in which a tensor is ``{"$tensor": name}``. Its tensors become one safetensors file.

TENSOR = "$tensor"


@dataclass(frozen=True)
class Plan:
    """The tensors of a tree without their content; from one commit to the next it rarely changes."""

    names: Sequence[str]
    specs: Sequence[TensorSpec]
    layout: Layout | None
    smallest_first: Sequence[int]


@dataclass(frozen=True)
class Part:
    """One tree, taken apart but not copied."""

    structure: Json
    tensors: Sequence[Tensor]
    plan: Plan


class Copier:
    """Copies the same trees at every commit, and remembers the plans in between."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._plans: dict[str, Plan] = {}
        # Names in some plan's order, and views in the same. They must not keep an arena that is let go.
        self._views: weakref.WeakKeyDictionary[Arena, tuple[Sequence[str], list[Tensor]]]
        self._views = weakref.WeakKeyDictionary()

    def take_apart(self, trees: Mapping[str, Tree]) -> dict[str, Part]:
        parts = {}
        for name, tree in trees.items():
            found: dict[str, Tensor] = {}
            structure = flatten(tree, f"state.{name}", self._framework.tensors, found)
            names, tensors = list(found), list(found.values())
            plan = self._plans.get(name)
            if plan is None or plan.names != names or not self._framework.match(tensors, plan.specs):
                specs = [
                    replace(self._framework.spec(tensor, f"state.{name}.{key}"), name=key)
                    for key, tensor in found.items()
                ]
                places = sorted((spec.nbytes, place) for place, spec in enumerate(specs))
                smallest_first = [place for _, place in places]
                plan = Plan(names, specs, layout_of(specs) if specs else None, smallest_first)
            parts[name] = Part(structure, tensors, plan)
        self._plans = {name: part.plan for name, part in parts.items()}
        return parts

    def copy(self, parts: Mapping[str, Part], arenas: Mapping[str, Arena]) -> None:
        tensors: list[Tensor] = []
        views: list[Tensor] = []
        for name, arena in arenas.items():
            tensors += parts[name].tensors
            views += self._views_of(arena, parts[name])
        self._framework.copy_out(tensors, views)  # all at once, as many at a time copy faster

    def are_copies(self, parts: Mapping[str, Part], arenas: Mapping[str, Arena]) -> bool:
        # Small tensors of a part first: counters of steps, say, tell sooner than weights.
        return self._framework.equal(
            (part.tensors[place], views[place])
            for name, arena in arenas.items()
            for part, views in [(parts[name], self._views_of(arena, parts[name]))]
            for place in part.plan.smallest_first
        )

    def _views_of(self, arena: Arena, part: Part) -> list[Tensor]:
        """Tensors over an arena's bytes, in the order of a part of the same layout."""
        names = part.plan.names
        known = self._views.get(arena)
        if known is None or known[0] != names:
            by_name = self._framework.views(arena, part.tensors)
            known = self._views[arena] = (names, [by_name[name] for name in names])
        return known[1]


def flatten(tree: Any, path: str, tensors: type | UnionType, found: dict[str, Tensor]) -> Json:
    """Return a tree as JSON, and add its tensors to ``found`` by name, such as ``state.0.exp_avg``."""

    def tensor(value: Tensor, name: str) -> Json:
        while name in found:
            name += "'"
        found[name] = value
        return {TENSOR: name}

    def leaf(value: Any, where: str) -> Json:  # for a tensor in another container, such as a tuple
        if not isinstance(value, tensors):
            return NotImplemented
        parts = where.removeprefix(path).removeprefix("[").removesuffix("]").split("][")
        return tensor(value, ".".join(part.strip("'\"") for part in parts) or "value")

    # Each commit walks all tensors, so this loop handles dicts and lists itself: 4 ms for 5,000 tensors.
    # `values.encode` takes several times as long. optree and torch's pytree take as long, without names.
    def visit(value: Any, keys: tuple[Any, ...], prefix: str) -> Json:
        kind = type(value) if len(keys) < _DEEP else None
        encoded: Json
        if kind is dict and set(map(type, value)) <= {str} and "$" not in "".join(value):
            encoded = {}
            for key, item in value.items():
                if isinstance(item, tensors):
                    encoded[key] = tensor(item, prefix + key)
                else:
                    encoded[key] = visit(item, (*keys, key), f"{prefix}{key}.")
            return encoded
        if kind is list and value and type(value[0]) not in _SCALARS:
            encoded = []
            for index, item in enumerate(value):
                if isinstance(item, tensors):
                    encoded.append(tensor(item, f"{prefix}{index}"))
                else:
                    encoded.append(visit(item, (*keys, index), f"{prefix}{index}."))
            return encoded
        return values.encode(value, path + "".join(f"[{key!r}]" for key in keys), leaf)

    return visit(tree, (), "")


_DEEP = 8  # containers; beyond that, `values.encode` finds a container that contains itself
_SCALARS = {type(None), bool, int, float, str}


def rebuild(framework: Framework, structure: Json, arena: Arena | None, *, own: bool) -> Tree:
    """Put a tree together; with ``own``, its tensors have their own memory, else they are views."""
    views = {} if arena is None else framework.views(arena)

    def resolve(tag: str, payload: Any) -> Tensor:
        if tag != TENSOR:
            raise KeyError(tag)
        return framework.clone(views[payload]) if own else views[payload]

    return values.decode(structure, resolve)
