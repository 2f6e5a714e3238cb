"""Rendezvous of ranks, put together from what each of them reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdrecover.record import Event, whole
from hvdrecover.reporting.clocks import TOLERANCE
from hvdrecover.reporting.records import Stint


@dataclass(frozen=True)
class Rendezvous:
    """Ranks that agreed on a commit to resume from, and what they did until the next rendezvous.

    Generations alone do not identify one: a job that starts anew may count from an earlier one again.

    Attributes:
        generation: the generation that the rendezvous began.
        commit: the commit that it resumed from.
        size: number of ranks.
        stints: of those ranks whose files are there; at least one.
    """

    generation: int
    commit: int
    size: int
    stints: tuple[Stint, ...]

    @property
    def agreed(self) -> float:
        """Return when the last rank had agreed with the others, in seconds since the Unix epoch."""
        return max(stint.sync.time for stint in self.stints)

    @property
    def began(self) -> float:
        """Return when the first rank had, as far as is known."""
        return min(stint.sync.time for stint in self.stints)

    @property
    def newest(self) -> int:
        """The newest commit that was made, or the one that the rendezvous resumed from."""
        return max([self.commit, *(max(stint.numbers) for stint in self.stints if stint.numbers)])

    @property
    def finished(self) -> bool:
        """Return whether the run ended here."""
        return any(stint.finished for stint in self.stints)

    @property
    def steps_lost(self) -> int:
        """The most steps that a surviving rank rolled back when the rendezvous was broken."""
        return max(stint.lost for stint in self.stints)

    @property
    def first_steps(self) -> list[Event]:
        """The ranks' first steps after the recovery, in order of time."""
        return sorted((s.recovered for s in self.stints if s.recovered), key=lambda event: event.time)

    def stepped(self) -> float | None:
        """Return when all ranks stepped again, in seconds since the Unix epoch; None if they never did.

        A rank whose file is missing, as its host died, is taken to have stepped with the others. One whose
        file is there and tells of no step has not, unless others have made two commits (a first one may
        precede the first step) or have finished, for which it takes all ranks.
        """
        steps = self.first_steps
        if len(steps) == len(self.stints):
            return steps[-1].time
        proofs = [stint.times[1] for stint in self.stints if len(stint.times) > 1]
        proofs += [stint.finished.time for stint in self.stints if stint.finished]
        if not proofs:
            return None
        return steps[-1].time if steps else min(proofs)

    def reached(self, commit: int) -> float:
        """Return when a commit was made, or the newest before it, in seconds since the Unix epoch.

        If none was made here, that is when the ranks had agreed.
        """
        made: dict[int, float] = {}
        for stint in self.stints:
            for number, time in zip(stint.numbers, stint.times, strict=True):
                if number <= commit and time < made.get(number, float("inf")):
                    made[number] = time
        return made[max(made)] if made else self.agreed


def group(stints: Iterable[Stint]) -> list[Rendezvous]:
    """Find out which ranks were together at a rendezvous.

    Ranks of one rendezvous name the same generation, commit and size, each is there once, and all at the same
    time.

    Returns:
        The rendezvous, in order of time.
    """
    rendezvouses: dict[tuple[int, int, int], list[list[Stint]]] = {}
    for stint in sorted(stints, key=lambda stint: stint.sync.time):
        same = rendezvouses.setdefault(stint.place, [])
        if not (same and _fits(stint, same[-1])):
            same.append([])
        same[-1].append(stint)
    found = [Rendezvous(*place, tuple(ranks)) for place, those in rendezvouses.items() for ranks in those]
    return sorted(found, key=lambda rendezvous: rendezvous.began)


def began(fault: Event) -> float:
    """Return when a fault began, in seconds since the Unix epoch.

    A hang is noticed only when a process has been silent for long.
    """
    silent = fault.number("silent") if fault.word("fault") == "hang" else None
    return fault.time - max(silent or 0.0, 0.0)


def broken_by(fault: Event, rendezvouses: Sequence[Rendezvous]) -> int:
    """The place of the rendezvous that a fault broke; -1 if it came before the first.

    The commit of the lost process tells it, whatever the clocks say. Otherwise it is the last one in which
    all had agreed by then.
    """
    since = began(fault)
    commit = fault.facts.get("commit")
    generation = whole(commit[0]) if isinstance(commit, list) and commit else None
    places = range(len(rendezvouses) - 1, -1, -1)
    for place in places:
        if rendezvouses[place].generation == generation and rendezvouses[place].began <= since + TOLERANCE:
            return place
    return next((place for place in places if rendezvouses[place].agreed <= since), -1)


def _fits(stint: Stint, others: Sequence[Stint]) -> bool:
    begun = stint.sync.time - (stint.sync.number("seconds") or 0.0)
    together = begun <= min(other.sync.time for other in others) + TOLERANCE
    return together and all(other.sync.rank != stint.sync.rank for other in others)
