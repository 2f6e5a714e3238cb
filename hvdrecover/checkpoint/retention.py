"""The choice of commits that may be deleted, and their deletion.

Only one process at a time may prune a root: the one whose claim is valid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hvdrecover.checkpoint import Best, CommitId, Keep, claims, root, values
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
)


@dataclass(frozen=True)
class Facts:
    """The facts about a commit that decide whether it is kept."""

    commit: CommitId
    time: float
    metric: float | None = None  # the number for `Keep.best`
    problem: str = ""  # why `Keep.best` cannot rank the commit


Survey = dict[CommitId, Facts | None]
"""Each commit's facts; None if it is broken, and left to the user."""


def expired(commits: Iterable[Facts | None], keep: Keep, now: float) -> list[CommitId]:
    """Return the commits that may be deleted, oldest first; never the newest."""
    ordered = sorted((facts for facts in commits if facts is not None), key=lambda facts: facts.commit)
    # A job that skips broken or suspect commits continues from an older one, in a later generation. The
    # skipped commits may hold the only copy of the progress until the job has passed their numbers. So until
    # then they are neither deleted nor counted. Broken commits are left to the user.
    good = [facts for facts in ordered if facts.commit.commit <= ordered[-1].commit.commit]
    kept = {facts.commit for facts in good[-keep.last :]}
    if keep.period is not None:
        first: dict[int, CommitId] = {}
        for facts in good:
            first.setdefault(facts.commit.commit // keep.period, facts.commit)
        kept.update(first.values())
    if keep.within is not None:
        kept |= {facts.commit for facts in good if now - facts.time < keep.within}
    if keep.best is not None:
        # A script commits more often than it measures, so later commits repeat the number. Only the first
        # commit with a number has the weights that were measured.
        measured: dict[float, CommitId] = {}
        for facts in good:
            if facts.metric is not None:
                measured.setdefault(facts.metric, facts.commit)
        ranked = sorted(measured, reverse=keep.best.mode == "max")
        kept |= {measured[value] for value in ranked[: keep.best.count]}
    return [facts.commit for facts in good if facts.commit not in kept]


def metric_of(manifest: Manifest, best: Best | None) -> float | None:
    """Return the number by which `Keep.best` ranks a commit; None if it is None or not finite."""
    if best is None:
        return None
    if best.metric not in manifest.attributes:
        raise ValueError(f"the state has no attribute '{best.metric}'")
    value = manifest.attributes[best.metric]
    with suppress(ValueError):  # such as a tensor
        value = values.decode(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"state.{best.metric} is not a number; make it one with float()")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def facts_of(manifest: Manifest, best: Best | None) -> Facts:
    try:
        return Facts(manifest.id, manifest.time, metric_of(manifest, best))
    except ValueError as error:
        return Facts(manifest.id, manifest.time, problem=str(error))


def survey(storage: Storage, best: Best | None, known: Survey) -> Survey:
    """Return the facts about the commits of a root. Each manifest is read once, as there may be hundreds."""
    found: Survey = {}
    for commit in root.commits(storage):
        try:
            if commit in known:
                found[commit] = known[commit]
            elif root.is_quarantined(storage, commit):
                found[commit] = None
            else:
                found[commit] = facts_of(root.read_manifest(storage, commit), best)
        except (StorageError, IncompleteCommitError):
            pass  # the others must still be pruned: else the disk fills up
        except (CorruptCheckpointError, FormatVersionError):
            found[commit] = None  # a reader quarantines it, or a newer hvdrecover reads it
    return found


def delete_commit(storage: Storage, commit: CommitId) -> None:
    # First the manifest: then a process that is killed leaves no broken commit, and a reader gets an
    # `IncompleteCommitError`.
    storage.remove(root.manifest_path(commit))
    storage.delete(commit.name)


def incomplete(
    storage: Storage, before: int, complete: Collection[CommitId] = ()
) -> tuple[list[CommitId], list[CommitId]]:
    """Return the commits of earlier generations that were never completed, and those that lost manifests."""
    # Their writers read the claims before they publish a manifest, and find a later generation.
    commits = root.commits(storage)
    there = {each for each in commits if each in complete or root.may_be_complete(storage, each)}
    newest = max((commit.generation for commit in there), default=0)
    claimed = claims.among(storage.names(root.CLAIMS))
    begun: list[CommitId] = []
    lost: list[CommitId] = []
    for commit in commits:
        number = commit.generation
        if commit in there or number >= before or root.is_quarantined(storage, commit):
            continue
        # If a generation had durable commits, and neither it nor a later one has any now, manifests were
        # lost: retention always keeps the newest commit.
        is_lost = number > newest and number in claimed and claims.read(storage, number).acknowledged
        (lost if is_lost else begun).append(commit)
    return begun, lost


def is_of_before(folder: str, generation: int) -> bool:
    """Return whether temporary files in a folder belong to an earlier generation, or to no commit."""
    commit = CommitId.parse(folder)
    return commit is None or commit.generation < generation
