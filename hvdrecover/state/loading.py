"""Loading a commit outside a job, whatever the framework."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint import CommitId, inspection, values
from hvdrecover.checkpoint.inspection import holds_tensors
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.root import read_commit, read_newest
from hvdrecover.checkpoint.storage import Storage, open_storage, retrying
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.data.order import is_sampler
from hvdrecover.errors import CheckpointError, ConfigError, UnknownCommitError
from hvdrecover.state.adapter import Component, Framework
from hvdrecover.state.contents import Contents

logger = logging.getLogger(__name__)


class Objects(UserDict[str, Any]):
    """The plain objects of a commit by name; a ValueError if one is of a class that this program lacks."""

    def __getitem__(self, name: str) -> Any:
        return values.decode(self.data[name])


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        commit: which commit.
        finished: whether the run had come to its end there.
        world_size: number of ranks when the commit was made.
        versions: of the framework, Horovod and hvdrecover that made it.
        objects: the commit's attributes without tensors, such as ``objects["epoch"]``, and samplers' cursors.
        not_loaded: with ``strict=False``, a line for each part that did not fit.
    """

    commit: CommitId
    finished: bool
    world_size: int
    versions: Mapping[str, str]
    objects: Mapping[str, Any]
    not_loaded: tuple[str, ...]


def load(
    framework: Framework,
    url: str,
    given: Mapping[str, Component],
    commit: str | int | CommitId | None,
    *,
    strict: bool,
) -> Loaded:
    """Load a commit into the given components; each adapter's ``load`` documents this."""
    wanted = {name: value for name, value in given.items() if value is not None}
    _refuse_others(framework, wanted)
    storage = open_storage(url)
    snapshot = _read(storage, commit, set(wanted))
    where = f"{storage.url}/{snapshot.id}"
    structures, cursors = snapshot.attributes, snapshot.samplers
    chosen = {name: structures[name] for name in wanted if name in structures}
    contents = Contents(framework, wanted, set())
    state = {"attributes": chosen, "samplers": {}, "own": snapshot.state.get("own", {})}
    for arena in snapshot.arenas.values():
        arena.show_to_children()  # a component may keep the memory from now on
    differences = contents.load(state, snapshot.arenas, where, strict=strict, give=True)
    for line in differences:
        logger.warning("not loaded from %s: %s", where, line)
    plain = {name: value for name, value in structures.items() if not holds_tensors(value)}
    return Loaded(
        commit=snapshot.id,
        finished=snapshot.finished,
        world_size=snapshot.world_size,
        versions=snapshot.versions,
        objects=Objects({**plain, **cursors}),
        not_loaded=tuple(differences),
    )


def _refuse_others(framework: Framework, wanted: Mapping[str, Any]) -> None:
    if not wanted:
        raise ConfigError("load", "nothing to load into; pass model=, optimizer= or others by name")
    for name, value in wanted.items():
        if is_sampler(value) or not framework.is_component(value):
            raise ConfigError(
                name,
                f"a {type(value).__name__} can't be loaded into; the commit's value is in the result's "
                f"objects[{name!r}]",
            )


def _read(storage: Storage, commit: str | int | CommitId | None, only: set[str]) -> Snapshot:
    if commit is not None:
        found = inspection.find(storage, str(commit))
        return retrying(SYSTEM_CLOCK)(read_commit, storage, found, only)
    inspection.commits(storage)  # whether there is a root at all

    def skipped(passed_over: CommitId, reason: str, error: CheckpointError | None) -> None:
        if error is not None:  # and not merely one that is being written
            logger.warning("%s: skipping %s: %s", storage.url, passed_over, reason)

    snapshot = read_newest(storage, skipped, only)
    if snapshot is None:
        raise UnknownCommitError(storage.url, "it holds no complete commit yet", [])
    return snapshot
