"""Majority votes among ranks that hold different things, and the words for groups of ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vote:
    """The division of the ranks."""

    right: tuple[int, ...]  # the largest party; of several as large, the one that has the lowest rank
    wrong: tuple[int, ...]  # all other ranks
    tied: bool  # whether another party is as large, so that the vote cannot find the right one


def vote(ballots: Sequence[Hashable]) -> Vote:
    parties: dict[Hashable, list[int]] = {}
    for rank, ballot in enumerate(ballots):
        parties.setdefault(ballot, []).append(rank)
    largest, *others = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    wrong = sorted(rank for ranks in others for rank in ranks)
    return Vote(tuple(largest), tuple(wrong), any(len(ranks) == len(largest) for ranks in others))


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def by_value(values: Sequence[object]) -> str:
    """Each rank's value, as ``8 on ranks 0-2; 16 on rank 3``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {named(holders)}" for value, holders in ranks.items())


def first_lines(lines: Sequence[str], most: int = 10) -> list[str]:
    """The first lines of a list, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]
