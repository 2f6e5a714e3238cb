"""The virtual ranks of a job: which of them this process carries out, and how far their steps are.

A step of all virtual ranks:

1. `VirtualRanks.step_begins`: the adapter gets ready for the present shares.
2. For each virtual rank of this process, `part_begins` swaps its buffers in and seeds the random streams. The
   script computes. `part_ends` takes the gradients and the buffers.
3. `step_ends` adds up the gradients of all processes, and seeds the stream that all processes share.
4. The script applies the gradients. At the commit or the next step, `settle` counts the samples as done.

Virtual ranks are assigned at each rendezvous, and with ``shares="by-speed"`` also at a commit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, get_args

from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import ConfigError, HvdrecoverError, StepError
from hvdrecover.state.hooks import Hook, Moment, Table
from hvdrecover.state.random import Randomness, stream
from hvdrecover.state.rank_local import Carried, Ranks
from hvdrecover.state.startup import WatchedLibrary
from hvdrecover.virtual import shares
from hvdrecover.virtual.buffers import Buffers

if TYPE_CHECKING:
    from hvdrecover.data.order import SampleOrder
    from hvdrecover.guard.settings import Guard
    from hvdrecover.state.hooks import Context
    from hvdrecover.state.rank_local import PerRank, RankLocalState, Value

OURS = "hvdrecover"
"""The names of this package's collectives begin with this word."""

_latest: deque[VirtualRanks] = deque(maxlen=1)
_ENOUGH = 8  # measured parts
_REMEMBERED = 32  # times of the last parts
_HALF_LIFE = 600.0  # seconds; the time of a process without virtual ranks decays, so that it is tried again


class Gradients(Protocol):
    """The gradients that an adapter takes from virtual ranks and adds up, such as one optimizer's."""

    def begin(self, shares: shares.Counts, process: int) -> None:
        """Begin a step with these shares, on this process."""

    def part_begins(self, rank: int) -> None:
        """Begin the part of a virtual rank."""

    def part_ends(self) -> None:
        """Take the gradients of the virtual rank."""

    def finish(self) -> None:
        """Add up the gradients of all virtual ranks, on all processes."""

    def abandon(self) -> None:
        """Forget the step that is under way, if any."""


class VirtualRanks(Ranks, Hook):
    """The virtual ranks, as one process sees them.

    Attributes:
        size: number of virtual ranks.
        virtual: the same.
        counts: number of virtual ranks of each process.
        dealt: how often they were assigned.
        steps: number of steps that the run has done.
        current: the virtual rank that is being carried out; None between parts.

    Raises:
        ConfigError: an invalid number, or an unknown policy.
    """

    key = "virtual"

    def __init__(
        self, size: int, policy: shares.Policy | None, buffers: Buffers, gradients: Sequence[Gradients]
    ) -> None:
        policy = policy or "equal"
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError("virtual_ranks", f"must be an integer ≥ 1, got {size!r}")
        if policy not in get_args(shares.Policy):
            raise ConfigError(
                "shares", f"{policy!r} is not a way to deal virtual ranks out; use 'equal' or 'by-speed'"
            )
        self.size = self.virtual = size
        self.gradients = gradients
        self.counts: shares.Counts = (size,)
        self.dealt = 0
        self.steps = 0
        self.current: int | None = None
        self._policy = policy
        self._buffers = buffers
        self._open: object = None  # the step that is under way
        self._done: Callable[[], None] = nothing
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._seconds: float | None = None  # of a part
        self._measured = 0.0  # when

    # -- a place in a state; see `hvdrecover.state.rank_local.Ranks` -----------------------------------------

    def rng(self, asked: Randomness | None, default: Randomness) -> Randomness:
        """Return ``"reseed"``: random streams begin with each part."""
        if asked == "store":
            raise ConfigError("rng", "virtual ranks have random streams of their own; leave out rng='store'")
        return asked or "reseed"

    def join(self, context: Context, own: RankLocalState, guard: Guard | None) -> tuple[VirtualRanks, ...]:
        """Take a place in a state."""
        self._context = context
        self._own = own
        _latest.append(self)
        return (self,)

    def values(self) -> Mapping[str, Value]:
        """Return rank-local state besides the user's `PerRank`."""
        return {"_buffers": self._buffers} if any(True for _ in self._buffers.names()) else {}

    def split(self, value: PerRank) -> None:
        """Give each virtual rank its own value."""
        value.become_virtual(self.size, self.rank)

    def deal(self, order: SampleOrder) -> None:
        """Deal samples out to these ranks."""
        order.dealt_to = lambda: (self.carried.ranks, self.carried.size)

    def carried_by(self, rank: int, size: int) -> Carried:
        """Return the virtual ranks of a process, by its rank, whatever the number of processes is."""
        if not self._context.place.joined and not self.dealt:
            return Carried(tuple(range(self.size)), self.size)
        return Carried(tuple(shares.run_of(self.counts, rank)), self.size)

    def stream_of(self, rank: int) -> int:
        """Return a number that no virtual rank has: outside of parts, all processes share a random stream."""
        return self.size

    @property
    def carried(self) -> Carried:
        """The virtual ranks of this process."""
        world = self._context.world
        return self.carried_by(world.rank(), world.size())

    # -- steps -----------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the virtual rank that is being carried out."""
        if self.current is None:
            raise StepError(
                "virtual_rank", "no virtual rank is being carried out; call it in a step's inner loop"
            )
        return self.current

    def offer(self, step: object) -> None:
        """Note that the script is given a step; the last one must have ended."""
        self.refuse_open("the next step was asked for")
        self._open = step

    def withdraw(self, step: object) -> None:
        """Forget a step that the script left before it began."""
        if self._open is step:
            self._open = None

    def step_begins(self, step: object) -> None:
        """Begin a step, in its loop or after it."""
        self._open = step
        self._buffers.absorb()
        for each in self.gradients:
            each.begin(self.counts, self._context.world.rank())

    def part_begins(self, rank: int) -> None:
        """Begin the part of a virtual rank with its buffers and its random streams."""
        self._buffers.swap_in(rank)
        for each in self.gradients:
            each.part_begins(rank)
        self.current = rank
        self._context.framework.seed(self.seeds(self.steps, rank))

    def part_ends(self, rank: int, seconds: float) -> None:
        """End the part of a virtual rank, after this time."""
        self.current = None
        if self._open is None:
            raise StepError(
                "state.restore()", "called in a step's inner loop. Leave the loops over steps first"
            )
        for each in self.gradients:
            each.part_ends()
        self._buffers.swap_out(rank)
        self._times.append(seconds)

    def step_ends(self, done: Callable[[], None]) -> None:
        """Add up the gradients: all parts of this process have ended.

        ``done`` counts the step's samples as done; it is called once the script has applied the gradients.
        """
        for each in self.gradients:
            each.finish()
        self._context.framework.seed(self.seeds(self.steps, self.size))
        self.steps += 1
        self._open = None
        self._done = done

    def settle(self) -> None:
        """Count the last step as done: a commit is made, or the next step asked for."""
        done, self._done = self._done, nothing
        done()

    def seeds(self, step: int, rank: int) -> Callable[[str], int]:
        """Return the seeds for a part's computation; see `randomness.stream`."""
        return stream(self._own.random.seed, f"step {step}", rank)

    def sample_seeds(self, step: int, rank: int) -> Callable[[str], int]:
        """Return the seeds for a part's samples. They differ, so dropout and augmentation are independent."""
        return stream(self._own.random.seed, f"samples {step}", rank)

    def any_has_more(self, mine: bool) -> bool:
        """Return whether there is data for another step; a process without virtual ranks asks the others."""
        if 0 not in self.counts:
            return mine
        return bool(self._context.world.allgather([mine], "hvdrecover.steps.more").any())

    def refuse_open(self, what: str) -> None:
        """Raise a StepError if a step is under way."""
        if self._open is not None:
            raise StepError(
                "state.steps()",
                f"{what} before the parts of step {self.steps} had ended; have its inner loop run to its end "
                "first, without a break",
            )

    # -- a part of each commit -------------------------------------------------------------------------------

    def capture(self) -> Json:
        """Return the number of virtual ranks, and of steps that are done."""
        return {"size": self.size, "steps": self.steps}

    def load(self, value: Json | None) -> None:
        """Go to the step of a commit, and forget the step that was under way."""
        found = value if isinstance(value, dict) else {}
        if (size := found.get("size", self.size)) != self.size:
            raise ConfigError(
                "virtual_ranks",
                f"the commit has {size}, and this state {self.size}. Their number is part of the result: "
                f"make the state with virtual_ranks={size}, or name another checkpoint root to start over",
            )
        self.steps = int(found.get("steps", 0))
        self._open, self.current, self._done = None, None, nothing
        for each in self.gradients:
            each.abandon()

    # -- votes -----------------------------------------------------------------------------------------------

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        """Refuse a commit in the middle of a step."""
        self.refuse_open("a commit was made")
        self.settle()
        return None

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send the time of a part in microseconds (0: unknown), and the digest of absorbed changes."""
        if moment.kind != "rendezvous" and not moment.returned:
            self.refuse_open("hosts were looked for")
        if moment.kind == "commit":
            self._measure()
        return [0 if self._seconds is None else max(1, round(self._seconds * 1e6)), self._buffers.absorbed]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Assign the virtual ranks: at each rendezvous, and at a commit if that makes steps faster."""
        seconds = [int(each) / 1e6 or None for each in table[:, 0]]
        if moment.kind == "rendezvous":
            known = self._policy == "by-speed"
            counts = shares.by_speed(self.size, seconds) if known else shares.equal(self.size, len(seconds))
            self._deal(counts, seconds)
        elif moment.kind == "commit" and (table[:, 1] != table[0, 1]).any():
            return StepError(
                "buffers",
                "they were changed outside of parts, to different values on different processes, for example "
                "by an average of models that includes buffers. Before the commit, each process has the "
                "buffers of another virtual rank. Change them after state.commit(), which gives all "
                "processes the buffers of virtual rank 0",
            )
        elif moment.kind == "commit" and self._policy == "by-speed":
            counts = shares.reconsider(self.counts, seconds)
            if counts != self.counts:
                self._deal(counts, seconds)
                self._own.move(self.carried)
                self._context.contents.place(self._context.world.rank(), self._context.world.size())
        return None

    def _deal(self, counts: shares.Counts, seconds: shares.Seconds) -> None:
        before, self.counts = self.counts, counts
        self.dealt += 1
        self._times.clear()
        if counts != before or self.dealt == 1:
            message = shares.in_words(counts)
            facts: dict[str, Any] = {"virtual": self.size, "counts": list(counts), "seconds": list(seconds)}
            self._context.announce("shares", message, **facts)

    def _measure(self) -> None:
        """Bring the time of a part up to date."""
        now = self._context.clock.monotonic()
        if len(self._times) >= _ENOUGH:
            self._seconds = statistics.median(self._times)
        elif self._seconds is not None and not self.carried.ranks:
            self._seconds *= 0.5 ** ((now - self._measured) / _HALF_LIFE)
        self._measured = now


def virtual_of(ranks: Ranks) -> VirtualRanks:
    """Return a state's ranks as virtual ranks; a ConfigError if it has none."""
    if not isinstance(ranks, VirtualRanks):
        raise ConfigError("state.steps()", "the state has no virtual ranks; make it with virtual_ranks=")
    return ranks


def virtual_size() -> int:
    """Number of virtual ranks, where a script without them has ``hvd.size()``.

    Raises:
        StepError: no state with virtual ranks has been made yet.

    Examples:
        >>> state = recover.TorchState(epoch=0, virtual_ranks=4)
        >>> recover.virtual_size()
        4
    """
    return _of_latest_state().size


def virtual_rank() -> int:
    """The virtual rank whose batch is being processed. Use it where other scripts use ``hvd.rank()``.

    Raises:
        StepError: called outside of a step's inner loop; or no state with virtual ranks has been made yet.

    Examples:
        >>> for step in state.steps(loader):  # doctest: +SKIP
        ...     for images, labels in step:
        ...         print(recover.virtual_rank())  # 0, 1, … of recover.virtual_size()
    """
    return _of_latest_state().rank()


def _of_latest_state() -> VirtualRanks:
    if not _latest:
        raise StepError("virtual ranks", "no state with virtual_ranks= has been made yet")
    return _latest[0]


# -- collectives in a part are refused -----------------------------------------------------------------------


def are_carried_out() -> bool:
    """Return whether the part of a virtual rank is under way."""
    return bool(_latest) and _latest[0].current is not None


def refuse(call: str) -> None:
    """Refuse a collective, such as ``allreduce``, in the part of a virtual rank."""
    if are_carried_out():
        raise StepError(
            f"hvd.{call}()",
            "called in a step's inner loop, in the part of a virtual rank. Processes carry out different "
            "numbers of parts, so their collectives would not match. Collect values in the inner loop, and "
            "call the collective after the loop. Gradients need no collective: they are averaged "
            "anyway",
        )


def averages(layer: str, kind: str, instead: str, others: str) -> ConfigError:
    """Return the error for a layer that averages its statistics: its sum has as many parts as processes."""
    return ConfigError(
        layer,
        f"{kind} averages over processes, so the result would depend on their number. Use {instead}, of "
        "which each virtual rank has its own statistics, or a norm without batch statistics, such as "
        f"{others}",
    )


class Watched(WatchedLibrary):
    """The watch of virtual ranks. It stays in place when another watch ends."""


def watch(
    mpi_ops: ModuleType, library: str, look: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Watch the library of a framework's collectives; called for each state, to an effect once."""
    present = getattr(mpi_ops, library)
    if not isinstance(present, Watched):
        setattr(mpi_ops, library, Watched(present, look))


def nothing() -> None:
    """Do nothing when a step is done."""
