"""Replays: a second process computes a part of some steps, and all bits of the gradients are compared.

1. All processes draw the same plan: which part is replayed, if any, and by whom. A process is checked by the
   last of its virtual ranks, so its other gradients are added up as in any step.
2. The owner of the part sends the batch and the rank-local state with which the part begins. It holds the
   gradients of the part back.
3. The others compute the part. All processes exchange digests of the gradients.
4. If digests differ, every process computes the part once more, and the majority is right. At the first
   replay after a rendezvous all processes compute, which shows whether they compute alike at all.
5. The owner adds its gradients up: its own, or with ``on_divergence="heal"`` the majority's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hvdrecover import heartbeat
from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.errors import ConfigError, DivergedError
from hvdrecover.guard.parameters import PIECE, Difference, apart
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
Digests = tuple[str, ...]
"""Of each gradient."""
Runs = Sequence[tuple[int, Digests]]
"""The process and the gradients of each computation of a part."""


# -- decisions, which all processes take alike ---------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A replay.

    Attributes:
        rank: the virtual rank whose part is replayed; the last one of its process.
        owner: that process.
        others: the processes that compute the part as well.
        calibrates: whether the replay shows if processes compute alike at all.
    """

    rank: int
    owner: int
    others: tuple[int, ...]
    calibrates: bool


def plan(seed: int, step: int, counts: shares.Counts, share: float, *, calibrate: bool) -> Plan | None:
    """Return the replay of a step; None if it has none.

    A process is checked as often as it has work to do, by a process without virtual ranks if there is one. A
    process that is alone checks itself.

    Args:
        seed: of the run.
        step: its number.
        counts: number of virtual ranks by process.
        share: of steps that are replayed.
        calibrate: whether all processes replay in this step.
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

    It is not a fault if no two agree, or if processes still disagree at the end of a calibration.

    Args:
        runs: the computations, the owner's first: its gradients are applied if there is a tie.
        calibrates: see `Plan`.
    """
    result = vote([digests for _, digests in runs])
    last = dict(runs)
    return result, len(result.right) == 1 or (calibrates and len(set(last.values())) > 1)


# -- a process's side ----------------------------------------------------------------------------------------


@runtime_checkable
class Replaying(Protocol):
    """`Gradients` that can be replayed. They are bytes, in an order that is the same on all processes."""

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of each gradient."""

    def hold(self, rank: int) -> None:
        """Hold back the gradients of a virtual rank, the last of this process, in this step."""

    def held(self) -> list[Bytes]:
        """Return the gradients that are held back. They may be overwritten."""

    def release(self) -> None:
        """Add up the gradients that were held back."""

    def replay_begins(self) -> None:
        """Begin a part whose gradients are only compared."""

    def replay_ends(self) -> list[Bytes]:
        """End that part, and return its gradients."""

    def packed(self, value: Any) -> bytes:
        """Return a pickle of the inputs of a part."""


class Replay:
    """The replays of one process.

    Args:
        guard: the user's settings.
        context: the state's surroundings.
        own: rank-local states.
        ranks: the virtual ranks.

    Attributes:
        is_on: whether steps are replayed.
        error: raised before the step is applied, once all gradients are summed up.

    Raises:
        ConfigError: this framework cannot replay.
    """

    def __init__(self, guard: Guard, context: Context, own: RankLocalState, ranks: VirtualRanks) -> None:
        self._gradients = [each for each in ranks.gradients if isinstance(each, Replaying)]
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
        self.error: DivergedError | None = None
        self.anew()

    def anew(self) -> None:
        """Calibrate again: there may be other processes now."""
        self.is_on, self._calibrated = True, False

    def begin(self, fetch: Callable[[int], Any]) -> Callable[[int], Any]:
        """Begin a step, which may have a replay.

        Args:
            fetch: returns the batch of a virtual rank of this process; called in their order.

        Returns:
            The function to call instead of ``fetch``.
        """
        self._plan, self.error = None, None
        if not self.is_on:
            return fetch
        ranks, world, seed = self._ranks, self._context.world, self._own.random.seed
        found = plan(seed, ranks.steps, ranks.counts, self._guard.replay, calibrate=not self._calibrated)
        if found is None:
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
            self._plan, self._inputs = found, inputs[1:]
            self._computed: list[list[Bytes]] = []
            if batches:
                for each in self._gradients:
                    each.hold(found.rank)
                batches[found.rank] = pickle.loads(self._inputs)[0]  # in memory as the others have it
        return batches.pop if batches else fetch

    def before(self) -> Iterator[Any]:
        """Go through the part on the processes that check it, before their own parts."""
        if self._plan is not None and self._me in self._plan.others:
            yield from self._compute()

    def after(self) -> Iterator[Any]:
        """Compare after all own parts; compute again if gradients differ; then release the gradients."""
        if self._plan is None:
            return
        owns = self._me == self._plan.owner
        if owns:
            self._computed.insert(0, [data for each in self._gradients for data in each.held()])
        if len({digests for _, digests in self._runs()}) > 1:
            yield from self._compute()
            runs = self._runs()
            result, unlike = judge(runs, calibrates=self._plan.calibrates)
            self._unlike(runs) if unlike else self._found(runs, result)
        if owns:
            for each in self._gradients:
                each.release()
        self._computed.clear()

    def _packed(self, batch: Any, rank: int) -> bytes:
        """Return the inputs of a part, or the reason why they cannot be sent."""
        try:
            return _SENT + self._gradients[0].packed((batch, self._own.share_of(rank)))
        except Exception as error:  # each kind of batch has its own
            return _REFUSED + f"batches can't be sent to other processes: {error!r}".encode()

    def _compute(self) -> Iterator[Any]:
        """Go through the part as its owner does; only its gradients are kept."""
        assert self._plan is not None
        ranks, rank = self._ranks, self._plan.rank
        batch, states = pickle.loads(self._inputs)
        undo = self._own.stand_in(rank, states)
        ranks.current, ranks.replaying = rank, True
        for each in self._gradients:
            each.replay_begins()
        self._context.framework.seed(ranks.seeds(ranks.steps, rank))
        try:
            yield batch
        finally:  # also if the script leaves
            ranks.current, ranks.replaying = None, False
            undo()
        self._computed.append([data for each in self._gradients for data in each.replay_ends()])

    # -- comparison ------------------------------------------------------------------------------------------

    def _runs(self) -> Runs:
        """Return all computations so far, the owner's first."""
        assert self._plan is not None
        owner = self._plan.owner
        self._digests = [tuple(map(digest, gradients)) for gradients in self._computed]
        rows = gather_json(self._context.world, self._digests, "hvdrecover.replay.digests")
        runs = [(process, tuple(each)) for process, row in enumerate(rows) for each in row]
        return sorted(runs, key=lambda run: run[0] != owner)

    def _unlike(self, runs: Runs) -> None:
        parties: dict[Digests, set[int]] = {}
        for process, digests in runs:
            parties.setdefault(digests, set()).add(process)
        assert self._plan is not None
        self._turn_off(
            "processes compute different gradients from the same inputs (virtual rank "
            f"{self._plan.rank}, step {self._ranks.steps}), and by no single fault: "
            f"{' / '.join(named(sorted(each)) for each in parties.values())}. Their processors or libraries "
            "are of different kinds, or what runs on them is not deterministic"
        )

    def _found(self, runs: Runs, result: Vote) -> None:
        """Name the wrong computations, and apply the user's policy."""
        assert self._plan is not None
        policy = self._guard.on_divergence
        right, wrong = ([runs[each][0] for each in party] for party in (result.right, result.wrong))
        differences = self._differences(runs, result.right[0], heal=policy == "heal" and not result.tied)
        what = f"the gradients of virtual rank {self._plan.rank} in step {self._ranks.steps}"
        if result.tied:
            sides = f"{named(sorted({*right}))} and {named(sorted({*wrong}))}"
            problem = f"{what} are not the same on {sides}, and nobody can tell which are right"
        else:
            agree = f"{len(right)} of {len(runs)} computations agree on others"
            problem = f"{what} are wrong on {named(sorted({*wrong}))}: {agree}"
        lines = first_lines([*map(str, differences)])
        self._say(
            policy,
            f"{problem}: {'; '.join(lines)}; {_FOLLOWS[policy]}",
            step=self._ranks.steps,
            virtual=self._plan.rank,
            ranks=sorted({*wrong}),
            tied=result.tied,
            tensors=[str(each) for each in differences[:100]],
        )
        if self._me in wrong and not result.tied:
            heartbeat.diverged()
        if policy == "raise":
            self.error = DivergedError(
                problem,
                lines,
                "The step was not applied. If a host is found again, it is faulty; "
                "Guard(on_divergence='heal') has the right gradients take the place of wrong ones.",
            )

    def _differences(self, runs: Runs, chosen: int, *, heal: bool) -> list[Difference]:
        """Return the gradients that differ from the chosen run's; replace them if ``heal``."""
        found, world = [], self._context.world
        source, right = runs[chosen]
        for place, spec in enumerate(spec for each in self._gradients for spec in each.specs()):
            if all(digests[place] == right[place] for _, digests in runs):
                continue
            data = allocate(spec.nbytes)
            if self._me == source:
                data[:] = self._computed[self._digests.index(right)][place]
            for start in range(0, spec.nbytes, PIECE):
                world.broadcast(data[start : start + PIECE], source, f"hvdrecover.replay.{start}")
            for mine, digests in zip(self._computed, self._digests, strict=True):
                if digests[place] == right[place]:
                    continue
                count, by = apart(mine[place], data, spec.dtype)
                host, total = self._context.config.host, math.prod(spec.shape)
                name = f"gradient of {spec.name}"
                found.append(Difference(name, str(spec), self._me, host, count, total, by))
                if heal:
                    mine[place][:] = data
        rows = gather_json(world, [dataclasses.asdict(each) for each in found], "hvdrecover.replay.found")
        return list(dict.fromkeys(Difference(**each) for row in rows for each in row))

    def _turn_off(self, reason: str) -> None:
        """Replay no more until there are other processes."""
        self.is_on = False
        self._say("off", f"Guard(replay=…) is off: {reason}", reason=reason)

    def _say(self, action: str, message: str, **facts: Any) -> None:
        self._context.announce("replay", message, level=logging.WARNING, action=action, **facts)
