"""Rank-local state, which each rank has of its own: running statistics, and values that it adds up.

What differs between the ranks at one commit of the undisturbed run is rank-local. After a recovery all ranks
have one rank's copy of it, so it is another than undisturbed, and nothing is wrong with the script. Trained
tensors and slots of optimizers are never rank-local: where those differ, ranks are out of step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdrecover.drill.checks import differences, rules
from hvdrecover.drill.checks.differences import Differences, some
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.testimony import Made, Testimony


@dataclass(frozen=True)
class Own:
    """Places of the state that each rank has its own of, such as ``model.1.running_mean`` or ``losses``.

    Attributes:
        tensors: names of tensors with their attribute's, or the beginning of such, up to a list.
        values: paths of values, up to a list, whose length and items may differ.
    """

    tensors: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()

    def part_of(self, found: Differences) -> Differences:
        """The differences that are in these places."""
        tensors = {
            name: tuple(each for each in names if _within(f"{name}.{each}", self.tensors))
            for name, names in found.tensors.items()
        }
        values = {path: pair for path, pair in found.values.items() if _within(path, self.values)}
        return Differences({name: names for name, names in tensors.items() if names}, values, {})

    def rest_of(self, found: Differences) -> Differences:
        """All other differences."""
        mine = self.part_of(found)
        tensors = {
            name: tuple(each for each in names if each not in mine.tensors.get(name, ()))
            for name, names in found.tensors.items()
        }
        values = {path: pair for path, pair in found.values.items() if path not in mine.values}
        return Differences({name: names for name, names in tensors.items() if names}, values, found.cursors)


@dataclass(frozen=True)
class RankLocal:
    """Rank-local state that was another rank's after a recovery.

    Attributes:
        names: tensors with their attribute's name, and values.
        finding: where it was seen first; None if it never was.
    """

    names: frozenset[str] = field(default_factory=frozenset)
    finding: Finding | None = None


def own(clean: Testimony, drilled: Testimony | None = None) -> Own:
    """Return what the ranks have their own of, as the undisturbed run tells.

    Args:
        clean: the undisturbed run.
        drilled: a run with faults; values that its script sets anew after a recovery are left out, as no
            other rank's copy is to blame for them.
    """
    tensors: set[str] = set()
    values: set[str] = set()
    for lines in _commits(clean).values():
        first, *others = lines
        for other in others:
            found = differences.of(first, other)
            values.update(_up_to_a_list(path) for path in found.values)
            tensors.update(
                place for name, names in found.tensors.items() for place in _own(first, name, names)
            )
    anew = _set_anew(clean, drilled) if drilled is not None else set()
    kept = (path for path in values if path.split(".")[0] not in anew)
    return Own(frozenset(tensors), frozenset(kept))


def replaced(mine: Own, pairs: Iterable[tuple[Made, Made]]) -> RankLocal:
    """The rank-local state that is not what it was undisturbed.

    Args:
        mine: what the ranks have their own of.
        pairs: commits of the undisturbed run, with those of the same rank after a recovery, in order.
    """
    names, finding = set[str](), None
    for expected, line in pairs:
        found = mine.part_of(differences.of(expected, line))
        here = [f"{name}.{each}" for name, each in _tensors(found.tensors)] + [*found.values]
        if here and finding is None:
            message = (
                f"from commit {line.made} on, rank {line.rank} resumes from another rank's {some(here)}: "
                "undisturbed, each rank has its own, and a recovery gives all of them one rank's"
            )
            finding = Finding(rules.RANK_LOCAL, message)
        names.update(here)
    return RankLocal(frozenset(names), finding)


def _set_anew(clean: Testimony, drilled: Testimony) -> set[str]:
    """Attributes whose values are changed between a recovery and the first step, and not undisturbed."""
    usual = {name for line in clean.changed for name in line.values}
    lines = (line for line in drilled.changed if drilled.rendezvous_of(line) > 0)
    return {name for line in lines for name in line.values} - usual


def _commits(told: Testimony) -> Mapping[int, list[Made]]:
    """The ranks' lines of each commit, by its number."""
    found: dict[int, list[Made]] = {}
    for line in told.kept(told.commits):
        if line.tensors or line.values:
            found.setdefault(line.made, []).append(line)
    return found


def _own(line: Made, name: str, tensors: Iterable[str]) -> list[str]:
    """Of tensors that differ, those that ranks may have their own of; of a plain attribute these are all."""
    if name in line.buffers:
        return [f"{name}.{each}" for each in tensors if each in line.buffers[name]]
    return [_up_to_a_list(f"{name}.{each}") for each in tensors]


def _tensors(found: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    return [(name, each) for name, names in found.items() for each in names]


def _up_to_a_list(path: str) -> str:
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[:number])


def _within(path: str, places: frozenset[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in places for count in range(1, len(parts) + 1))
