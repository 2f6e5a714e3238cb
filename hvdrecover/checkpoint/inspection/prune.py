"""Deleting commits by hand, by the same rules as a job's retention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdrecover.checkpoint import leftovers
from hvdrecover.checkpoint.inspection import catalog
from hvdrecover.checkpoint.inspection.catalog import Entry
from hvdrecover.checkpoint.inspection.verify import Verdict, verify
from hvdrecover.checkpoint.retention import Pruner, delete_commit, metric_of
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.storage import Storage, Temporary
from hvdrecover.clock import Clock
from hvdrecover.errors import ConfigError, CorruptCheckpointError


@dataclass(frozen=True)
class Plan:
    """The deletions that pruning would make.

    Attributes:
        delete: commits that the rules don't keep, oldest first.
        keep: good commits that the rules keep, newest first.
        untouched: commits that pruning never touches, newest first: those that are incomplete and may be
            being written, and those that are broken, quarantined or of a newer format.
        leftovers: commits that were never completed and can't be any more, newest first.
        aside: files that killed processes have left where `hvdrecover ls` shows no commits.
    """

    delete: list[Entry]
    keep: list[Entry]
    untouched: list[Entry]
    leftovers: list[Entry]
    aside: list[Temporary]


def plan(storage: Storage, keep: Keep, clock: Clock) -> Plan:
    """Decide what to delete; changes nothing.

    Raises:
        UnknownCommitError: this is not a checkpoint root.
        ConfigError: no commit has the number that ``keep.best`` goes by.
        StorageError: the storage failed.
    """
    unwanted = Pruner(storage, keep, clock).expired()
    entries = catalog.entries(storage)
    good = [entry for entry in entries if entry.is_whole]
    _check_metric(good, keep)
    left = leftovers.find(storage)
    incomplete = [each for each in entries if each.state == "incomplete" and each.id in left.commits]
    return Plan(
        delete=[entry for entry in reversed(good) if entry.id in unwanted],
        keep=[entry for entry in good if entry.id not in unwanted],
        untouched=[entry for entry in entries if entry not in good and entry not in incomplete],
        leftovers=incomplete,
        aside=left.aside,
    )


def check_one_is_intact(storage: Storage, plan: Plan, advance: Callable[[int], None]) -> None:
    """Make sure that a commit is left which verifies, by reading them from the newest on.

    Raises:
        CorruptCheckpointError: not one of those that would be kept verifies.
        StorageError: the storage failed.
    """
    verdicts: list[Verdict] = []
    if not plan.delete:
        return
    for entry in plan.keep:
        verdicts.append(verify(storage, entry.id, advance))
        if verdicts[-1].intact:
            return
    broken = "; ".join(f"{verdict.id}: {verdict.text}" for verdict in verdicts)
    raise CorruptCheckpointError(
        storage.url, f"nothing was deleted, for not one of the commits that would be kept is intact: {broken}"
    )


def delete(storage: Storage, plan: Plan) -> Iterator[Entry]:
    """Delete the commits and files of a plan.

    Yields:
        Each commit, leftovers included, after its deletion. At the end, the files aside are deleted too.

    Raises:
        StorageError: the storage failed; what was deleted before stays deleted.
    """
    for entry in (*plan.delete, *plan.leftovers):
        delete_commit(storage, entry.id)
        yield entry
    if plan.aside:
        before = leftovers.being_written(storage)
        storage.tidy(lambda folder: leftovers.is_of_before(folder, before))


def _check_metric(good: list[Entry], keep: Keep) -> None:
    problems = []
    for entry in good:
        try:
            if entry.manifest is not None:
                metric_of(entry.manifest, keep.best)
            return
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("--keep-best", f"{problems[0]}, in any of the {len(good)} commits")
