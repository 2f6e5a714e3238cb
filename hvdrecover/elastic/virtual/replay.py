"""Replays: a second process computes a part of some steps, and gradients are compared to the last bit.

Each process is checked by the last of its virtual ranks: up to there its sums go their way as in any step.
It sends the others what that part is computed from, and holds the gradients back until all agree on them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hvdrecover import heartbeat
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.guard.distance import apart
from hvdrecover.elastic.guard.parameters import PIECE, Difference, listed
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.guard.votes import named
from hvdrecover.elastic.virtual.plans import Digests, Finding, Plan, Run, judged, plan
from hvdrecover.errors import ConfigError, DivergedError

if TYPE_CHECKING:
    from hvdrecover.elastic.commits.own import Own
    from hvdrecover.elastic.context import Context
    from hvdrecover.elastic.virtual.ranks import VirtualRanks

_SENT, _REFUSED = b"+", b"-"


# -- what a framework does ----------------------------------------------------------------------------------


class Leaves(Protocol):
    """The gradients that one computation has come to."""

    def bytes_of(self, place: int) -> Bytes | None:
        """Return one's bytes; None if there is none."""

    def put(self, place: int, data: Bytes | None) -> None:
        """Have other bytes in the place of one's."""


@runtime_checkable
class Replaying(Protocol):
    """A `Carrier` that can replay."""

    def gradients(self) -> list[TensorSpec]:
        """Return the gradients of a part, in an order that is the same on all processes."""

    def hold(self, rank: int) -> None:
        """In this step, keep the gradients of a virtual rank, the last of this process, until `release`."""

    def held(self) -> Leaves:
        """Return them, when that part has ended."""

    def release(self) -> None:
        """Let them take their way."""

    def replay_begins(self) -> None:
        """A part begins whose gradients are only looked at."""

    def replay_ends(self) -> Leaves:
        """The part has ended."""

    def packed(self, value: Any) -> bytes:
        """Return a batch, or whatever else a part is computed from, as bytes for other processes."""

    def unpacked(self, data: bytes) -> Any:
        """Return what was packed."""


# -- a process's side ---------------------------------------------------------------------------------------


class Replay:
    """The replays of one process.

    Args:
        guard: what the user has decided.
        context: the state's surroundings.
        own: the states of virtual ranks.
        ranks: the virtual ranks.

    Raises:
        ConfigError: this framework can't replay.
    """

    def __init__(self, guard: Guard, context: Context, own: Own, ranks: VirtualRanks) -> None:
        if not isinstance(ranks.carrier, Replaying):
            raise ConfigError(
                "replay", f"{context.framework.name} can't replay parts; leave out Guard(replay=…)"
            )
        self.carrier: Replaying = ranks.carrier
        self.guard = guard
        self.context = context
        self.own = own
        self.ranks = ranks
        self.is_on = True
        self._calibrated = False

    def anew(self) -> None:
        """There may be other processes now."""
        self.is_on, self._calibrated = True, False

    def begin(self, fetch: Callable[[int], Any]) -> Replayed | None:
        """A step has begun; return its replay, if it has one.

        Args:
            fetch: returns the batch of a virtual rank of this process; called in their order.
        """
        if not self.is_on:
            return None
        ranks, world = self.ranks, self.context.world
        found = plan(
            self.own.random.seed,
            ranks.steps,
            ranks.counts,
            self.guard.replay,
            calibrate=not self._calibrated,
        )
        if found is None:
            return None
        self._calibrated = True
        if world.rank() != found.owner:
            batches, mine = {}, b""
        else:
            batches = {rank: fetch(rank) for rank in ranks.carried.ranks}
            mine = self._packed(batches[found.rank], found.rank)
        inputs = bytes(world.gather(mine, "hvdrecover.replay.inputs")[found.owner])
        sent, inputs = inputs[:1] == _SENT, inputs[1:]
        if not sent:
            self.turn_off(inputs.decode())
        elif batches:
            self.carrier.hold(found.rank)
            batches[found.rank] = self.carrier.unpacked(inputs)[0]  # in memory as the others have it
        return Replayed(
            self, found if sent else None, inputs, lambda rank: batches.pop(rank) if batches else fetch(rank)
        )

    def turn_off(self, reason: str) -> None:
        """Replay no more until there are other processes."""
        self.is_on = False
        self.say("off", f"Guard(replay=…) is off: {reason}", reason=reason)

    def say(self, action: str, message: str, **facts: Any) -> None:
        """Emit an event, and a line on rank 0."""
        self.context.announce("replay", message, level=logging.WARNING, action=action, **facts)

    def _packed(self, batch: Any, rank: int) -> bytes:
        """The inputs of a virtual rank's part; or the reason why they can't be sent."""
        try:
            return _SENT + self.carrier.packed((batch, self.own.share_of(rank)))
        except Exception as error:  # each kind of batch has its own
            return _REFUSED + f"batches can't be sent to other processes: {error!r}".encode()


class Replayed:
    """A step with a replay, as one process goes through it.

    Args:
        replay: all that steps have in common.
        plan: who computes what; None if it was turned off.
        inputs: of the part.
        fetch: returns the batch of a virtual rank of this process; called in their order.

    Attributes:
        error: what is to be raised before the step is applied, when all gradients are summed up.
    """

    def __init__(self, replay: Replay, plan: Plan | None, inputs: bytes, fetch: Callable[[int], Any]) -> None:
        self.fetch = fetch
        self._replay = replay
        self._plan = plan
        self._inputs = inputs
        self._world = replay.context.world
        self._me = self._world.rank()
        self._again: list[Leaves] = []  # what this process has computed besides its own parts
        self.error: DivergedError | None = None

    def before(self) -> Iterator[Any]:
        """Go through the part, on those that compute it, too; before this process's own parts."""
        if self._plan is not None and self._me in self._plan.others:
            yield from self._compute()

    def after(self) -> Iterator[Any]:
        """Compare, after all own parts; compute once more what was not alike; then let gradients go."""
        plan = self._plan
        if plan is None:
            return
        finding = judged(self._runs(plan), calibrates=plan.calibrates)
        if finding is not None:
            if self._me in plan.judges:
                yield from self._compute()
            finding = judged(self._runs(plan), calibrates=plan.calibrates)
            assert finding is not None
            self._unlike(plan, finding) if finding.unlike else self._found(plan, finding)
        if self._me == plan.owner:
            self._replay.carrier.release()

    def _compute(self) -> Iterator[Any]:
        """Go through the part as its owner does, leaving no trace but its gradients."""
        assert self._plan is not None
        replay, rank = self._replay, self._plan.rank
        ranks, carrier = replay.ranks, replay.carrier
        batch, states = carrier.unpacked(self._inputs)
        undo = replay.own.stand_in(rank, states)
        ranks.current, ranks.replaying = rank, True
        carrier.replay_begins()
        replay.context.framework.seed(ranks.seeds(ranks.steps, rank))
        try:
            yield batch
        finally:  # also if the script leaves
            ranks.current, ranks.replaying = None, False
            undo()
        self._again.append(carrier.replay_ends())

    # -- comparison ----------------------------------------------------------------------------------------

    @property
    def _mine(self) -> list[Leaves]:
        assert self._plan is not None
        return [*([self._replay.carrier.held()] if self._me == self._plan.owner else []), *self._again]

    def _runs(self, plan: Plan) -> list[Run]:
        """All computations so far, the owner's first."""
        count = len(self._replay.carrier.gradients())
        digests = [
            [None if (data := leaves.bytes_of(place)) is None else digest(data) for place in range(count)]
            for leaves in self._mine
        ]
        rows = gather_json(self._world, digests, "hvdrecover.replay.digests")
        runs = [
            Run(process, number, tuple(each))
            for process, row in enumerate(rows)
            for number, each in enumerate(row)
        ]
        return sorted(runs, key=lambda run: run.process != plan.owner)

    def _unlike(self, plan: Plan, finding: Finding) -> None:
        """Processes compute differently without a fault: say so, and look no more."""
        parties: dict[Digests, set[int]] = {}
        for run in (*finding.right, *finding.wrong):
            parties.setdefault(run.digests, set()).add(run.process)
        what = f"virtual rank {plan.rank}, step {self._step}"
        self._replay.turn_off(
            f"processes compute different gradients from the same inputs ({what}), and by no single fault: "
            f"{' / '.join(named(sorted(each)) for each in parties.values())}. Their processors or libraries "
            "are of different kinds, or what runs on them is not deterministic"
        )

    def _found(self, plan: Plan, finding: Finding) -> None:
        """Some computation was wrong: name it, and do what the user has decided."""
        policy, wrong = self._replay.guard.on_divergence, sorted({run.process for run in finding.wrong})
        differences = self._differences(finding, heal=policy == "heal" and not finding.tied)
        count, agree = len(finding.right) + len(finding.wrong), len(finding.right)
        what = f"the gradients of virtual rank {plan.rank} in step {self._step}"
        if finding.tied:
            right = sorted({run.process for run in finding.right})
            sides = f"{named(right)} and {named(wrong)}"
            problem = f"{what} are not the same on {sides}, and nobody can tell which are right"
        else:
            problem = f"{what} are wrong on {named(wrong)}: {agree} of {count} computations agree on others"
        lines = listed(differences)
        follows = {"raise": "stopping", "warn": "continuing", "heal": "continuing with the majority's"}
        self._replay.say(
            policy,
            f"{problem}: {'; '.join(lines)}; {follows[policy]}",
            step=self._step,
            virtual=plan.rank,
            ranks=wrong,
            tied=finding.tied,
            tensors=[str(each) for each in differences[:100]],
        )
        if self._me in wrong and not finding.tied:
            heartbeat.diverged()
        if policy == "raise":
            self.error = DivergedError(
                problem,
                lines,
                "The step was not applied. If a host is found again, it is faulty; "
                "Guard(on_divergence='heal') has the right gradients take the place of wrong ones.",
            )

    @property
    def _step(self) -> int:
        return self._replay.ranks.steps

    def _differences(self, finding: Finding, *, heal: bool) -> list[Difference]:
        """Return what differs on which process; heal what is wrong, if asked to."""
        right, found = finding.right[0], []
        specs = self._replay.carrier.gradients()
        mine = {run: self._mine[run.number] for run in finding.wrong if run.process == self._me}
        for place in sorted({place for run in finding.wrong for place in run.differs(right)}):
            data = self._right(place, specs[place].nbytes, right)
            for run, leaves in mine.items():
                if place in run.differs(right):
                    found.append(self._difference(specs[place], leaves.bytes_of(place), data))
            if heal:
                for leaves in mine.values():
                    leaves.put(place, data)
        rows = gather_json(
            self._world, [dataclasses.asdict(each) for each in found], "hvdrecover.replay.found"
        )
        return list(dict.fromkeys(Difference(**each) for row in rows for each in row))

    def _right(self, place: int, nbytes: int, right: Run) -> Bytes | None:
        """Return one of the right gradients, sent by who has it."""
        if right.digests[place] is None:
            return None
        data = allocate(nbytes)
        if right.process == self._me:
            mine = self._mine[right.number].bytes_of(place)
            assert mine is not None  # as its digest says
            data[:] = mine
        for start in range(0, nbytes, PIECE):
            self._world.broadcast(data[start : start + PIECE], right.process, f"hvdrecover.replay.{start}")
        return data

    def _difference(self, spec: TensorSpec, mine: Bytes | None, right: Bytes | None) -> Difference:
        total = math.prod(spec.shape)
        count, by = (total, math.nan) if mine is None or right is None else apart(mine, right, spec.dtype)
        host = self._replay.context.config.host
        return Difference(f"gradient of {spec.name}", str(spec), self._me, host, count, total, by)
