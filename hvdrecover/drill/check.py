"""Compare a run with faults with the undisturbed run: commits, samples, and leftovers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from hvdrecover.checkpoint import inspection
from hvdrecover.checkpoint.root import read_commit
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.drill.faults import complete
from hvdrecover.drill.run import ScriptRun
from hvdrecover.drill.witness import Line, Records
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch import processes
from hvdrecover.reporting.text import counted

_SHOWN = 3  # names in a list
_MOST = 6  # differences in a message
_INDEX = re.compile(r"\[(\d+)\]")
_LIST_ITEM = re.compile(r"\.\d+\b")

TRAINS_AGAIN = "every rank trains again"
SAME_COMMITS = "commits equal those of the undisturbed run"
STEP_FIRST = "each commit comes after its step"
SAMPLES_ONCE = "each sample exactly once"
REPRODUCIBLE = "the script is reproducible"
NOTHING_LEFT = "nothing is left behind"
ROOT_INTACT = "the checkpoint root is intact"
EXIT_CODE = "the exit code is right"
RANK_LOCAL = "rank-local state"
UNRECORDED = "samples are not checked"

REMEDIES = {
    TRAINS_AGAIN: "Look at the run's log and at `hvdrecover report` of its events.",
    SAME_COMMITS: "Make everything that a step depends on (counter, schedule, scaler, optimizer) an "
    "attribute of the state, set it before the function that recover.run decorates, and let an "
    "ElasticSampler (TensorFlow: elastic_dataset) with a constant seed choose the samples.",
    STEP_FIRST: "Call optimizer.step() first, then record_batch, and state.commit() last.",
    SAMPLES_ONCE: "Call record_batch with the size of the batch right after optimizer.step(), and set_epoch "
    "with the epoch of the state.",
    REPRODUCIBLE: "Use deterministic algorithms, a fixed number of threads, a constant seed for the order of "
    "samples, and only the global random generators: this difference came before any fault.",
    NOTHING_LEFT: "Have processes that the script starts end with their parent (PR_SET_PDEATHSIG).",
    ROOT_INTACT: "Look at `hvdrecover verify` of the run's checkpoint root.",
    EXIT_CODE: "Look at the end of the run's log.",
    UNRECORDED: "Call record_batch of the sampler or state after each step, or the drill cannot tell whether "
    "each sample was trained on exactly once.",
    RANK_LOCAL: "Nothing, if no step depends on it (batch norm in training mode); else make it equal on all "
    "ranks before each commit, or wrap it in PerRank.",
}


@dataclass
class Finding:
    """A difference from the undisturbed run, or something that was left behind."""

    check: str  # a key of `REMEDIES`
    message: str  # what differs, and where
    remedy: str = field(init=False)

    def __post_init__(self) -> None:
        self.remedy = REMEDIES[self.check]


@dataclass
class Comparison:
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # no failures
    compared: int = 0  # number of commits
    not_compared: str = ""  # from which commit on the runs could not be compared, and why
    samples_miscounted: int = 0  # that were lost or repeated, in all epochs
    rank_local: list[str] = field(default_factory=list)  # state that was another rank's after a recovery


def compare(clean: Records, faulty: Records) -> Comparison:
    found = Comparison()
    _compare_samples(clean, faulty, found)
    _compare_steps(clean, faulty, found)
    _compare_commits(clean, faulty, found)
    return found


# -- samples and steps -------------------------------------------------------------------------------------


def _compare_samples(clean: Records, faulty: Records, found: Comparison) -> None:
    expected, mine = _trained(clean), _trained(faulty)
    if not expected:
        found.notes.append(Finding(UNRECORDED, "the script never calls record_batch"))
    complete_run = faulty.newest >= clean.newest  # else it was stopped within an epoch
    ahead = faulty.newest > clean.newest  # it went further into the other's last epoch
    last = max((epoch for _, epoch in mine), default=0)
    ended = max((epoch for _, epoch in expected), default=0)
    for (name, epoch), count in sorted(expected.items()):
        own = mine.get((name, epoch), Counter())
        lost = count - own if complete_run or epoch < last else Counter[int]()
        once = count | Counter(dict.fromkeys(own, 1)) if ahead and epoch == ended else count
        repeated = own - once
        if (lost or repeated) and not found.findings:
            words = f"{lost.total()} samples were lost ({_some(lost)})"
            words += f", {repeated.total()} were trained on again ({_some(repeated)})"
            found.findings.append(Finding(SAMPLES_ONCE, f"epoch {epoch} of state.{name}: {words}"))
        found.samples_miscounted += lost.total() + repeated.total()


def _trained(records: Records) -> dict[tuple[str, int], Counter[int]]:
    """Return, for each sampler and epoch, how often each sample was trained on."""
    once = {  # all ranks record the same samples of one batch
        (line.generation, line.commit, line.sampler, line.epoch, line.at): line
        for line in records.kept("batch")
    }
    found: dict[tuple[str, int], Counter[int]] = {}
    for line in once.values():
        found.setdefault((line.sampler, line.epoch), Counter()).update(line.samples)
    return found


def _compare_steps(clean: Records, faulty: Records, found: Comparison) -> None:
    """Find a commit with a batch whose step was not done: a job that resumes from it never does the step."""
    steps: dict[int, set[int]] = {}
    for done, batches, _ in clean.progress.values():
        steps.setdefault(batches, set()).add(done)
    for commit, (done, batches, _) in faulty.progress.items():
        if batches and done not in steps.get(batches, {done}):
            usual = f"{done} steps instead of {max(steps[batches])}"
            what = f"commit {commit} comes after {batches} recorded batches, but {usual}"
            found.findings.append(Finding(STEP_FIRST, what))
            return


# -- commits -----------------------------------------------------------------------------------------------


def _compare_commits(clean: Records, faulty: Records, found: Comparison) -> None:
    """Find the first commit that differs from the undisturbed run's in any bit, and what differs."""
    local = _find_rank_local(clean)
    first_fault = next((each.began for each in faulty.rendezvouses[1:]), math.inf)
    last = 0  # equal commit
    for expected, line in _pair_commits(clean, faulty, found):
        found.compared += line.rank == 0
        differing = _differences(expected, line)
        before_faults = line.time < first_fault
        here = [] if before_faults else [name for name in differing if _within(name, local)]
        serious = [name for name in differing if name not in here]
        if serious and line.rank == 0:
            equal = f"commit {line.made} differs, and commit {last} was still equal"
            what = f"{equal}: {_told(differing, serious)}"
            found.findings.append(Finding(REPRODUCIBLE if before_faults else SAME_COMMITS, what))
            break
        last = line.made if line.rank == 0 else last
        if here and not found.rank_local:
            what = f"from commit {line.made} on, rank {line.rank} has another rank's {_some(here)}"
            found.notes.append(Finding(RANK_LOCAL, what))
        found.rank_local += [name for name in here if name not in found.rank_local]


def _pair_commits(clean: Records, faulty: Records, found: Comparison) -> Iterator[tuple[Line, Line]]:
    """Yield the commits of both runs that one rank made after the same amount of work."""
    size = clean.rendezvouses[0].agreed[0].size
    known = {(line.rank, clean.progress[line.made]): line for line in clean.kept("commit")}
    for line in faulty.kept("commit"):
        # With another number of ranks, each rank has other samples, except with virtual ranks.
        if line.size != size and not clean.virtual:
            why = f"{line.size} of {size} ranks went on; virtual ranks make it possible"
            found.not_compared = f"from commit {line.made} on nothing was compared, as {why}"
            return
        if (same := known.get((line.rank, faulty.progress[line.made]))) is not None:
            yield same, line


# Such state is not an error: running statistics of batch norm, or a list that each rank fills. A
# recovery gives all ranks the copy of one rank. Trained tensors and optimizer state are never rank-local.
def _find_rank_local(clean: Records) -> frozenset[str]:
    """Return the state that differs between ranks at one commit of the undisturbed run."""
    by_commit: dict[int, list[Line]] = {}
    for line in clean.kept("commit"):
        by_commit.setdefault(line.made, []).append(line)
    names: set[str] = set()
    for first, *others in by_commit.values():
        for other in others:
            for name, values in _differences(first, other, samplers=False).items():
                attribute, _, tensor = name.partition(".")
                if values:
                    names.add(_LIST_ITEM.split(name)[0])  # `losses` for all below it: lists differ in length
                elif attribute not in first.buffers or tensor in first.buffers[attribute]:  # not trained
                    names.add(name)
    return frozenset(names)


def _differences(expected: Line, found: Line, *, samplers: bool = True) -> dict[str, str]:
    """Return each tensor (``model.0.weight``) and value (``stats['loss']``) that differs; values in words."""
    a, b = _digests(expected), _digests(found)
    before, after = ({**line.values, **(line.samplers if samplers else {})} for line in (expected, found))
    tensors = {name: "" for name in {**a, **b} if a.get(name) != b.get(name)}
    values = inspection.differences(before, after).items()
    named = ((_INDEX.sub(r".\1", path), texts) for path, texts in values)  # as tensors are: losses.1
    return tensors | {name: f"{value}, expected {usual}" for name, (usual, value) in named}


def _digests(line: Line) -> dict[str, str]:
    names = ((attribute, name) for attribute, each in line.tensors.items() for name in each)
    return {f"{attribute}.{name}": line.tensors[attribute][name] for attribute, name in names}


def _told(found: Mapping[str, str], names: Sequence[str]) -> str:
    """Return differences in words: first the values, which are often the cause, then the tensors."""
    values = [f"{name} is {found[name]}" for name in names if found[name]]
    tensors: dict[str, list[str]] = {}
    for name in names:
        if not found[name]:
            attribute, _, tensor = name.partition(".")
            tensors.setdefault(attribute, []).append(tensor)
    words = [f"{counted(len(each), 'tensor')} of {name} ({_some(each)})" for name, each in tensors.items()]
    return "; ".join([*values[:_MOST], *words])


def _within(path: str, places: Set[str]) -> bool:
    return any(path == place or path.startswith((f"{place}.", f"{place}[")) for place in places)


def _some(names: Iterable[object]) -> str:
    every = [str(name) for name in names]
    return ", ".join(every[:_SHOWN] + ["…"] * (len(every) > _SHOWN)) or "none"


# -- the machine -------------------------------------------------------------------------------------------


def machine(run: ScriptRun, left: Sequence[int], expected_code: int) -> list[Finding]:
    """Find errors of the end of a run; ``left`` are the processes that still ran after its supervisor."""
    findings = []
    if left:
        findings.append(Finding(NOTHING_LEFT, f"after the run's end {processes.named(left)} still ran"))
    if run.codes[-1] != expected_code:
        findings.append(Finding(EXIT_CODE, f"the job ended with {run.codes[-1]} instead of {expected_code}"))
    # All commits of the root must be readable, apart from those that the drill itself damaged.
    commits = [commit for commit in complete(run) if commit not in run.damaged]
    try:
        for commit in commits:
            read_commit(LocalStorage(run.root), commit)
    except HvdrecoverError as error:
        findings.append(Finding(ROOT_INTACT, str(error)))
    if not commits:
        findings.append(Finding(ROOT_INTACT, f"{run.root} holds no complete commit"))
    return findings
