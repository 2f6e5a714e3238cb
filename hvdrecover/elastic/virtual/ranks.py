"""The virtual ranks of a job: which of them this process carries out, and how far their steps are."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, get_args

from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.attributes import nothing
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.commits.randomness import Randomness, stream
from hvdrecover.elastic.companions import Kept, Moment, Table, Voter
from hvdrecover.elastic.ranks import Ranks
from hvdrecover.elastic.virtual import shares
from hvdrecover.elastic.virtual.replay import Replay
from hvdrecover.errors import ConfigError, HvdrecoverError, StepError

if TYPE_CHECKING:
    from hvdrecover.data.order import SampleOrder
    from hvdrecover.elastic.commits.own import Own, Value
    from hvdrecover.elastic.commits.per_rank import PerRank
    from hvdrecover.elastic.context import Context
    from hvdrecover.elastic.guard.settings import Guard

_latest: deque[VirtualRanks] = deque(maxlen=1)
_ENOUGH = 8  # measured parts
_REMEMBERED = 32  # of the last parts' times
_HALF_LIFE = 600.0  # seconds; of the time of a process that has nothing to do, so that it is tried again


class Carrier(Protocol):
    """The framework's side of carrying virtual ranks out, one after the other.

    Attributes:
        values: what each virtual rank has of its own besides the user's `PerRank`, by a name that begins
            with an underscore.
    """

    values: Mapping[str, Value]

    @property
    def absorbed(self) -> int:
        """A digest of the script's changes outside of parts; it must be the same on all processes."""

    def begin(self, counts: shares.Counts, process: int) -> None:
        """A step begins, with these shares."""

    def part_begins(self, rank: int) -> None:
        """The part of a virtual rank begins."""

    def part_ends(self, rank: int) -> None:
        """The part of a virtual rank has ended: its gradients are there."""

    def finish(self) -> None:
        """Sum the gradients of all virtual ranks, on all processes."""

    def abandon(self) -> None:
        """Forget the step that is under way, if any."""


class VirtualRanks(Ranks, Kept, Voter):
    """The virtual ranks, as one process sees them.

    Args:
        size: how many there are.
        policy: how they are dealt out.
        carrier: what the framework does.

    Attributes:
        size: how many there are.
        virtual: the same.
        counts: how many each process carries out.
        dealt: how often they were dealt out.
        steps: how many steps the run has done.
        current: the one that is being carried out; None between parts.
        carrier: what the framework does.
        replay: has parts computed by a second process; None if nobody wants that.
        replaying: whether the current one is carried out for comparison only.

    Raises:
        ConfigError: there is no such number, or no such policy.
    """

    key = "virtual"

    def __init__(self, size: int, policy: shares.Policy | None, carrier: Carrier) -> None:
        policy = policy or "equal"
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError("virtual_ranks", f"{size!r} is not a number of virtual ranks; use 1 or more")
        if policy not in get_args(shares.Policy):
            raise ConfigError(
                "shares", f"{policy!r} is not a way to deal virtual ranks out; use 'equal' or 'by-speed'"
            )
        self.size = self.virtual = size
        self.carrier = carrier
        self.counts: shares.Counts = (size,)
        self.dealt = 0
        self.steps = 0
        self.current: int | None = None
        self.replay: Replay | None = None
        self.replaying = False
        self._policy = policy
        self._open: object = None
        self._done: Callable[[], None] = nothing
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._seconds: float | None = None
        self._measured = 0.0  # when

    # -- a place in a state ------------------------------------------------------------------------------

    def rng(self, asked: Randomness | None, default: Randomness) -> Randomness:
        """Return ``"reseed"``: each virtual rank's streams begin with each of its parts."""
        if asked == "store":
            raise ConfigError("rng", "virtual ranks have random streams of their own; leave out rng='store'")
        return asked or "reseed"

    def join(self, context: Context, own: Own, guard: Guard | None) -> tuple[VirtualRanks, ...]:
        """Take a place in a state; called once. Return the companions that come with these ranks."""
        self._context = context
        self._own = own
        if guard is not None and guard.replay:
            self.replay = Replay(guard, context, own, self)
        _latest.append(self)
        return (self,)

    def values(self) -> Mapping[str, Value]:
        """Return what the framework has each virtual rank have of its own."""
        return self.carrier.values

    def split(self, value: PerRank) -> None:
        """Let a value be that of the virtual rank that is being carried out."""
        value.become_virtual(self.size, self.rank)

    def deal(self, order: SampleOrder) -> None:
        """Let the samples of an order be dealt out to these ranks."""
        order.dealt_to = lambda: (self.carried.ranks, self.carried.size)

    def carried_by(self, rank: int, size: int) -> Carried:
        """Return those that a process carries out, by its rank, whatever the number of processes is."""
        if not self._context.place.joined and not self.dealt:
            return Carried(tuple(range(self.size)), self.size)
        return Carried(tuple(shares.run_of(self.counts, rank)), self.size)

    def stream_of(self, rank: int) -> int:
        """Return a number that no virtual rank has: all processes have one stream in common."""
        return self.size

    def virtual_ranks(self) -> VirtualRanks:
        """Return these."""
        return self

    @property
    def carried(self) -> Carried:
        """Those that this process carries out."""
        world = self._context.world
        return self.carried_by(world.rank(), world.size())

    # -- steps -----------------------------------------------------------------------------------------

    def rank(self) -> int:
        """The virtual rank that is being carried out.

        Raises:
            StepError: none is.
        """
        if self.current is None:
            raise StepError(
                "virtual_rank", "no virtual rank is being carried out; call it in a step's inner loop"
            )
        return self.current

    def offer(self, step: object) -> None:
        """A step is given to the script.

        Raises:
            StepError: the last one has not ended.
        """
        self.refuse_open("the next step was asked for")
        self._open = step

    def withdraw(self, step: object) -> None:
        """The script has left a step that it had not begun."""
        if self._open is step:
            self._open = None

    def step_begins(self, step: object) -> None:
        """A step begins, in its loop or after it."""
        self._open = step
        self.carrier.begin(self.counts, self._context.world.rank())

    def part_begins(self, rank: int) -> None:
        """The part of a virtual rank begins: its buffers, its random streams."""
        self.carrier.part_begins(rank)
        self.current = rank
        self._context.framework.seed(self.seeds(self.steps, rank))

    def part_ends(self, rank: int, seconds: float) -> None:
        """The part of a virtual rank has ended, after this time.

        Raises:
            StepError: the state has gone to another step meanwhile.
        """
        self.current = None
        if self._open is None:
            raise StepError(
                "state.restore()", "called in a step's inner loop. Leave the loops over steps first"
            )
        self.carrier.part_ends(rank)
        self._times.append(seconds)

    def step_ends(self, done: Callable[[], None]) -> None:
        """All parts of this process have ended: sum the gradients of all.

        Args:
            done: notes that the step's samples are done; called once the script has applied the gradients.
        """
        self.carrier.finish()
        self._context.framework.seed(self.seeds(self.steps, self.size))
        self.steps += 1
        self._open = None
        self._done = done

    def settle(self) -> None:
        """The gradients of the last step are applied: a commit is made, or the next step asked for."""
        done, self._done = self._done, nothing
        done()

    def seeds(self, step: int, rank: int) -> Callable[[str], int]:
        """Return the seeds of a virtual rank's generators in a step; see `randomness.stream`."""
        return stream(self._own.random.seed, f"step {step}", rank)

    def sample_seeds(self, step: int, rank: int) -> Callable[[str], int]:
        """Return those for its samples of a step, which must not have the very numbers that its part has."""
        return stream(self._own.random.seed, f"samples {step}", rank)

    def any_has_more(self, mine: bool) -> bool:
        """Return whether there is data for another step; spares, which have none, ask the others."""
        if 0 not in self.counts:
            return mine
        return bool(self._context.world.allgather([mine], "hvdrecover.steps.more").any())

    def refuse_open(self, what: str) -> None:
        """Refuse what must not be done within a step.

        Raises:
            StepError: a step is under way.
        """
        if self._open is not None:
            raise StepError(
                "state.steps()",
                f"{what} before the parts of step {self.steps} had ended; have its inner loop run to its end "
                "first, without a break",
            )

    # -- a part of each commit ----------------------------------------------------------------------------

    def capture(self) -> Json:
        """Return the number of virtual ranks, and of steps that are done."""
        return {"size": self.size, "steps": self.steps}

    def load(self, value: Json | None) -> None:
        """Go to the step of a commit; what was under way is over.

        Raises:
            ConfigError: the commit is of another number of virtual ranks.
        """
        found = value if isinstance(value, dict) else {}
        if (size := found.get("size", self.size)) != self.size:
            raise ConfigError(
                "virtual_ranks",
                f"the commit has {size}, and this state {self.size}. Their number is part of the result: "
                f"make the state with virtual_ranks={size}, or name another checkpoint root to start anew",
            )
        self.steps = int(found.get("steps", 0))
        self._open, self.current, self._done = None, None, nothing
        self.replaying = False
        self.carrier.abandon()

    # -- dealing -----------------------------------------------------------------------------------------

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        """Have no objection, but to a commit in the middle of a step.

        Raises:
            StepError: a step is under way.
        """
        self.refuse_open("a commit was made")
        self.settle()
        return None

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send the time of a part in microseconds, 0 if it is unknown; and what was absorbed."""
        if moment.kind != "rendezvous" and not moment.returned:
            self.refuse_open("hosts were looked for")
        if moment.kind == "commit":
            self._measure()
        return [0 if self._seconds is None else max(1, round(self._seconds * 1e6)), self.carrier.absorbed]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Assign the virtual ranks: at each rendezvous, and at a commit if that makes steps faster.

        Returns:
            An error if processes have changed buffers outside of parts, and not to the same.
        """
        seconds = [int(each) / 1e6 or None for each in table[:, 0]]
        if moment.kind == "rendezvous":
            if self.replay is not None:
                self.replay.anew()
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

    def _deal(self, counts: shares.Counts, seconds: Sequence[float | None]) -> None:
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


def are_carried_out() -> bool:
    """Return whether a virtual rank is being carried out, in the inner loop of a step."""
    return bool(_latest) and _latest[0].current is not None


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
    """The virtual rank that is being carried out, where a script without them has ``hvd.rank()``.

    Raises:
        StepError: none is, as outside of a step's inner loop; or there is no state with virtual ranks.

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
