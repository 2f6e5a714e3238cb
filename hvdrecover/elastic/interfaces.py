"""The interfaces of a framework and of Horovod; each adapter supplies both.

Lifecycle: `World.init` and `World.shutdown` alternate; all else of `World` is called in between, by all ranks
in the same order. `Framework` may be called at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import Arena, Bytes
from hvdrecover.checkpoint.layout import TensorSpec

if TYPE_CHECKING:
    from hvdrecover.elastic.commits.contents import Contents
    from hvdrecover.elastic.scalars.scalars import Scalars
    from hvdrecover.guard.missing import Missing
    from hvdrecover.guard.numbers import Judge

Tensor = Any
Component = Any
Tree = Any
"""Nested containers of plain values and tensors, such as a ``state_dict()``."""
Buffer = bytes | memoryview


@dataclass(frozen=True)
class Entry:
    """One thing about a component that all ranks must have in common.

    Attributes:
        name: what it is, such as ``.0.weight``, to be put behind the attribute's name.
        value: how it is, such as ``F32[64, 128], trained``.
        setting: whether it is a hyper-parameter, which a script may well choose by the number of ranks, and
            which training changes: a rank that joins later takes it over.
        stored: whether a commit brings it along, so that what the script sets is ignored when it is resumed.
    """

    name: str
    value: str
    setting: bool = False
    stored: bool = False


class Framework(Protocol):
    """Facts about a framework: its tensors, its components and its random generators.

    Attributes:
        name: ``torch`` or ``tensorflow``.
        attributes: those of the state, by name; `Contents` sets it.
    """

    name: str
    attributes: Mapping[str, Any]

    def versions(self) -> dict[str, str]:
        """Versions of the framework and of Horovod."""

    def is_tensor(self, value: Any) -> bool:
        """Return whether a value is a tensor of this framework."""

    def is_component(self, value: Any) -> bool:
        """Return whether a value holds training state of its own: a model, an optimizer, a scheduler, …."""

    def spec(self, tensor: Tensor, name: str) -> TensorSpec:
        """Dtype and shape of a tensor.

        Raises:
            UnsupportedTensorError: safetensors can't hold it.
        """

    def match(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> bool:
        """Return whether `spec` would give these very specs, found out fast; if in doubt, no."""

    def views(self, arena: Arena) -> dict[str, Tensor]:
        """A tensor over each tensor's bytes in an arena; no copies."""

    def pin(self, arena: Arena, tensors: Sequence[Tensor]) -> None:
        """Make an arena fit for tensors to be copied into it again and again, wherever those are."""

    def clone(self, tensor: Tensor) -> Tensor:
        """A tensor of its own memory."""

    def move(self, tree: Tree, present: Any) -> Tree:
        """Return a plain value's tree with its tensors on the device of the value that it is to replace."""

    def copy_out(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Copy tensors into views of an arena; done on return."""

    def equal(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Return whether tensors hold the very bits of views of arenas, each of the same dtype and shape.

        Args:
            pairs: a tensor and a view each; those that come first are looked at first.
        """

    def tree(self, component: Component) -> Tree:
        """The component's state; its tensors may share the component's memory."""

    def fit(self, name: str, component: Component, tree: Tree) -> tuple[Tree, list[str]]:
        """Compare a stored tree with a component.

        Returns:
            The part of the tree that fits, and a line for each difference.
        """

    def copies_on_load(self, component: Component) -> bool:
        """Return whether `load` copies tensors; if not, it is handed tensors that the component may keep."""

    def load(self, component: Component, tree: Tree, *, keep: bool = False) -> None:
        """Load a tree that fits into a component.

        Args:
            component: what to load into.
            tree: what to load.
            keep: whether the component may keep the tree's tensors, even if it copies otherwise.
        """

    def unkept(self, component: Component) -> list[str]:
        """Names of a component's tensors that `tree` does not return: a recovery loses them."""

    def passes(self, component: Component) -> tuple[int, int]:
        """How many backward passes of an optimizer no step has had yet, of how many that a step has."""

    def forget_passes(self, component: Component) -> None:
        """Have an optimizer forget these."""

    def describe(self, component: Component) -> list[Entry]:
        """Return what ranks that train together must have in common of a component, in a fixed order."""

    def rank_local(self, component: Component) -> Collection[str]:
        """Names of the tensors of `tree` that each rank has its own of, such as running statistics."""

    def trained(self, component: Component) -> Mapping[str, Tensor]:
        """The trained tensors of `tree` by name, each once; of what is not a model, none."""

    def not_finite(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors that hold NaN or infinity."""

    def writer(self, folder: str, first: int) -> Writer:
        """Open a run of TensorBoard's.

        Args:
            folder: path or URL of the run; it may hold what earlier writers wrote.
            first: the first step to come; TensorBoard drops this step and later ones of earlier files.
        """

    def draw_seed(self) -> int:
        """A number below 2**63 from the global generator."""

    def seed(self, derive: Callable[[str], int]) -> None:
        """Seed every global generator with ``derive(its name)``, a number below 2**63."""

    def generators(self) -> Any:
        """The states of all global generators, as plain values and numpy arrays."""

    def set_generators(self, states: Any) -> None:
        """Set what `generators` gave; generators that this process lacks are left out."""

    def original(self, error: BaseException) -> BaseException | None:
        """Return the error of ours that this framework has made another error of, if any."""

    # The reports of steps that companions ask for, each at most once for a state.

    def report_steps(self, contents: Contents, observer: StepObserver) -> None:
        """Report each step of an optimizer, before it begins, to an instrument."""

    def report_times(self, contents: Contents, scalars: Scalars) -> None:
        """Report the time of each step, and the norm of its gradients."""

    def report_missing(self, contents: Contents, missing: Missing) -> None:
        """Report parameters that had no gradient at a step."""

    def report_gradients(self, contents: Contents, judge: Judge) -> None:
        """Report steps whose gradients are not finite, before they are applied."""


class StepObserver(Protocol):
    """An instrument that looks at each step."""

    def step_begins(self) -> None:
        """An optimizer is about to step."""


class HiddenAttribute(Protocol):
    """An attribute that an adapter adds to the user's, such as the state of Keras callbacks."""

    def tree(self) -> Tree | None:
        """Return the state to be part of a commit; None leaves it out."""

    def load(self, tree: Tree | None) -> None:
        """Take what a commit holds, or None if it holds nothing; what is used of its tensors is copied."""


class Writer(Protocol):
    """A run of TensorBoard's that is being written; files are written in the background."""

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Write scalars of one step by name, with the time in seconds since the Unix epoch."""

    def close(self) -> None:
        """Write all to the file and close it."""


@dataclass
class Past:
    """What this process has done since it started.

    Attributes:
        functions: how many training functions it has begun.
        finished: checkpoint roots whose training functions have returned.
    """

    functions: int = 0
    finished: set[str] = field(default_factory=set)


class World(Protocol):
    """The ranks of the job and the collectives that recovery needs.

    Attributes:
        past: what this process has done, in whichever state.
    """

    past: Past

    def rank(self) -> int:
        """This process's rank."""

    def size(self) -> int:
        """Number of ranks."""

    def init(self) -> None:
        """Rendezvous with the other ranks.

        Raises:
            RemovedError: this host is no longer part of the job.
            RendezvousError: a rank was lost meanwhile.
        """

    def shutdown(self) -> None:
        """Leave the other ranks."""

    def allow_stalls(self, seconds: int) -> None:
        """Have collectives fail for which a rank is missing for so long; 0 lets them wait for ever."""

    def lost(self, error: BaseException) -> bool:
        """Return whether an error came of a collective that failed because ranks were lost.

        Horovod's own ``HorovodInternalError`` is known to; this is about what a framework makes of it.
        """

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        """Everybody's values, as int64 of shape ``[size, len(values)]``."""

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        """Begin an `allgather`; what is returned waits for its outcome, or raises why there is none.

        A rank that was lost is noticed by waiting only: what is done meanwhile is not in vain.
        """

    def gather(self, mine: bytes, name: str) -> Sequence[Buffer]:
        """Everybody's bytes by rank, of any length each; in one collective."""

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer``, a uint8 array of the same length on all ranks, with the root's, in place."""
