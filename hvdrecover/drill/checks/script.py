"""Does the script resume from where a recovery puts it?

Each check holds what the witnesses of a run with faults have told against those of an undisturbed one. Runs
are compared up to where they have other numbers of ranks, which are dealt other batches; with virtual ranks,
commits are compared throughout, and what a rank is given is not: that depends on its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from hvdrecover.checkpoint.values import Json
from hvdrecover.drill.checks import differences, rank_local, rules
from hvdrecover.drill.checks.differences import some
from hvdrecover.drill.checks.rank_local import RankLocal
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.testimony import Batch, Line, Made, Step, Testimony

L = TypeVar("L", bound=Line)

_DEPENDS = (
    "rank-local state was another rank's from commit {} on; if a step depends on it, that alone explains this"
)


def steps_before_commits(told: Testimony) -> list[Finding]:
    """A batch that is recorded as done in a commit must have been stepped on before it."""
    for rendezvous in told.rendezvouses:
        pids = {line.pid for line in rendezvous}
        made = [line for line in told.commits if line.pid in pids and line.rank == 0]
        stint = [line for line in made if line.generation == rendezvous[0].generation]
        if not any(line.steps for line in stint) or not any(line.batches for line in stint):
            continue  # one of them can't be told
        first, ahead = stint[0], _ahead(stint)[:-1]  # the last is made at the end of the run, after all steps
        if (first.steps == 0 and first.batches > 0) or (len(ahead) > 1 and set(ahead) == {1}):
            message = (
                f"commit {first.made} holds {first.batches} recorded batches, but {first.steps} steps: a "
                "batch is committed before the optimizer has stepped on it, so who resumes from that "
                "commit never does"
            )
            return [Finding(rules.STEP_FIRST, message)]
    return []


def overwritten(clean: Testimony, drilled: Testimony) -> list[Finding]:
    """Nothing that was recovered may be changed before the first step."""
    usual = {
        (name, tensor) for line in clean.changed for name, each in line.tensors.items() for tensor in each
    }
    for line in drilled.changed:
        for name, tensors in line.tensors.items():
            if unusual := [tensor for tensor in tensors if (name, tensor) not in usual]:
                message = (
                    f"after the recovery from commit {line.commit}, and before the first step, rank "
                    f"{line.rank} has changed {len(unusual)} tensors of state.{name} ({some(unusual)})"
                )
                return [Finding(rules.NOT_OVERWRITTEN, message)]
    return []


def counters(clean: Testimony, drilled: Testimony) -> list[Finding]:
    """No counter may fall, unless another one rises: a new epoch begins with its first batch."""
    usual = {name for line in clean.changed for name in line.values}
    for line in drilled.changed:
        if any(_falls(after, before) for before, after in line.values.values()):
            continue
        for name, (before, after) in line.values.items():
            if name not in usual and _falls(before, after):
                message = (
                    f"state.{name} was {before} in commit {line.commit}, and {after} at the first step "
                    f"after the recovery from it, on rank {line.rank}"
                )
                return [Finding(rules.COUNTERS, message)]
    return []


def batches(clean: Testimony, drilled: Testimony) -> list[Finding]:
    """After a recovery models are given what they would have been given without."""
    if clean.virtual:
        return []
    known = {_moment(clean, line): line for line in clean.steps}
    seen = {line.inputs: line for line in clean.steps if line.inputs is not None}
    for line in _comparable(drilled.kept(drilled.steps), clean):
        same = known.get(_moment(drilled, line))
        if same is None or None in (same.inputs, line.inputs) or same.inputs == line.inputs:
            continue
        other = seen.get(line.inputs or "")
        which = (
            f"that of step {other.number} after commit {other.commit}" if other else "one it was never given"
        )
        message = (
            f"in step {line.number} after commit {line.commit} of generation {line.generation}, rank "
            f"{line.rank} was given another batch than in the undisturbed run: {which}"
        )
        return [Finding(rules.DATA, message)]
    return _dealt(clean, drilled)


def _dealt(clean: Testimony, drilled: Testimony) -> list[Finding]:
    """Data sets deal the same at each place of an epoch, where they tell."""
    known = {_deal(line): line.inputs for line in clean.batches}
    for line in _comparable(drilled.kept(drilled.batches), clean):
        expected = known.get(_deal(line))
        if None in (expected, line.inputs) or expected == line.inputs:
            continue
        message = (
            f"at place {line.at} of epoch {line.epoch}, after commit {line.commit} of generation "
            f"{line.generation}, rank {line.rank} was dealt another batch by state.{line.sampler} than in "
            "the undisturbed run, though of the same samples"
        )
        return [Finding(rules.DATA, message)]
    return []


def samples(clean: Testimony, drilled: Testimony) -> list[Finding]:
    """Each sample of an epoch is trained on as often as in an undisturbed run: neither lost nor repeated."""
    for place, lost, repeated in _miscounted(clean, drilled):
        message = (
            f"{place}: {lost.total()} samples were lost ({some(lost)}), and {repeated.total()} were trained "
            f"on once more ({some(repeated)})"
        )
        return [Finding(rules.SAMPLES, message)]
    return []


def samples_lost(clean: Testimony, drilled: Testimony) -> int:
    """Return how many samples were lost or repeated, in all."""
    return sum(lost.total() + repeated.total() for _, lost, repeated in _miscounted(clean, drilled))


def weights(clean: Testimony, drilled: Testimony, *, explained: bool) -> list[Finding]:
    """Commits are bitwise equal to those of the undisturbed run.

    Args:
        clean: the undisturbed run.
        drilled: the run with faults.
        explained: whether another check has found a cause.
    """
    own = rank_local.own(clean, drilled)
    last = replaced = 0  # commits
    for same, line in _pairs(clean, drilled):
        if line.rank != 0:
            continue
        found, before = differences.of(same, line), drilled.rendezvous_of(line) == 0
        if words := differences.in_words(found if before else own.rest_of(found), same):
            message = f"commit {line.made} is not that of the undisturbed run, as commit {last} still was: "
            words += [_DEPENDS.format(replaced)] if replaced else []
            rule = rules.REPRODUCIBLE if before and not explained else rules.WEIGHTS
            return [Finding(rule, message + "; ".join(words))]
        last = line.made
        mine = own.part_of(found)
        replaced = replaced or (line.made if mine.tensors or mine.values else 0)
    return []


def replaced(clean: Testimony, drilled: Testimony) -> RankLocal:
    """Rank-local state that a recovery has replaced by another rank's, on any rank."""
    pairs = (pair for pair in _pairs(clean, drilled) if drilled.rendezvous_of(pair[1]) > 0)
    return rank_local.replaced(rank_local.own(clean, drilled), pairs)


def compared(clean: Testimony, drilled: Testimony) -> int:
    """Return how many commits of both runs can be compared, bit by bit."""
    kept = _comparable(drilled.kept(drilled.commits), clean)
    return len({drilled.progress[line.made] for line in kept if line.rank == 0} & set(_by_progress(clean)))


def _by_progress(told: Testimony) -> dict[tuple[int, int, int], Made]:
    """Rank 0's commits, by how far the run had come."""
    return {told.progress[line.made]: line for line in told.kept(told.commits) if line.rank == 0}


def _pairs(clean: Testimony, drilled: Testimony) -> Iterator[tuple[Made, Made]]:
    """Commits of the undisturbed run, with those of the same rank of the run with faults, in its order."""
    known = {(line.rank, clean.progress[line.made]): line for line in clean.kept(clean.commits)}
    for line in _comparable(drilled.kept(drilled.commits), clean):
        if (same := known.get((line.rank, drilled.progress[line.made]))) is not None:
            yield same, line


def _comparable(lines: Sequence[L], clean: Testimony) -> Iterable[L]:
    """Lines up to the first that was told by another number of ranks than the undisturbed run had.

    With virtual ranks it does not matter how many tell.
    """
    for line in lines:
        if line.size != clean.agreed[0].size and not clean.virtual:
            return
        yield line


def _moment(told: Testimony, line: Step) -> tuple[int, int, int]:
    """The number of a step since the run's beginning, and whose it is."""
    steps, _, _ = told.progress[line.commit]
    return steps + line.number, line.rank, line.size


def _deal(line: Batch) -> tuple[str, int, int, int, int, tuple[int, ...]]:
    return line.sampler, line.epoch, line.at, line.rank, line.size, tuple(line.samples)


def _ahead(stint: Sequence[Made]) -> list[int]:
    """By how many batches commits are ahead of steps, in all since the rendezvous."""
    ahead, behind = [], 0
    for line in stint:
        behind += line.batches - line.steps
        ahead.append(behind)
    return ahead


def _miscounted(clean: Testimony, drilled: Testimony) -> Iterator[tuple[str, Counter[int], Counter[int]]]:
    """Epochs with samples that were lost or repeated, and these."""
    expected, found = _samples(clean), _samples(drilled)
    whole = drilled.newest >= clean.newest  # else it was ended earlier, in the middle of its last epoch
    ahead = drilled.newest > clean.newest  # it was ended later, with more of the epoch in which the other was
    last = max((epoch for _, epoch in found), default=0)
    ended = max((epoch for _, epoch in expected), default=0)
    for (name, epoch), count in sorted(expected.items()):
        mine = found.get((name, epoch), Counter())
        lost = count - mine if whole or epoch < last else Counter[int]()
        repeated = mine - (count | Counter(dict.fromkeys(mine, 1)) if ahead and epoch == ended else count)
        if lost or repeated:
            yield f"epoch {epoch} of state.{name}", lost, repeated


def _samples(told: Testimony) -> dict[tuple[str, int], Counter[int]]:
    """Sampler and epoch to how often each sample was trained on; all ranks tell the same of one batch."""
    kept = told.kept(told.batches)
    once = {(line.generation, line.commit, line.sampler, line.epoch, line.at): line for line in kept}
    found: dict[tuple[str, int], Counter[int]] = {}
    for line in once.values():
        found.setdefault((line.sampler, line.epoch), Counter()).update(line.samples)
    return found


def _falls(before: Json, after: Json) -> bool:
    return type(before) in (int, float) and type(after) in (int, float) and bool(after < before)
