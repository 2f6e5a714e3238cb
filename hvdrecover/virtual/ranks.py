"""The virtual ranks of a job: their assignment to processes, and their part in commits.

They are assigned at each rendezvous, and with ``shares="by-speed"`` also at a commit. A process carries out
neighbouring ones: process 0 the first ones, and so on. Their steps are in `hvdrecover.virtual.steps`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import ConfigError, HvdrecoverError, StepError
from hvdrecover.state.hooks import Hook, Moment, Table
from hvdrecover.state.horovod import WatchedLibrary
from hvdrecover.state.rank_local import Carried, Randomness, Ranks, stream

if TYPE_CHECKING:
    from hvdrecover.data.order import SampleOrder
    from hvdrecover.state.hooks import Context
    from hvdrecover.state.rank_local import PerRank, RankLocalState, Value
    from hvdrecover.virtual.steps import Buffers

OURS = "hvdrecover"
"""The names of this package's collectives begin with this word."""

Policy = Literal["equal", "by-speed"]
Counts = tuple[int, ...]
"""Number of virtual ranks by process."""
Seconds = Sequence[float | None]
"""Time of one virtual rank's part by process; None if it was not measured."""

_latest: deque[VirtualRanks] = deque(maxlen=1)
_GAIN = 0.1  # minimum relative speed-up of a step before virtual ranks are reassigned
_ENOUGH = 8  # measured parts
_REMEMBERED = 32  # times of the last parts


class Gradients(Protocol):
    """The gradients that an adapter takes from virtual ranks and adds up, such as one optimizer's."""

    def begin(self) -> None:
        """Begin a step, and forget one that was not finished."""

    def part_ends(self, rank: int) -> None:
        """Take the gradients of a virtual rank whose part has ended."""

    def finish(self, counts: Counts, process: int) -> None:
        """Add up the gradients of all virtual ranks, on all processes; this is one of them."""

    def abandon(self) -> None:
        """Forget the step that is under way, if any."""


class VirtualRanks(Ranks, Hook):
    """The virtual ranks, as one process sees them."""

    key = "virtual"
    context: Context

    def __init__(
        self, size: int, policy: Policy | None, buffers: Buffers, gradients: Sequence[Gradients]
    ) -> None:
        policy = policy or "equal"
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError("virtual_ranks", f"must be an integer ≥ 1, got {size!r}")
        if policy not in get_args(Policy):
            raise ConfigError(
                "shares", f"{policy!r} is not a way to deal virtual ranks out; use 'equal' or 'by-speed'"
            )
        self.size = self.virtual = size
        self.buffers = buffers
        self.gradients = gradients
        self.counts: Counts = (size,)  # number of virtual ranks of each process
        self.dealt = 0  # how often they were assigned
        self.steps = 0  # that the run has done
        self.open: object = None  # the step that is under way
        self.done: Callable[[], None] | None = None  # counts the last step's samples as done
        self.current: int | None = None  # the virtual rank that is being carried out
        self.times: deque[float] = deque(maxlen=_REMEMBERED)  # seconds of this process's last parts
        self._policy = policy
        self._seconds: float | None = None  # of a part

    # -- a place in a state; see `hvdrecover.state.rank_local.Ranks` -----------------------------------------

    def rng(self, asked: Randomness | None, default: Randomness) -> Randomness:
        if asked == "store":
            raise ConfigError("rng", "virtual ranks have random streams of their own; leave out rng='store'")
        return asked or "reseed"

    def join(self, context: Context, own: RankLocalState, guard: object) -> tuple[VirtualRanks, ...]:
        self.context = context
        self._own = own
        _latest.append(self)
        return (self,)

    def values(self) -> Mapping[str, Value]:
        return {"_buffers": self.buffers} if any(True for _ in self.buffers.names()) else {}

    def split(self, value: PerRank) -> None:
        value.become_virtual(self.size, self.rank)

    def deal(self, order: SampleOrder) -> None:
        order.dealt_to = lambda: (self.carried.ranks, self.carried.size)

    def carried_by(self, rank: int, size: int) -> Carried:
        if not self.context.place.joined and not self.dealt:
            return Carried(tuple(range(self.size)), self.size)
        return Carried(tuple(run_of(self.counts, rank)), self.size)

    @property
    def carried(self) -> Carried:
        world = self.context.world
        return self.carried_by(world.rank(), world.size())

    # -- steps; see `hvdrecover.virtual.steps` ---------------------------------------------------------------

    def rank(self) -> int:
        if self.current is None:
            problem = "no virtual rank is being carried out; call it in a step's inner loop"
            raise StepError("virtual_rank", problem)
        return self.current

    def settle(self) -> None:
        """Count the last step as done: a commit is made, or the next step asked for."""
        done, self.done = self.done, None
        if done is not None:
            done()

    def seed(self, rank: int) -> None:
        """Seed the random streams for a part's computation."""
        self.context.framework.seed(stream(self._own.seed, f"step {self.steps}", rank))

    def sample_seeds(self, step: int, rank: int) -> Callable[[str], int]:
        """Return the seeds for a part's samples. They differ, so dropout and augmentation are independent."""
        return stream(self._own.seed, f"samples {step}", rank)

    def any_has_more(self, mine: bool) -> bool:
        """Return whether there is data for another step; a process without virtual ranks asks the others."""
        if 0 not in self.counts:
            return mine
        return bool(self.context.world.allgather([mine], "hvdrecover.steps.more").any())

    def refuse_open(self, what: str) -> None:
        """Raise a StepError if a step is under way."""
        if self.open is not None:
            raise StepError(
                "state.steps()",
                f"{what} before the parts of step {self.steps} had ended; have its inner loop run to its end "
                "first, without a break",
            )

    # -- commits and rendezvous ------------------------------------------------------------------------------

    def capture(self) -> Json:
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
        self.open = self.current = self.done = None
        for each in self.gradients:
            each.abandon()

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        self.refuse_open("a commit was made")
        self.settle()
        return None

    def numbers(self, moment: Moment) -> Sequence[int]:
        if moment.kind != "rendezvous" and not moment.returned:
            self.refuse_open("hosts were looked for")
        if moment.kind == "commit" and len(self.times) >= _ENOUGH:
            self._seconds = statistics.median(self.times)
        # Microseconds of a part; 0 if unknown.
        return [0 if self._seconds is None else max(1, round(self._seconds * 1e6))]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Assign the virtual ranks: at each rendezvous, and at a commit if that makes steps faster."""
        seconds = [int(each) / 1e6 or None for each in table[:, 0]]
        if moment.kind == "rendezvous":
            known = self._policy == "by-speed"
            counts = by_speed(self.size, seconds) if known else equal(self.size, len(seconds))
            self._deal(counts, seconds)
        elif moment.kind == "commit" and self._policy == "by-speed":
            counts = reconsider(self.counts, seconds)
            if counts != self.counts:
                self._deal(counts, seconds)
                self._own.move(self.carried)
                self.context.contents.place(self.context.world.rank(), self.context.world.size())
        return None

    def _deal(self, counts: Counts, seconds: Seconds) -> None:
        before, self.counts = self.counts, counts
        self.dealt += 1
        self.times.clear()
        if counts != before or self.dealt == 1:
            processes = f"{len(counts)} process{'es' if len(counts) > 1 else ''}"
            spare = f", {counts.count(0)} of them spare" if 0 in counts else ""
            each = (
                " + ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)} each"
            )
            message = f"{self.size} virtual ranks on {processes}{spare}: {each}"
            facts: dict[str, Any] = {"virtual": self.size, "counts": list(counts), "seconds": list(seconds)}
            self.context.announce("shares", message, **facts)


# -- shares: pure decisions, which all processes take alike --------------------------------------------------


def equal(size: int, processes: int) -> Counts:
    """Return equal shares; the first processes have one more if the division leaves a remainder."""
    return tuple(size // processes + (process < size % processes) for process in range(processes))


def by_speed(size: int, seconds: Seconds) -> Counts:
    """Return the shares with which a step takes the least time, for parts of equal work."""
    known = [each for each in seconds if each is not None]
    mean = statistics.fmean(known or [1.0])
    times = [mean if each is None else each for each in seconds]
    counts = [0] * len(times)
    # Each virtual rank goes to the process that would be done with it first.
    for _ in range(size):
        ends = [(count + 1) * time for count, time in zip(counts, times, strict=True)]
        counts[ends.index(min(ends))] += 1
    return tuple(counts)


def reconsider(present: Counts, seconds: Seconds) -> Counts:
    """Return the shares to continue with: the present ones, unless others save a tenth of a step."""
    if any(each is None and count for count, each in zip(present, seconds, strict=True)):
        return present
    better = by_speed(sum(present), seconds)
    return better if step_time(better, seconds) < (1 - _GAIN) * step_time(present, seconds) else present


def step_time(counts: Counts, seconds: Seconds) -> float:
    """Return the seconds of a step: the slowest process sets them."""
    return max(count * (each or 0.0) for count, each in zip(counts, seconds, strict=True))


def run_of(counts: Counts, process: int) -> range:
    """Return the virtual ranks of a process; none if it joined after they were assigned."""
    return range(sum(counts[:process]), sum(counts[: process + 1]))


# -- for adapters and scripts --------------------------------------------------------------------------------


def virtual_of(ranks: Ranks) -> VirtualRanks:
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
    return bool(_latest) and _latest[0].current is not None


def refuse(call: str) -> None:
    if are_carried_out():
        raise StepError(
            f"hvd.{call}()",
            "called in a step's inner loop, in the part of a virtual rank. Processes carry out different "
            "numbers of parts, so their collectives would not match. Collect values in the inner loop, and "
            "call the collective after the loop. Gradients need no collective: they are averaged anyway. If "
            "a layer calls it to average batch statistics, use BatchNorm, of which each virtual rank has its "
            "own statistics, or a norm without batch statistics, such as GroupNorm",
        )


class Watched(WatchedLibrary):
    """The watch of virtual ranks. It stays in place when another watch ends."""


def watch(
    mpi_ops: ModuleType, library: str, look: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Watch the library of a framework's collectives; called for each state."""
    present = getattr(mpi_ops, library)
    if not isinstance(present, Watched):
        setattr(mpi_ops, library, Watched(present, look))
