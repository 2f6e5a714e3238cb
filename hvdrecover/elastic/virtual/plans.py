"""Decisions about replays, which all processes take alike: who computes what once more, and who is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdrecover.elastic.commits.randomness import stream
from hvdrecover.elastic.guard.votes import vote
from hvdrecover.elastic.virtual import shares

Digests = tuple[str | None, ...]
"""Of each gradient; None where there is none."""


@dataclass(frozen=True)
class Plan:
    """The processes that compute a part once more in a step.

    Attributes:
        rank: the virtual rank whose part it is; the last one of its process.
        owner: that process.
        others: the processes that compute it, too.
        judges: those that compute it after them, if there is a difference.
        calibrates: whether this is to see if processes compute alike at all.
    """

    rank: int
    owner: int
    others: tuple[int, ...]
    judges: tuple[int, ...]
    calibrates: bool


def plan(seed: int, step: int, counts: shares.Counts, share: float, *, calibrate: bool) -> Plan | None:
    """Return what is replayed in a step; None if nothing is.

    Processes are checked as often as they have work to do, by spares where there are any. A process that is
    alone checks itself.

    Args:
        seed: of the run.
        step: its number.
        counts: virtual ranks by process.
        share: of steps that are replayed.
        calibrate: whether all processes replay in this one.
    """
    draw = stream(seed, f"replay of step {step}", 0)
    if not calibrate and draw("step") >= share * 2**63:
        return None
    drawn = draw("rank") % sum(counts)
    owner = next(each for each in range(len(counts)) if drawn in shares.run_of(counts, each))
    rank = shares.run_of(counts, owner)[-1]
    rest = [each for each in range(len(counts)) if each != owner] or [owner]
    if calibrate:
        return Plan(rank, owner, tuple(rest), tuple(sorted({owner, *rest})), calibrates=True)
    free = [each for each in rest if not counts[each]] or rest
    other = free[draw("process") % len(free)]
    left = [each for each in rest if each != other]
    judges = (left[draw("judge") % len(left)],) if left else tuple(sorted({owner, other}))
    return Plan(rank, owner, (other,), judges, calibrates=False)


@dataclass(frozen=True)
class Run:
    """One computation of the part.

    Attributes:
        process: whose.
        number: among those of that process; of the owner's, 0 is the one whose gradients count.
        digests: of its gradients.
    """

    process: int
    number: int
    digests: Digests

    def differs(self, other: Run) -> list[int]:
        """Return the numbers of the gradients that are not those of another computation."""
        pairs = enumerate(zip(self.digests, other.digests, strict=True))
        return [place for place, (mine, others) in pairs if mine != others]


@dataclass(frozen=True)
class Finding:
    """A difference between computations.

    Attributes:
        right: those that most agree on.
        wrong: all others.
        tied: whether as many agree on others, so that nobody knows who is right.
        unlike: whether processes compute differently without a fault.
    """

    right: tuple[Run, ...]
    wrong: tuple[Run, ...]
    tied: bool
    unlike: bool


def judged(runs: Sequence[Run], *, calibrates: bool) -> Finding | None:
    """Return the difference between some computations; None if all agree.

    If no two agree, or processes disagree again at a calibration, it is not a fault.

    Args:
        runs: the computations, the owner's first: its gradients stand if there is a tie.
        calibrates: see `Plan`.
    """
    result = vote([run.digests for run in runs])
    if result.agreed:
        return None
    last = {run.process: run.digests for run in runs}
    unlike = len(result.right) == 1 or (calibrates and len(set(last.values())) > 1)
    right, wrong = ([runs[place] for place in places] for places in (result.right, result.wrong))
    return Finding(tuple(right), tuple(wrong), result.tied, unlike)
