"""Compare a run with faults with the undisturbed run: commits, samples, and leftovers.

Runs are compared up to the point at which they have different numbers of ranks, since each rank then has
other samples. With virtual ranks, commits are compared to the end.

Some state differs between ranks without faults: running statistics of batch norm, or a list that each rank
fills. A recovery gives all ranks the copy of one rank. Such rank-local state is reported apart, as it is no
error of the script. Trained tensors and optimizer state are never rank-local.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.checkpoint.values import Json
from hvdrecover.drill.faults import complete, damaged
from hvdrecover.drill.records import Batch, Commit, Line, Records, Step
from hvdrecover.drill.script_run import ScriptRun
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch import processes

L = TypeVar("L", bound=Line)

_SHOWN = 3  # names in a list
_MOST = 6  # differences in a message
_LONG = 40  # characters of a value
_SHARED = "/dev/shm/"

TRAINS_AGAIN = "every rank trains again"
SAME_COMMITS = "commits equal those of the undisturbed run"
STEP_FIRST = "each commit comes after its step"
NOTHING_RESET = "nothing is reset after a recovery"
SAME_BATCHES = "batches are those of the undisturbed run"
SAMPLES_ONCE = "each sample exactly once"
REPRODUCIBLE = "the script is reproducible"
NOTHING_LEFT = "nothing is left behind"
ROOT_INTACT = "the checkpoint root is intact"
EXIT_CODE = "the exit code is right"
RANK_LOCAL = "rank-local state"

REMEDIES = {
    TRAINS_AGAIN: "Look at the run's log and at `hvdrecover report` of its events.",
    SAME_COMMITS: "Make everything that a step depends on (counter, schedule, scaler, optimizer) an "
    "attribute of the state.",
    STEP_FIRST: "Call optimizer.step() first, then record_batch, and state.commit() last.",
    NOTHING_RESET: "Set it before the function that recover.run decorates: that function is called again "
    "after each fault, with the state of the last commit.",
    SAME_BATCHES: "Let an ElasticSampler (TensorFlow: elastic_dataset) with a constant seed choose the "
    "samples, from a data set whose order is the same in each process.",
    SAMPLES_ONCE: "Call record_batch with the size of the batch right after optimizer.step(), and set_epoch "
    "with the epoch of the state.",
    REPRODUCIBLE: "Use deterministic algorithms, a fixed number of threads, and only the global random "
    "generators of the framework: this difference came before any fault.",
    NOTHING_LEFT: "Have whatever starts processes or makes shared memory end with its parent "
    "(PR_SET_PDEATHSIG, memfd).",
    ROOT_INTACT: "Look at `hvdrecover verify` of the run's checkpoint root.",
    EXIT_CODE: "Look at the end of the run's log.",
    RANK_LOCAL: "Nothing, if no step depends on it (batch norm in training mode); else make it equal on all "
    "ranks before each commit, or wrap it in PerRank.",
}


@dataclass(frozen=True)
class Finding:
    """A difference from the undisturbed run, or something that was left behind.

    Attributes:
        check: the name of the check; a key of `REMEDIES`.
        message: what differs, and where.
    """

    check: str
    message: str

    @property
    def remedy(self) -> str:
        """What to do, in one sentence."""
        return REMEDIES[self.check]


# -- the script --------------------------------------------------------------------------------------------


def script(clean: Records, faulty: Records) -> list[Finding]:
    """Return how the recoveries of a script differ from an undisturbed run; the likely causes first."""
    causes = [
        *_step_first(clean),
        *_reset(clean, faulty),
        *_batches(clean, faulty),
        *samples(clean, faulty),
    ]
    return [*causes, *_commits(clean, faulty, explained=bool(causes))]


def _step_first(clean: Records) -> list[Finding]:
    """Find commits that hold a recorded batch before the optimizer has stepped on it.

    A job that resumes from such a commit never does the step. All commits are then one batch ahead of the
    steps, but for the last one, which the end of the training function makes.
    """
    made = [line for line in clean.commits if line.rank == 0]
    if not any(line.steps for line in made) or not any(line.batches for line in made):
        return []  # the script records no batches, or the framework reports no steps
    ahead = list(itertools.accumulate(line.batches - line.steps for line in made))[:-1]
    if len(ahead) > 1 and set(ahead) == {1}:
        counts = f"{made[0].batches} recorded batches, but {made[0].steps} steps"
        return [Finding(STEP_FIRST, f"commit {made[0].made} holds {counts}, and so on for each commit")]
    return []


def _reset(clean: Records, faulty: Records) -> list[Finding]:
    """Find state that the script sets again after a recovery and does not set without one.

    A number may fall if another rises: a new epoch begins with its first batch.
    """
    usual = {
        (name, tensor) for line in clean.changed for name, each in line.tensors.items() for tensor in each
    }
    usual |= {(name, "") for line in clean.changed for name in line.values}
    for line in faulty.changed:
        found = []
        for name, tensors in line.tensors.items():
            if unusual := [tensor for tensor in tensors if (name, tensor) not in usual]:
                found.append(f"{_count(unusual)} of state.{name} ({_some(unusual)})")
        risen = any(_falls(after, before) for before, after in line.values.values())
        for name, (before, after) in line.values.items():
            if (name, "") not in usual and _falls(before, after) and not risen:
                found.append(f"state.{name} from {before} to {after}")
        if found:
            where = f"after the recovery from commit {line.commit}, before the first step"
            return [Finding(NOTHING_RESET, f"{where}, rank {line.rank} has changed {'; '.join(found)}")]
    return []


def _batches(clean: Records, faulty: Records) -> list[Finding]:
    """Find a batch that differs: as the model is given it (torch) or the data set returns it (TensorFlow)."""
    if clean.virtual:
        return []  # the samples of a process depend on its share of the virtual ranks

    def at_step(records: Records, line: Step) -> tuple[object, ...]:
        steps, _, _ = records.progress[line.commit]
        return steps + line.number, line.rank, line.size

    def at_place(_: Records, line: Batch) -> tuple[object, ...]:
        return line.sampler, line.epoch, line.at, line.rank, line.size, tuple(line.samples)

    given = {at_step(clean, line): line.inputs for line in clean.steps}
    for step in _comparable(faulty.kept(faulty.steps), clean):
        if _differs(given.get(at_step(faulty, step)), step.inputs):
            where = f"in step {step.number} after commit {step.commit} of generation {step.generation}"
            return [Finding(SAME_BATCHES, f"{where}, the model of rank {step.rank} was given another batch")]
    returned = {at_place(clean, line): line.inputs for line in clean.batches}
    for batch in _comparable(faulty.kept(faulty.batches), clean):
        if _differs(returned.get(at_place(faulty, batch)), batch.inputs):
            where = f"at place {batch.at} of epoch {batch.epoch}, after commit {batch.commit}"
            what = f"state.{batch.sampler} gave rank {batch.rank} another batch of the same samples"
            return [Finding(SAME_BATCHES, f"{where}, {what}")]
    return []


def samples(clean: Records, faulty: Records) -> list[Finding]:
    """Find the first epoch with samples that were lost or repeated."""
    for place, lost, repeated in _miscounted(clean, faulty):
        words = f"{lost.total()} samples were lost ({_some(lost)}), {repeated.total()} were trained on again"
        return [Finding(SAMPLES_ONCE, f"{place}: {words} ({_some(repeated)})")]
    return []


def miscounted(clean: Records, faulty: Records) -> int:
    """Return how many samples were lost or repeated, in all epochs."""
    return sum(lost.total() + repeated.total() for _, lost, repeated in _miscounted(clean, faulty))


def _miscounted(clean: Records, faulty: Records) -> Iterator[tuple[str, Counter[int], Counter[int]]]:
    """Yield the epochs with lost or repeated samples, and these samples."""
    expected, found = _trained(clean), _trained(faulty)
    complete_run = faulty.newest >= clean.newest  # else it was stopped in the middle of its last epoch
    ahead = faulty.newest > clean.newest  # it went further into the epoch in which the other was stopped
    last = max((epoch for _, epoch in found), default=0)
    ended = max((epoch for _, epoch in expected), default=0)
    for (name, epoch), count in sorted(expected.items()):
        mine = found.get((name, epoch), Counter())
        lost = count - mine if complete_run or epoch < last else Counter[int]()
        once = count | Counter(dict.fromkeys(mine, 1)) if ahead and epoch == ended else count
        if lost or mine - once:
            yield f"epoch {epoch} of state.{name}", lost, mine - once


def _trained(records: Records) -> dict[tuple[str, int], Counter[int]]:
    """Return, for each sampler and epoch, how often each sample was trained on."""
    kept = records.kept(records.batches)  # all ranks record the same samples of one batch
    once = {(line.generation, line.commit, line.sampler, line.epoch, line.at): line for line in kept}
    found: dict[tuple[str, int], Counter[int]] = {}
    for line in once.values():
        found.setdefault((line.sampler, line.epoch), Counter()).update(line.samples)
    return found


# -- commits -----------------------------------------------------------------------------------------------

Differences = Mapping[str, str]
"""For each tensor or value that differs, such as ``model.0.weight`` or ``stats.loss``, a description."""


def _commits(clean: Records, faulty: Records, *, explained: bool) -> list[Finding]:
    """Find the first commit of rank 0 that differs from the undisturbed run's in any bit."""
    local = _rank_local(clean, faulty)
    last = replaced = 0  # commits
    for expected, line in _pairs(clean, faulty):
        if line.rank != 0:
            continue
        found, before_faults = _differences(expected, line), faulty.rendezvous_of(line) == 0
        if serious := [name for name in found if before_faults or not _within(name, local)]:
            message = (
                f"commit {line.made} differs, and commit {last} was still equal: {_told(found, serious)}"
            )
            if replaced:
                message += (
                    f"; rank-local state was another rank's from commit {replaced} on, which explains the "
                    "difference if a step depends on it"
                )
            return [Finding(REPRODUCIBLE if before_faults and not explained else SAME_COMMITS, message)]
        last = line.made
        replaced = replaced or (line.made if found else 0)
    return []


def compared(clean: Records, faulty: Records) -> int:
    """Return how many commits were compared."""
    return sum(line.rank == 0 for _, line in _pairs(clean, faulty))


def not_compared(clean: Records, faulty: Records) -> str:
    """Return from which commit on the runs could not be compared, and why; '' if all commits were."""
    if clean.virtual:
        return ""
    for line in faulty.kept(faulty.commits):
        if line.size != clean.agreed[0].size:
            why = f"{line.size} of {clean.agreed[0].size} ranks went on"
            return (
                f"from commit {line.made} on nothing was compared, as {why}; virtual ranks make it possible"
            )
    return ""


def rank_local(clean: Records, faulty: Records) -> tuple[list[str], Finding | None]:
    """Return the rank-local state that was another rank's after a recovery, and a finding that names it."""
    local = _rank_local(clean, faulty)
    names: dict[str, None] = {}
    first: Finding | None = None
    for expected, line in _pairs(clean, faulty):
        if faulty.rendezvous_of(line) == 0:
            continue
        here = [name for name in _differences(expected, line) if _within(name, local)]
        if here and first is None:
            message = f"from commit {line.made} on, rank {line.rank} has another rank's {_some(here)}"
            first = Finding(RANK_LOCAL, message)
        names.update(dict.fromkeys(here))
    return list(names), first


def _rank_local(clean: Records, faulty: Records) -> frozenset[str]:
    """Return the state that differs between ranks at one commit of the undisturbed run.

    A name such as ``losses`` stands for everything below it: lists differ in length.
    """
    by_commit: dict[int, list[Commit]] = {}
    for line in clean.kept(clean.commits):
        by_commit.setdefault(line.made, []).append(line)
    names: set[str] = set()
    for first, *others in by_commit.values():
        for other in others:
            for name, values in _differences(first, other, samplers=False).items():
                attribute, _, tensor = name.partition(".")
                trained = attribute in first.buffers and tensor not in first.buffers[attribute]
                if values or not trained:
                    names.add(_up_to_a_list(name))
    # Values that the script itself sets after a recovery are its own doing.
    usual = {name for line in clean.changed for name in line.values}
    after = (line for line in faulty.changed if faulty.rendezvous_of(line) > 0)
    reset = {name for line in after for name in line.values} - usual
    return frozenset(name for name in names if name.split(".")[0] not in reset)


def _pairs(clean: Records, faulty: Records) -> Iterator[tuple[Commit, Commit]]:
    """Yield the commits of both runs that one rank made after the same amount of work."""
    known = {(line.rank, clean.progress[line.made]): line for line in clean.kept(clean.commits)}
    for line in _comparable(faulty.kept(faulty.commits), clean):
        if (same := known.get((line.rank, faulty.progress[line.made]))) is not None:
            yield same, line


def _comparable(lines: Sequence[L], clean: Records) -> Iterable[L]:
    """Yield lines up to the first that comes from another number of ranks."""
    for line in lines:
        if line.size != clean.agreed[0].size and not clean.virtual:
            return
        yield line


def _differences(expected: Commit, found: Commit, *, samplers: bool = True) -> dict[str, str]:
    differing: dict[str, str] = {}
    for name, tensors in expected.tensors.items():
        others = found.tensors.get(name, {})
        differing |= {f"{name}.{each}": "" for each, digest in tensors.items() if others.get(each) != digest}
    differing |= _unlike(expected.values, found.values, "")
    return differing | (_unlike(expected.samplers, found.samplers, "") if samplers else {})


def _unlike(expected: object, found: object, path: str) -> dict[str, str]:
    """Return the paths at which two values differ, with both values in words."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        pairs = {f"{path}.{key}": (expected.get(key), found.get(key)) for key in {**expected, **found}}
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = {f"{path}.{place}": pair for place, pair in enumerate(zip(expected, found, strict=True))}
    elif expected == found:
        return {}
    else:
        words = f"{json.dumps(found)[:_LONG]}, expected {json.dumps(expected)[:_LONG]}"
        return {path.removeprefix("."): words}
    differing: dict[str, str] = {}
    for place, (mine, theirs) in pairs.items():
        differing.update(_unlike(mine, theirs, place))
    return differing


def _told(found: Differences, names: Sequence[str]) -> str:
    """Return differences in words: first the values, which are often the cause, then the tensors."""
    values = [f"{name} is {found[name]}" for name in names if found[name]]
    tensors: dict[str, list[str]] = {}
    for name in names:
        if not found[name]:
            attribute, _, tensor = name.partition(".")
            tensors.setdefault(attribute, []).append(tensor)
    words = [f"{_count(each)} of {name} ({_some(each)})" for name, each in tensors.items()]
    return "; ".join([*values[:_MOST], *words])


def _within(path: str, places: Set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in places for count in range(1, len(parts) + 1))


def _up_to_a_list(path: str) -> str:
    attribute, *parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join([attribute, *parts[:number]])


def _differs(expected: str | None, found: str | None) -> bool:
    return expected is not None and found is not None and expected != found


def _falls(before: Json, after: Json) -> bool:
    return type(before) in (int, float) and type(after) in (int, float) and bool(after < before)


def _count(tensors: Sequence[str]) -> str:
    return f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"


def _some(names: Iterable[object]) -> str:
    """Return the first of some names."""
    every = [str(name) for name in names]
    return ", ".join(every[:_SHOWN] + ["…"] * (len(every) > _SHOWN)) or "none"


# -- the machine -------------------------------------------------------------------------------------------


def machine(run: ScriptRun, left: Sequence[int], mapped: Set[int], expected_code: int) -> list[Finding]:
    """Return what a run that has come to its end left behind, and what is wrong with that end.

    Args:
        run: the run, after `ScriptRun.kill`.
        left: the processes that still ran after the supervisor had ended.
        mapped: inodes of the files in shared memory that its processes had mapped.
        expected_code: the exit code of the undisturbed run.
    """
    findings = []
    if left:
        findings.append(Finding(NOTHING_LEFT, f"after the run's end {processes.named(left)} still ran"))
    if names := [path.name for path in Path(_SHARED).iterdir() if _inode(path) in mapped]:
        findings.append(Finding(NOTHING_LEFT, f"/dev/shm still holds {_some(names)}"))
    if run.codes[-1] != expected_code:
        findings.append(Finding(EXIT_CODE, f"the job ended with {run.codes[-1]} instead of {expected_code}"))
    return findings + _root(run)


def shared_memory(process: int) -> set[int]:
    """Return the inodes of the files in shared memory that a process has mapped; the names may change."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        return {int(line.split()[4]) for line in lines if _SHARED in line}
    return set()


def _inode(path: Path) -> int:
    with suppress(OSError):  # it has just been removed
        return path.stat().st_ino
    return 0


def _root(run: ScriptRun) -> list[Finding]:
    """Read all commits of the root, apart from those that the drill itself damaged."""
    root, spoilt = LocalStorage(run.root), damaged(run)
    commits = [commit for commit in complete(run) if commit.name not in spoilt]
    for commit in commits:
        try:
            read_commit(root, commit)
        except HvdrecoverError as error:
            return [Finding(ROOT_INTACT, str(error))]
    return [] if commits else [Finding(ROOT_INTACT, f"{run.root} holds no complete commit")]
