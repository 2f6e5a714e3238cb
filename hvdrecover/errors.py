"""Every exception that hvdrecover raises.

An error's message says what happened, to what, and what to do. The facts are attributes as well.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping
from typing import Any

from hvdrecover.redaction import printable


class HvdrecoverError(Exception):
    """Base class of all errors of hvdrecover."""

    def __str__(self) -> str:
        return printable(super().__str__(), "\n")  # names in it may be those of another's files

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an error is remade from its message alone; these take other arguments, and have facts.
        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


class ConfigError(HvdrecoverError, ValueError):
    """A setting has no usable value.

    Attributes:
        name: the option, argument or environment variable.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class StateError(HvdrecoverError):
    """Something handed to a State cannot be part of a commit.

    Attributes:
        path: where it is, such as ``state.history[3]`` or ``model.encoder.weight``.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class UnsupportedValueError(StateError, TypeError):
    """A plain object that JSON can't hold."""


class UnsupportedTensorError(StateError, TypeError):
    """A tensor whose kind or dtype safetensors can't hold."""


class StepError(StateError):
    """A loop over the steps of virtual ranks is not gone through as it must be."""


class CheckpointError(HvdrecoverError):
    """Base class of everything that can go wrong with durable commits.

    Attributes:
        url: the checkpoint root, or the path below it, that the error is about.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url


class StorageError(CheckpointError, OSError):
    """The storage refused, failed or is away; the cause is chained."""


class DurableAgeError(StorageError):
    """Commits could not be made durable for longer than ``HVDRECOVER_MAX_DURABLE_AGE``."""


class HostKeyError(StorageError):
    """An SFTP server does not prove to be the one that is known: its host key is unknown, or another one.

    Attributes:
        host: the server.
    """

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"sftp://{host}", problem)
        self.host = host


class ForeignRootError(CheckpointError):
    """The checkpoint root holds files that are not ours; nothing was touched."""


class EmptiedRootError(CheckpointError):
    """The checkpoint root was emptied or is not mounted, and near commits of its job are left."""


class CorruptCheckpointError(CheckpointError):
    """One commit is damaged: truncated, altered, incomplete or nonsense."""


class IncompleteCommitError(CorruptCheckpointError):
    """A commit has no manifest: it was never completed, or is being deleted."""


class FormatVersionError(CheckpointError):
    """A commit was written in a format newer than this hvdrecover reads."""


class NoUsableCommitError(CheckpointError):
    """The root has commits, and not one of them verifies.

    Attributes:
        reasons: commit name to the reason why it can't be used.
    """

    def __init__(self, url: str, reasons: Mapping[str, str]) -> None:
        listing = _listed(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            url,
            f"none of its {len(reasons)} commits can be used, and training will not silently start afresh."
            f"{listing}\nRepair or copy back one of them, or name another checkpoint root to start anew.",
        )
        self.reasons = dict(reasons)


class MismatchError(CheckpointError):
    """A commit's tensors or objects don't fit the model, optimizer or state.

    Attributes:
        differences: one line each: the tensor's or attribute's name and what differs.
    """

    def __init__(self, url: str, differences: list[str]) -> None:
        super().__init__(
            url,
            f"the commit does not fit this training state:{_listed(differences)}\n"
            "Restore the old definition. If the commit is of an earlier start, strict=False in "
            "Checkpoint(...) or load(...) loads the parts that fit. Within a job, all ranks need the same "
            "models and optimizers: give an optimizer all parameters from the start, and freeze and unfreeze "
            "them by requires_grad.",
        )
        self.differences = differences


class UnknownCommitError(CheckpointError):
    """The root holds no such commit, or is not a checkpoint root at all.

    Attributes:
        candidates: names of commits that could be meant.
    """

    def __init__(self, url: str, problem: str, candidates: list[str]) -> None:
        super().__init__(url, problem)
        self.candidates = candidates


class ExportError(CheckpointError):
    """A commit can't be turned into the file that was asked for."""


class FencedError(CheckpointError):
    """Another job has claimed the root; this process must stop writing to it.

    Attributes:
        by: that job, its host, its process and since when it has the root, in words.
    """

    def __init__(self, url: str, problem: str, by: str = "") -> None:
        super().__init__(url, problem)
        self.by = by


class OvertakenError(FencedError):
    """A later rendezvous or start of this very job has claimed the root; only this process must stop."""


class FlushTimeoutError(CheckpointError, TimeoutError):
    """A commit did not become durable in time; the write continues."""


class RecoveryError(HvdrecoverError):
    """The ranks could not agree on a state to resume from."""


class NoProgressError(RecoveryError):
    """The ranks have come back to one commit again and again, and nobody was lost: it would never end.

    Attributes:
        commit: its number.
        rank: the rank that the others waited for, or None if none is known.
    """

    def __init__(self, problem: str, commit: int, rank: int | None = None) -> None:
        super().__init__(problem)
        self.commit = commit
        self.rank = rank


class RendezvousError(RecoveryError):
    """A rank was lost during a rendezvous."""


class EarlyCollectiveError(RecoveryError):
    """A process that joins a running job called a collective before its training function.

    Attributes:
        call: the collective.
    """

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}() before the training function: this process joins a running job, and the other ranks "
            "are in their training functions, so they never answer. Move the call into the training "
            "function, or put the values that it sends into the state."
        )
        self.call = call


class PerRankError(RecoveryError, StateError):
    """A commit's states of the ranks' own don't fit the ranks that there are."""


class RemovedError(RecoveryError):
    """This host is no longer part of the job."""


class StoppedError(RecoveryError):
    """Another rank has had an error that stops this one, too.

    Attributes:
        kind: the name of that error's class.
    """

    def __init__(self, problem: str, kind: str) -> None:
        super().__init__(problem)
        self.kind = kind


class OutOfStepError(HvdrecoverError):
    """The ranks don't do the same any more.

    Attributes:
        differences: one line each: what differs, and on which ranks.
    """

    def __init__(self, problem: str, differences: list[str], remedy: str) -> None:
        super().__init__(f"{problem}:{_listed(differences)}\n{remedy}")
        self.differences = differences


class StructureError(OutOfStepError):
    """The ranks' models, optimizers, data sets or scripts differ."""


class DivergedError(OutOfStepError):
    """The ranks' parameters differ, or gradients that they have computed from the same inputs."""


class MissingGradientError(OutOfStepError):
    """A parameter has a gradient on some of the ranks only."""


class ShardsError(OutOfStepError):
    """The ranks' shares of the training data don't fit together."""


class NumericsError(HvdrecoverError):
    """NaN or infinity in the loss, in a gradient or in a parameter.

    Attributes:
        findings: one line each: the tensor, the rank, and the batch and samples that it was at.
    """

    def __init__(self, findings: list[str], remedy: str) -> None:
        super().__init__(f"numbers that are not finite:{_listed(findings)}\n{remedy}")
        self.findings = findings


class DataChangedError(HvdrecoverError):
    """The training data are not those that the commit was trained on.

    Attributes:
        where: the commit.
        differences: one line each: what was added, removed, resized or altered.
    """

    def __init__(self, where: str, differences: list[str]) -> None:
        super().__init__(
            f"{where}: the training data have changed since this commit:{_listed(differences)}\n"
            "Put the old data back; or pass data_changed='warn' to use the new data from the same position "
            "on, or data_changed='restart_epoch' to begin the epoch anew."
        )
        self.where = where
        self.differences = differences


class DiscoveryError(HvdrecoverError):
    """The hosts can't be found out.

    Attributes:
        source: the file, program or service that was asked.
        problem: what went wrong.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source
        self.problem = problem


class HostListError(DiscoveryError):
    """A list of hosts has something in it that can't be meant.

    Attributes:
        line: its line, from 1.
        column: its column, from 1, in characters.
    """

    def __init__(self, source: str, line: int, column: int, problem: str) -> None:
        super().__init__(source, f"line {line}, column {column}: {problem}")
        self.problem = problem
        self.line = line
        self.column = column


class LaunchError(HvdrecoverError):
    """A process of the job can't be started, or can't be reached.

    Attributes:
        program: the program, or the host on which it should be.
        problem: what went wrong.
    """

    def __init__(self, program: str, problem: str) -> None:
        super().__init__(f"{program}: {problem}")
        self.program = program
        self.problem = problem


class DrillError(HvdrecoverError):
    """A drill can't tell whether a script recovers, as it does not get as far as that.

    Attributes:
        where: the folder of the run, or the part of the lab.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where


class LabError(DrillError):
    """Hosts of a drill's own, on this machine, can't be made, changed or removed."""


class InstallError(HvdrecoverError):
    """Horovod could not be built or installed; the message holds the remedy."""


class EditError(InstallError):
    """A named edit of Horovod's source no longer applies.

    Attributes:
        edit: the edit's name.
        file: the file in Horovod's source tree.
    """

    def __init__(self, edit: str, file: str, found: int) -> None:
        super().__init__(
            f"edit '{edit}' no longer applies: its text occurs {found} times in {file}, and must occur once: "
            "this is not the Horovod version that hvdrecover was written for."
        )
        self.edit = edit
        self.file = file
