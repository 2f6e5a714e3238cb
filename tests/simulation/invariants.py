"""What must hold after every event of a simulated job."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import digest as digest_of
from hvdrecover.checkpoint.claims import among
from hvdrecover.checkpoint.manifest import FILE_NAME, TENSORS, Manifest, Snapshot
from hvdrecover.errors import (
    EmptiedRootError,
    FencedError,
    NoProgressError,
    NoUsableCommitError,
    OvertakenError,
    RecoveryError,
    StoppedError,
    StorageError,
)
from hvdrecover.state.hooks import Agreement
from tests.simulation import training as trainings
from tests.simulation.cluster import Cluster, Job
from tests.simulation.driver import Slot
from tests.simulation.horovod import SimulatedWorld
from tests.simulation.scheduler import Process, told
from tests.simulation.system import Running
from tests.simulation.training import Training

_NONE = CommitId(0, 0)
_OF_STORAGE = ("outage", "full", "lost_answer", "slow", "unmounted", "handler")
P = ParamSpec("P")


def _check(method: Callable[Concatenate[Invariants, P], None]) -> Callable[Concatenate[Invariants, P], None]:
    """Report an error in a check: product code, which calls the check, would handle it as its own."""

    @functools.wraps(method)
    def call(self: Invariants, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._scheduler.fail(f"a check has failed: {told(error)}")

    return call


class Invariants:
    """Checks a cluster, and reports what does not hold to the scheduler."""

    def __init__(
        self, cluster: Cluster, training: Training, reference: Mapping[int, str] | None = None
    ) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._disk = cluster.disk
        self._training = training
        # Digests of an undisturbed run's commits by number; None where the number of ranks changes.
        self._reference = reference
        self.faults: Counter[str] = Counter()  # how many faults of each kind there have been
        self.restarts: Counter[tuple[str, str]] = Counter()  # of each job; of all processes or one slot
        self.acknowledged = _NONE  # the newest commit that was reported as durable
        # Digest of each commit by the start of the job that made it, and its identity.
        self.commits: dict[tuple[str, CommitId], str] = {}
        self.by_number: dict[int, str] = {}
        self._published: dict[CommitId, tuple[Process, str]] = {}
        self._at_claim: dict[int, CommitId] = {}
        self._newest: dict[Process, CommitId] = {}
        self._starts: dict[Process, str] = {}
        self._elected: dict[int, CommitId] = {}
        self._listings: dict[Process, dict[int, dict[str, Any]]] = {}
        self.states: set[int] = set()  # that were reached: durable commit, starts, what each process is at

    # -- told by processes -------------------------------------------------------------------------------

    @_check
    def captured(self, world: SimulatedWorld, snapshot: Snapshot) -> None:
        """A rank has made a commit in its memory."""
        self._newest[world.process] = snapshot.id
        self._is_sound(f"{snapshot.id} in memory", snapshot, snapshot.arenas, snapshot.id)
        self._note_state()

    @_check
    def agreed(self, world: SimulatedWorld, agreement: Agreement) -> None:
        """A rank has agreed with the others on a commit."""
        snapshot, ring = agreement.snapshot, world.ring
        commit = snapshot.id
        self._starts[world.process] = agreement.job
        self._scheduler.say(f"has agreed on {commit} ({agreement.source})")
        self._is_sound(f"{commit}, agreed on", snapshot, snapshot.arenas, commit)
        if agreement.source == "memory" and ring is not None:
            if id(ring) not in self._elected:
                held = (self._newest.get(member.process, _NONE) for member in ring.members)
                self._elected[id(ring)] = max(held)
                self._rings = [*getattr(self, "_rings", ()), ring]  # so that no other gets its identity
            if commit.commit < self._elected[id(ring)].commit:
                self._scheduler.fail(f"resumed from {commit}, but a rank holds {self._elected[id(ring)]}")
        elif agreement.source != "memory":
            needed = self._at_claim.get(commit.generation, _NONE)
            if commit.commit < needed.commit:
                self._scheduler.fail(
                    f"resumed from commit {commit.commit} ({agreement.source}); {needed} was durable"
                )
        self._newest[world.process] = commit
        self._note_state()

    @_check
    def event(self, process: Process, event: Mapping[str, Any]) -> None:
        """A process has emitted an event."""
        if event["kind"] == "durable":
            commit = CommitId(event["generation"], event["commit"])
            self.acknowledged = max(self.acknowledged, commit)
            assert isinstance(process, Running)
            self._cluster.job_of(process).claimed = True
            if self._disk.unmounted is not None:
                self._scheduler.fail(f"{commit} is acknowledged, and the root is not mounted")
            self._newest_is_there(f"{commit} was acknowledged")
            self._scheduler.say(f"{commit} is durable")
            self._note_state()

    def process_died(self, process: Process) -> None:
        self._newest.pop(process, None)

    def has_committed(self, process: Process) -> bool:
        """Return whether a process has made a commit, or has got one."""
        return self._newest.get(process, _NONE).commit > 0

    def starts(self, slot: Slot, process: Running) -> None:
        """A training process starts, or a standby takes over."""
        for other in self._cluster.training:
            if other is not process and other.parent is process.parent and not other.is_doomed:
                self._scheduler.fail(f"{slot.name} has two training processes")

    @_check
    def recorded(self, job: Job, event: Mapping[str, Any]) -> None:
        """A supervisor has recorded an event."""
        if event["kind"] == "restart":
            self.restarts[job.name, event["scope"]] += 1

    @_check
    def process_failed(self, job: Job, error: BaseException) -> None:
        """A process has ended with an error."""
        if isinstance(error, StoppedError):
            return  # rank 0's is looked at
        faults = self.faults
        if (str(error) == trainings.TORN and faults["copy"]) or str(error) == "Horovod initialization failed":
            return
        of_storage = self.storage_faults
        allowed = {
            OvertakenError: faults["partition"] + self._stops + faults["relaunch"],
            FencedError: faults["second_job"] + job.submissions - 1,
            NoProgressError: faults["cut"] + self._stops,
            NoUsableCommitError: 0,
            EmptiedRootError: 0,
            StorageError: of_storage,
            RecoveryError: sum(faults.values()),
            HorovodInternalError: sum(faults.values()) * self._training.plain,
            HostsUpdatedInterrupt: sum(faults.values()) * self._training.plain,
        }
        kind = next((kind for kind in allowed if isinstance(error, kind)), None)
        if kind is None or not allowed[kind]:
            self._scheduler.fail(f"a process ends with an error that no fault explains: {told(error)}")

    # -- told by the disk --------------------------------------------------------------------------------

    @_check
    def listed(self, folder: str) -> None:
        """A process has listed a folder."""
        if folder == "claims":
            self._listings[self._scheduler.process] = self._claims()

    @_check
    def disk_changed(self, kind: str, path: str) -> None:
        """A file was written or deleted."""
        folder, _, name = path.rpartition("/")
        commit = CommitId.parse(folder)
        if commit is None:
            if kind == "put" and (found := among([name])):
                is_new = found[0] not in self._at_claim
                self._at_claim.setdefault(found[0], self.acknowledged)
                claim = f"generation {found[0]}"
                self._scheduler.say(f"claims {claim}" if is_new else f"notes that {claim} has commits")
            return
        if kind == "put" and name == FILE_NAME:
            if self._disk.unmounted is not None:
                self._scheduler.fail(f"{commit} is published where no root is mounted")
            else:
                self._publishes(commit)
        elif kind == "drop" and name == FILE_NAME:
            self._scheduler.say(f"deletes {commit}")
        self._newest_is_there(f"{kind} {path}")

    def _publishes(self, commit: CommitId) -> None:
        process, content = self._scheduler.process, self._manifest(commit)
        self._scheduler.say(f"publishes {commit}")
        lags = self._stops or self.faults["slow"]
        if lags and max(self._claims(), default=0) > commit.generation:
            return  # it came late after its last look at the claims; its files may be gone: starts skip it
        if content is None or (missing := self._damage(commit, content)) is not None:
            self._scheduler.fail(f"{process.name} publishes {commit}: {missing if content else 'not whole'}")
            return
        arenas = trainings.opened(self._files(commit))
        self._is_sound(f"{commit} at the root", content, arenas, commit)
        found = trainings.digest(content, arenas)
        before = self._published.setdefault(commit, (process, found))
        if before != (process, found):
            self._scheduler.fail(f"{process.name} publishes {commit}, as {before[0].name} has done")
        claims = self._listings.get(process, {})
        mine = claims.get(commit.generation)
        owner = max(claims.values(), key=lambda claim: (claim["first"], claim["generation"]), default=None)
        if mine is None or owner is None or mine["pid"] != process.pid or owner["start"] != mine["start"]:
            self._scheduler.fail(
                f"{process.name} publishes {commit}, though it had seen that another process has the root"
            )
        elif any(
            claim["start"] == mine["start"] and claim["generation"] > commit.generation
            for claim in claims.values()
        ):
            self._scheduler.fail(f"{process.name} publishes {commit}, though it had seen a later generation")
        complete = len(self._complete())
        most = self._training.keep + 2 + self.faults["partition"] + self.faults["relaunch"]
        if complete > most and not self.storage_faults:
            self._scheduler.fail(f"the root holds {complete} commits; {self._training.keep} are to be kept")

    # -- at the end --------------------------------------------------------------------------------------

    @_check
    def finished(self) -> None:
        """The jobs have ended: is the result whole, and are no leftovers there?"""
        jobs = self._cluster.jobs
        for job in jobs:
            if job.outcome not in ("finished", "replaced"):
                self._scheduler.fail(f"job {job.name} has not ended")
                return
        total = sum(self.faults.values())
        for job in jobs:
            restarts = self.restarts[job.name, "job"] + job.submissions - 1
            if restarts > 3 * total + 6 * self.storage_faults + 1:
                self._scheduler.fail(f"job {job.name}: {restarts} restarts after {total} faults")
            slots = max(len(driver.slots) for driver in job.drivers)
            most = 3 * (restarts + total) + 10 * self.storage_faults
            if (in_place := self.restarts[job.name, "slot"]) > slots * most:
                self._scheduler.fail(f"job {job.name}: {in_place} restarts in place after {total} faults")
            if job.rendezvous > 5 * total + 2 + restarts + in_place:
                self._scheduler.fail(f"job {job.name}: {job.rendezvous} rendezvous after {total} faults")
        if not any(job.outcome == "finished" for job in jobs):
            self._scheduler.fail("no job has finished")
            return
        complete = self._complete()
        result = self._manifest(max(complete)) if complete else None
        if result is None or not result.finished:
            self._scheduler.fail("the job has finished, and the newest commit at the root is not its result")
            return
        history = trainings.values.decode(result.attributes["history"])
        last = {*()}.union(*(entry[1] for entry in history if entry[0] == self._training.epochs - 1))
        if len(last) < self._training.samples:
            self._scheduler.fail(f"the result lacks samples of the last epoch: it has {sorted(last)}")
        if self.storage_faults or len(jobs) > 1 or not jobs[0].is_whole:
            return
        if len(complete) > self._training.keep + 1:
            self._scheduler.fail(f"the root holds {len(complete)} commits at the end")
        parts = {commit for path in self._disk.files if (commit := CommitId.parse(path.split("/")[0]))}
        lingering = self._stops + self.faults["partition"] + self.faults["relaunch"]
        # A start that finds the run finished writes nothing, and deletes nothing.
        lingering += max(self._claims()) > max(complete).generation
        if parts - complete and not lingering:
            left = ", ".join(commit.name for commit in sorted(parts - complete))
            self._scheduler.fail(f"the root holds parts of commits at the end: {left}")

    @property
    def storage_faults(self) -> int:
        """How many faults of storage there have been."""
        return sum(self.faults[kind] for kind in _OF_STORAGE)

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def _stops(self) -> int:
        """How many faults there have been that stop a process for a while."""
        return sum(self.faults[kind] for kind in ("stop", "stop_any", "hang"))

    def _note_state(self) -> None:
        state: list[Any] = [self.acknowledged]
        for job in self._cluster.jobs:
            state += [job.name, self.restarts[job.name, "job"], job.submissions]
            state += [(self._newest.get(world.process, _NONE), world.at_init) for world in job.worlds]
        self.states.add(hash(tuple(state)))  # equal in all processes that `tests.simulation` forks

    def _is_sound(self, what: str, commit: Any, arenas: Any, identity: CommitId) -> None:
        flaw = trainings.flaw(commit, arenas, self._training)
        if flaw is not None:
            self._scheduler.fail(f"{what}: {flaw}")
            return
        found = trainings.digest(commit, arenas)
        start = self._starts[self._scheduler.process]
        if found != self.commits.setdefault((start, identity), found):
            self._scheduler.fail(f"{what} differs between ranks, or from what was made")
        self.by_number[identity.commit] = found
        if self._reference is not None and self._reference.get(identity.commit) != found:
            self._scheduler.fail(f"{what} is not the undisturbed run's commit {identity.commit}")

    def _newest_is_there(self, why: str) -> None:
        commit = self.acknowledged
        if not commit.generation:
            return
        content = self._manifest(commit)
        damage = "its manifest is gone" if content is None else self._damage(commit, content)
        # A later one may be whole and not be acknowledged yet, as on a full disk: a start resumes from that.
        if damage is not None and not any(self._is_whole(each) for each in self._complete() if each > commit):
            self._scheduler.fail(f"{why}: the newest durable commit, {commit}, is lost: {damage}")

    def _is_whole(self, commit: CommitId) -> bool:
        content = self._manifest(commit)
        return content is not None and self._damage(commit, content) is None

    def _manifest(self, commit: CommitId) -> Manifest | None:
        text = self._disk.kept.get(f"{commit.name}/{FILE_NAME}")
        return None if text is None else manifests.loads(text, "simulated", commit)

    def _files(self, commit: CommitId) -> dict[str, bytes]:
        prefix = f"{commit.name}/"
        return {
            path.removeprefix(prefix).removesuffix(TENSORS): content
            for path, content in self._disk.kept.items()
            if path.startswith(prefix) and path.endswith(TENSORS)
        }

    def _damage(self, commit: CommitId, content: Manifest) -> str | None:
        files = self._files(commit)
        for name, entry in content.by_attribute.items():
            if name not in files:
                return f"{entry.name} is missing"
            if len(files[name]) != entry.size or digest_of(memoryview(files[name])) != entry.digest:
                return f"{entry.name} is not what the manifest says"
        return None

    def _complete(self) -> set[CommitId]:
        folders = (path.split("/")[0] for path in self._disk.kept if path.endswith(f"/{FILE_NAME}"))
        return {commit for folder in folders if (commit := CommitId.parse(folder)) is not None}

    def _claims(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path, text in self._disk.files.items():
            folder, _, name = path.rpartition("/")
            if folder == "claims" and (generations := among([name])):
                found[generations[0]] = {**json.loads(text), "generation": generations[0]}
        return found
