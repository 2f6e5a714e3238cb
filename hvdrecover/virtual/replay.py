"""Replays: a second process computes a part of some steps, and all bits of the gradients are compared.

1. All processes draw the same plan: which part is replayed, if any, and by whom. A process is checked by the
   last of its virtual ranks, so its other gradients are added up as in any step.
2. The owner of the part sends the batch and the rank-local state with which the part begins. It holds the
   gradients of the part back.
3. The others compute the part. All processes exchange digests of the gradients.
4. If digests differ, every process computes the part once more, and the majority is right. At the first
   replay after a rendezvous all processes compute, which shows whether they compute alike at all.
5. The owner adds its gradients up: its own, or with ``on_divergence="heal"`` the majority's.

An adapter's gradients that can be replayed have the methods ``hold``, ``held``, ``release``, ``replayed``,
``specs`` and ``packed``; see `hvdrecover.torch.virtual_gradients`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdrecover import heartbeat
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.digest import digest
from hvdrecover.errors import ConfigError, DivergedError
from hvdrecover.guard.settings import Guard
from hvdrecover.guard.votes import Vote, first_lines, named, vote
from hvdrecover.state.adapter import gather_json
from hvdrecover.state.random import stream
from hvdrecover.virtual import shares

if TYPE_CHECKING:
    from hvdrecover.state.hooks import Context
    from hvdrecover.state.rank_local import RankLocalState
    from hvdrecover.virtual.ranks import VirtualRanks

_SENT, _REFUSED = b"+", b"-"
_FOLLOWS = {"raise": "stopping", "warn": "continuing", "heal": "continuing with the majority's"}
Runs = Sequence[tuple[int, tuple[str, ...]]]
"""The process of each computation of a part, and the digest of each gradient."""


# -- decisions, which all processes take alike ---------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A replay of one virtual rank's part."""

    rank: int  # the last one of its process
    owner: int  # that process
    others: tuple[int, ...]  # the processes that compute the part as well
    calibrates: bool  # whether all processes do, which shows if they compute alike at all


def plan(seed: int, step: int, counts: shares.Counts, share: float, *, calibrate: bool) -> Plan | None:
    """Return the replay of a step; None if it has none.

    A process is checked as often as it has work to do, by a process without virtual ranks if there is one. A
    process that is alone checks itself.
    """
    draw = stream(seed, f"replay of step {step}", 0)
    if not calibrate and draw("step") >= share * 2**63:
        return None
    drawn = draw("rank") % sum(counts)
    owner = next(each for each in range(len(counts)) if drawn in shares.run_of(counts, each))
    others = [each for each in range(len(counts)) if each != owner] or [owner]
    if not calibrate:
        free = [each for each in others if not counts[each]] or others
        others = [free[draw("process") % len(free)]]
    return Plan(shares.run_of(counts, owner)[-1], owner, tuple(others), calibrate)


def judge(runs: Runs, *, calibrates: bool) -> tuple[Vote, bool]:
    """Return the vote on computations, and whether processes compute differently without a fault.

    It is not a fault if no two agree, or if processes still disagree at the end of a calibration. The owner's
    computations come first: its gradients are applied if there is a tie.
    """
    result = vote([digests for _, digests in runs])
    last = dict(runs)
    return result, len(result.right) == 1 or (calibrates and len(set(last.values())) > 1)


# -- a process's side ----------------------------------------------------------------------------------------


class Replay:
    """The replays of one process; ``error`` is raised before the step is applied."""

    def __init__(self, guard: Guard, context: Context, own: RankLocalState, ranks: VirtualRanks) -> None:
        self._gradients: list[Any] = [each for each in ranks.gradients if hasattr(each, "replayed")]
        if not self._gradients:
            raise ConfigError(
                "replay",
                "the state has no optimizer of torch, whose gradients could be compared; leave out "
                "Guard(replay=…)",
            )
        self._guard = guard
        self._context = context
        self._own = own
        self._ranks = ranks
        self._plan: Plan | None = None
        self._computed: list[list[Bytes]] = []  # gradients of each computation; the owner's own come first
        self.error: DivergedError | None = None
        self.anew()

    def anew(self) -> None:
        """Calibrate again: there may be other processes now."""
        self.is_on, self._calibrated = True, False

    def begin(self, fetch: Callable[[int], Any]) -> Callable[[int], Any]:
        """Begin a step, which may have a replay; return the function to fetch batches by from now on."""
        self._plan, self.error = None, None
        ranks, world, seed = self._ranks, self._context.world, self._own.random.seed
        calibrate = not self._calibrated
        found = plan(seed, ranks.steps, ranks.counts, self._guard.replay, calibrate=calibrate)
        if not self.is_on or found is None:
            return fetch
        self._calibrated = True
        self._me = world.rank()
        batches, mine = {}, b""
        if self._me == found.owner:
            batches = {rank: fetch(rank) for rank in ranks.carried.ranks}
            mine = self._packed(batches[found.rank], found.rank)
        inputs = bytes(world.gather(mine, "hvdrecover.replay.inputs")[found.owner])
        if inputs[:1] == _REFUSED:
            self._turn_off(inputs[1:].decode())
        else:
            self._plan, self._inputs, self._computed = found, inputs[1:], []
            if batches:
                for each in self._gradients:
                    each.hold(found.rank)
                batches[found.rank] = pickle.loads(self._inputs)[0]  # in memory as the others have it
        return batches.pop if batches else fetch

    def before(self) -> Iterator[Any]:
        """Go through the part on the processes that check it, before their own parts."""
        if self._plan is not None and self._me in self._plan.others:
            yield from self._compute(self._plan)

    def after(self) -> Iterator[Any]:
        """Compare after all own parts; compute again if gradients differ; then release the gradients."""
        if (plan := self._plan) is None:
            return
        if self._me == plan.owner:
            self._computed.insert(0, [data for each in self._gradients for data in each.held()])
        if len({digests for _, digests in self._runs(plan)}) > 1:
            yield from self._compute(plan)
            runs = self._runs(plan)
            result, unlike = judge(runs, calibrates=plan.calibrates)
            if unlike:
                self._turn_off(
                    f"processes compute different gradients from the same inputs (virtual rank {plan.rank}, "
                    f"step {self._ranks.steps}), and by no single fault. Their processors or libraries are "
                    "of different kinds, or their computation is not deterministic"
                )
            else:
                self._found(plan, runs, result)
        if self._me == plan.owner:
            data = iter(self._computed[0])
            for each in self._gradients:
                each.release(data)
        self._computed = []

    def _packed(self, batch: Any, rank: int) -> bytes:
        """Return the inputs of a part, or the reason why they cannot be sent."""
        try:
            return _SENT + bytes(self._gradients[0].packed((batch, self._own.share_of(rank))))
        except Exception as error:  # each kind of batch has its own
            return _REFUSED + f"batches can't be sent to other processes: {error!r}".encode()

    def _compute(self, plan: Plan) -> Iterator[Any]:
        """Go through the part as its owner does; only its gradients are kept."""
        ranks, rank = self._ranks, plan.rank
        batch, states = pickle.loads(self._inputs)
        undo = self._own.stand_in(rank, states)
        ranks.current, ranks.replaying = rank, True
        self._context.framework.seed(ranks.seeds(ranks.steps, rank))
        try:
            yield batch
        finally:  # also if the script leaves
            ranks.current, ranks.replaying = None, False
            undo()
        self._computed.append([data for each in self._gradients for data in each.replayed()])

    def _runs(self, plan: Plan) -> Runs:
        """Return all computations so far, the owner's first."""
        self._digests = [tuple(map(digest, gradients)) for gradients in self._computed]
        rows = gather_json(self._context.world, self._digests, "hvdrecover.replay.digests")
        runs = [(process, tuple(each)) for process, row in enumerate(rows) for each in row]
        return sorted(runs, key=lambda run: run[0] != plan.owner)

    def _found(self, plan: Plan, runs: Runs, result: Vote) -> None:
        """Name the wrong computations, and apply the user's policy."""
        policy = self._guard.on_divergence
        right, wrong = ({runs[each][0] for each in party} for party in (result.right, result.wrong))
        lines = self._compared(plan, runs, result.right[0], heal=policy == "heal" and not result.tied)
        what = f"the gradients of virtual rank {plan.rank} in step {self._ranks.steps}"
        if result.tied:
            sides = f"{named(sorted(right))} and {named(sorted(wrong))}"
            problem = f"{what} are not the same on {sides}, and nobody can tell which are right"
        else:
            agree = f"{len(result.right)} of {len(runs)} computations agree on others"
            problem = f"{what} are wrong on {named(sorted(wrong))}: {agree}"
        self._say(
            policy,
            f"{problem}: {'; '.join(first_lines(lines))}; {_FOLLOWS[policy]}",
            step=self._ranks.steps,
            virtual=plan.rank,
            ranks=sorted(wrong),
            tied=result.tied,
            tensors=lines[:100],
        )
        if self._me in wrong and not result.tied:
            heartbeat.diverged()
        if policy == "raise":
            self.error = DivergedError(
                problem,
                first_lines(lines),
                "The step was not applied. If a host is found again, it is faulty; "
                "Guard(on_divergence='heal') has the right gradients take the place of wrong ones.",
            )

    def _compared(self, plan: Plan, runs: Runs, chosen: int, *, heal: bool) -> list[str]:
        """Return a line for each gradient that differs; replace the owner's if ``heal``."""
        source, right = runs[chosen]
        lines = []
        for place, spec in enumerate(spec for each in self._gradients for spec in each.specs()):
            wrong = {process for process, digests in runs if digests[place] != right[place]}
            if not wrong:
                continue
            lines.append(f"gradient of {spec.name}, {spec}: on {named(sorted(wrong))}")
            if heal:
                data = allocate(spec.nbytes)
                if self._me == source:
                    data[:] = self._computed[self._digests.index(right)][place]
                self._context.world.broadcast(data, source, f"hvdrecover.replay.{place}")
                if self._me == plan.owner:
                    self._computed[0][place] = data
        return lines

    def _turn_off(self, reason: str) -> None:
        """Replay no more until there are other processes."""
        self.is_on = False
        self._say("off", f"Guard(replay=…) is off: {reason}", reason=reason)

    def _say(self, action: str, message: str, **facts: Any) -> None:
        self._context.announce("replay", message, level=logging.WARNING, action=action, **facts)
