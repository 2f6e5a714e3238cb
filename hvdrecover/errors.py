"""All exceptions of hvdrecover.

A message names the place, the problem and the remedy. The facts are attributes of the exception, too.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping
from typing import Any

from hvdrecover.texts import printable


class HvdrecoverError(Exception):
    """Base class of all errors of hvdrecover."""

    def __str__(self) -> str:
        # File names in the message may come from other users, so control characters are escaped.
        return printable(super().__str__(), "\n")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, pickle makes an exception from its message alone. Ours take other arguments.
        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


class ConfigError(HvdrecoverError, ValueError):
    """A setting has no usable value. ``name`` is the option, argument or environment variable."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class StateError(HvdrecoverError):
    """A value or component of a State cannot be part of a commit.

    ``path`` is its place in the state, such as ``state.history[3]`` or ``model.encoder.weight``.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class UnsupportedValueError(StateError, TypeError):
    """JSON cannot hold a plain object of the state."""


class UnsupportedTensorError(StateError, TypeError):
    """safetensors cannot hold a tensor of this kind or dtype."""


class StepError(StateError):
    """A loop over the steps of virtual ranks is used in the wrong way."""


class CheckpointError(HvdrecoverError):
    """Base class of all errors of durable commits.

    ``url`` is the checkpoint root, or the path below it, that the error is about.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url


class StorageError(CheckpointError, OSError):
    """The storage refused, failed or cannot be reached. The storage's own exception is ``__cause__``."""


class DurableAgeError(StorageError):
    """No commit has become durable for longer than ``HVDRECOVER_MAX_DURABLE_AGE``."""


class HostKeyError(StorageError):
    """The host key of an SFTP server (``host``) is unknown, or differs from the known one."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"sftp://{host}", problem)
        self.host = host


class ForeignRootError(CheckpointError):
    """The checkpoint root holds files that hvdrecover did not write. Nothing was changed."""


class EmptiedRootError(CheckpointError):
    """The checkpoint root was emptied or is not mounted, while near commits of its job still exist."""


class CorruptCheckpointError(CheckpointError):
    """A commit is damaged: truncated, altered, incomplete or malformed."""


class IncompleteCommitError(CorruptCheckpointError):
    """A commit has no manifest: it was never completed, or is being deleted."""


class FormatVersionError(CheckpointError):
    """A newer hvdrecover wrote a commit, in a format that this one cannot read."""


class NoUsableCommitError(CheckpointError):
    """The root has commits, and none of them verifies.

    ``reasons`` has, by the name of each commit, why it cannot be used.
    """

    def __init__(self, url: str, reasons: Mapping[str, str]) -> None:
        listing = _listed(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            url,
            f"none of its {len(reasons)} commits can be used, and training does not start over by itself."
            f"{listing}\nRepair or copy back one of them, or name another checkpoint root to start over.",
        )
        self.reasons = dict(reasons)


class MismatchError(CheckpointError):
    """A commit's tensors or objects do not fit the model, optimizer or state.

    ``differences`` has a line for each, with the name of the tensor or attribute.
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

    ``candidates`` are names of commits that the user may have meant.
    """

    def __init__(self, url: str, problem: str, candidates: list[str]) -> None:
        super().__init__(url, problem)
        self.candidates = candidates


class ExportError(CheckpointError):
    """A commit cannot be exported: the file exists, or an attribute is unknown or holds more than tensors."""


class FencedError(CheckpointError):
    """Another job has claimed the root; this process must stop writing to it.

    ``by`` is the other job, its host and process, and since when it has the root, in words.
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
    """The ranks rolled back to the same commit again and again, although no rank was lost.

    ``commit`` is its number, ``rank`` the rank that the others waited for, or None if it is unknown.
    """

    def __init__(self, problem: str, commit: int, rank: int | None = None) -> None:
        super().__init__(problem)
        self.commit = commit
        self.rank = rank


class RendezvousError(RecoveryError):
    """A rank was lost during a rendezvous."""


class EarlyCollectiveError(RecoveryError):
    """A process that joins a running job called a collective before its training function.

    ``call`` is the collective.
    """

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}() before the training function: this process joins a running job, and the other ranks "
            "are in their training functions, so they never answer. Move the call into the training "
            "function, or put the values that it sends into the state."
        )
        self.call = call


class PerRankError(RecoveryError, StateError):
    """A commit's rank-local states do not fit the present ranks."""


class RemovedError(RecoveryError):
    """The job has removed this host, and continues without it."""


class StoppedError(RecoveryError):
    """Another rank had an error that stops this rank, too. ``kind`` is the name of its class."""

    def __init__(self, problem: str, kind: str) -> None:
        super().__init__(problem)
        self.kind = kind


class OutOfStepError(HvdrecoverError):
    """The ranks are out of step: they differ where they must be equal.

    ``differences`` has a line for each, with the ranks.
    """

    def __init__(self, problem: str, differences: list[str], remedy: str) -> None:
        super().__init__(f"{problem}:{_listed(differences)}\n{remedy}")
        self.differences = differences


class StructureError(OutOfStepError):
    """The ranks' models, optimizers, data sets or scripts differ."""


class DivergedError(OutOfStepError):
    """The ranks' parameters differ."""


class MissingGradientError(OutOfStepError):
    """A parameter has a gradient on some ranks only."""


class NumericsError(HvdrecoverError):
    """NaN or infinity in the loss, in a gradient or in a parameter.

    ``findings`` has a line for each tensor, with the rank, the batch and its samples.
    """

    def __init__(self, findings: list[str], remedy: str) -> None:
        super().__init__(f"numbers that are not finite:{_listed(findings)}\n{remedy}")
        self.findings = findings


class DataChangedError(HvdrecoverError):
    """The training data have changed since the commit was made.

    ``where`` is the commit. ``differences`` has a line for each file.
    """

    def __init__(self, where: str, differences: list[str]) -> None:
        super().__init__(
            f"{where}: the training data have changed since this commit:{_listed(differences)}\n"
            "Put the old data back; or pass data_changed='warn' to use the new data from the same position "
            "on, or data_changed='restart_epoch' to begin the epoch again."
        )
        self.where = where
        self.differences = differences


class DiscoveryError(HvdrecoverError):
    """Host discovery failed.

    ``source`` is the file, program or service that lists the hosts, ``problem`` what went wrong.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source
        self.problem = problem


class HostListError(DiscoveryError):
    """A list of hosts has an invalid entry, at ``line``, counted from 1."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        super().__init__(source, f"line {line}: {problem}")
        self.problem = problem
        self.line = line


class LaunchError(HvdrecoverError):
    """A process of the job cannot be started, or cannot be reached.

    ``program`` is the program, or the host on which it should run; ``problem`` is what went wrong.
    """

    def __init__(self, program: str, problem: str) -> None:
        super().__init__(f"{program}: {problem}")
        self.program = program
        self.problem = problem


class DrillError(HvdrecoverError):
    """A drill cannot test whether a script recovers: the script or the lab does not work as it must.

    ``where`` is the folder of the run, or the part of the lab.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where


class LabError(DrillError):
    """The simulated hosts of a drill, on this machine, cannot be made, changed or removed."""


class InstallError(HvdrecoverError):
    """Horovod could not be built or installed; the message holds the remedy."""
