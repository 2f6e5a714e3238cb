"""The tracked attributes of a state. A commit copies them; a recovery or `load` fills them from a commit."""

from __future__ import annotations

import logging
import re
from collections import UserDict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdrecover.checkpoint import CommitId, inspection, values
from hvdrecover.checkpoint.arena import Arena, Layout
from hvdrecover.checkpoint.inspection import holds_tensors
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.root import read_commit, read_newest
from hvdrecover.checkpoint.storage import Storage, open_storage, retried
from hvdrecover.checkpoint.values import Json
from hvdrecover.data.order import SampleOrder
from hvdrecover.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    MismatchError,
    StateError,
    UnknownCommitError,
)
from hvdrecover.machine import SYSTEM_CLOCK
from hvdrecover.state.adapter import Component, Copier, Framework, HiddenAttribute, Part, rebuild
from hvdrecover.state.rank_local import RANDOM, PerRank, Ranks, Shares, Value, is_sampler

logger = logging.getLogger(__name__)

Strict = bool | Literal["components"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Present:
    """The contents of the attributes, taken apart but not copied."""

    parts: Mapping[str, Part]  # all attributes but the samplers; with the hidden and the rank-local ones
    layouts: dict[str, Layout]  # where the tensors lie in a commit's files
    # ``attributes``, ``samplers``, and in ``own`` the number of ranks of each rank-local value.
    state: dict[str, Json]
    streams: Mapping[str, Json]  # the states of the random streams by rank, if commits hold them


class Contents:
    def __init__(
        self,
        framework: Framework,
        values: Mapping[str, Any],
        reserved: Container[str],  # names that an attribute cannot have
        on_iterate: Callable[[], None] | None = None,  # called when an iteration of a sampler begins
        hidden: Mapping[str, HiddenAttribute] | None = None,  # names begin with an underscore
        ranks: Ranks | None = None,
    ) -> None:
        self._framework = framework
        self.copier = Copier(framework)
        self._on_iterate = on_iterate
        self.on_record: list[Callable[[SampleOrder, int], None]] = []  # called for each batch of a sampler
        # Components are loaded in place. A plain object is replaced by a copy.
        self.values: dict[str, Any] = {}
        self.orders: dict[str, SampleOrder] = {}  # a commit holds their cursors
        framework.attributes = self.values
        self._ranks = ranks or Ranks()
        # A commit holds a dict of the ranks' states by rank.
        self.per_rank: dict[str, Value] = dict(self._ranks.values())
        self._hidden: dict[str, HiddenAttribute] = dict(hidden or {})
        for name, value in values.items():
            if name in reserved or name.startswith("_") or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"state.{name}", "an attribute of a state can't have this name; choose another ASCII name"
                )
            self.put(name, value)

    def put(self, name: str, value: Any) -> None:
        if name in self.per_rank and not isinstance(value, PerRank):
            raise ConfigError(f"state.{name}", f"it is each rank's own; assign to state.{name}.value")
        self.per_rank.pop(name, None)
        self.values[name] = value
        if is_sampler(value) or name in self.orders:
            self.orders = {each: held.order for each, held in self.values.items() if is_sampler(held)}
        if isinstance(value, PerRank):
            self.per_rank[name] = value
            value.on_iterate = self._on_iterate
            self._ranks.split(value)
        if is_sampler(value):
            self._ranks.deal(value.order)
            value.order.on_iterate = self._on_iterate
            value.order.on_record = lambda *batch: [listener(*batch) for listener in self.on_record]

    def place(self, rank: int, size: int) -> None:
        for order in self.orders.values():
            order.place(rank, size)

    def order_in_use(self) -> SampleOrder | None:
        """The sample order in use: the last one that was begun, preferably one that records its batches."""
        used = [order for order in self.orders.values() if order.begun]
        return max(used, key=lambda order: (order.recorded, order.begun), default=None)

    def components(self) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if self._framework.is_component(value)}

    def rank_local(self) -> dict[str, set[str]]:
        return {name: set(self._framework.rank_local(each)) for name, each in self.components().items()}

    def positions(self) -> dict[str, tuple[int, int]]:
        """Each sampler's epoch and cursor; and how many items were taken from each rank-local value."""
        samplers = {name: (order.epoch, order.done) for name, order in self.orders.items()}
        return {**samplers, **{name: (0, each.taken) for name, each in self.per_rank.items()}}

    def take_apart(self, own: Mapping[str, Shares]) -> Present:
        """Take all attributes apart; rank-local values that are not in ``own`` are left out."""
        trees = {
            name: self._framework.tree(value) if self._framework.is_component(value) else value
            for name, value in self.values.items()
            if name not in self.orders and name not in self.per_rank
        }
        trees |= {name: dict(own[name].states) for name in self.per_rank if name in own}
        trees |= {name: tree for name, part in self._hidden.items() if (tree := part.tree()) is not None}
        parts = self.copier.take_apart(trees)
        state: dict[str, Json] = {
            "attributes": {name: part.structure for name, part in parts.items()},
            "samplers": {name: self._cursor(name, order) for name, order in self.orders.items()},
        }
        if own:
            state["own"] = {name: shares.ranks for name, shares in own.items()}
        layouts = {name: part.plan.layout for name, part in parts.items() if part.plan.layout is not None}
        return Present(parts, layouts, state, own[RANDOM].states if RANDOM in own else {})

    def load(
        self,
        state: Mapping[str, Json],
        arenas: Mapping[str, Arena],
        where: str,
        *,
        strict: Strict,  # whether all must fit; "components": models and optimizers must
        give: bool = False,  # whether attributes may keep the arenas' memory, for their use alone
    ) -> list[str]:
        """Load a commit into the attributes; return a line for each difference."""
        try:
            # The script gets plain values as they are, so these need separate memory.
            components = self.components().keys()
            plain = {name for name in self.values if not give} - components
            structures, cursors = dict(state["attributes"]), dict(state["samplers"])
            ranks = set(state.get("own", ()))
            trees = {
                name: rebuild(
                    self._framework, structure, arenas.get(name), own=name in plain or name in self._hidden
                )
                for name, structure in structures.items()
                if name not in ranks
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                where, f"the structure of the commit can't be read: {error}"
            ) from error
        hidden = {name: trees.pop(name, None) for name in self._hidden}
        names = {name for name in (*structures, *cursors) if not name.startswith("_")}
        absent = {True: "in the commit, but not an attribute of this state"}
        absent[False] = "an attribute of this state, but not in the commit"
        differences = [f"{name}: {absent[name in names]}" for name in names ^ self.values.keys()]
        fitting: dict[str, Any] = {}
        misfits = False
        for name in [name for name in self.values if name in names]:
            found = self._fit(name, trees, cursors, ranks, fitting)
            differences += found
            misfits |= bool(found) and name in components and name not in self.orders
        differences.sort()
        if differences if strict is True else strict and misfits:
            raise MismatchError(where, differences)
        empty = [name for name, tree in fitting.items() if isinstance(tree, dict) and not tree]
        # A part of each component must fit, strict or not. An array that is stored has no truth value.
        if nothing := [name for name in empty if hasattr(trees[name], "shape") or trees[name]]:
            raise MismatchError(where, [*differences, *(f"{name}: nothing of it fits" for name in nothing)])
        # Nothing is loaded until here. From here on, only a component that refuses its tree raises an error.
        try:
            for name, part in fitting.items():
                value = self.values[name]
                if name in self.orders:
                    value.order.load_state_dict(part, name)
                elif name in components:
                    self._framework.load(value, part, keep=give)
                else:
                    self.values[name] = self._framework.move(part, value)
            for name, tree in hidden.items():
                self._hidden[name].load(tree)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise MismatchError(where, [f"an attribute refused what the commit holds: {reason}"]) from error
        return differences

    def _cursor(self, name: str, order: SampleOrder) -> dict[str, Json]:
        cursor: dict[str, Json] = order.state_dict()
        if misfits := order.misfits(cursor, name):  # this would end all later starts
            raise StateError(
                f"state.{name}",
                f"its cursor could not be loaded again, so there is no commit: {'; '.join(misfits)}. Change "
                "the sampler's attributes by set_epoch(), record_batch() and load_state_dict() only",
            )
        return cursor

    def _fit(
        self,
        name: str,
        trees: Mapping[str, Any],
        cursors: Mapping[str, Any],
        ranks: Container[str],
        fitting: dict[str, Any],
    ) -> list[str]:
        """Add the fitting part of an attribute to ``fitting``; return a line for each difference."""
        value = self.values[name]
        theirs, mine = _kind(name, ranks, cursors), _kind(name, self.per_rank, self.orders)
        if theirs != mine:
            return [f"{name}: {theirs} in the commit, {mine} in this state"]
        differences: list[str] = []
        if name in self.orders:
            differences = value.order.misfits(cursors[name], name)
            if not differences:
                fitting[name] = cursors[name]
        elif name in self.per_rank:
            pass  # `RankLocalState` restores it
        elif not self._framework.is_component(value):
            fitting[name] = trees[name]
        elif trees[name] is None:
            differences = [f"{name}: nothing in the commit, a {type(value).__name__} in this state"]
        else:
            fitting[name], differences = self._framework.fit(name, value, trees[name])
        return differences


def _kind(name: str, per_rank: Container[str], samplers: Container[str]) -> str:
    if name in per_rank:
        return "one for each rank"
    return "a sampler" if name in samplers else "one for all ranks"


# -- loading a commit outside of a job ---------------------------------------------------------------------


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
    if not wanted:
        raise ConfigError("load", "nothing to load into; pass model=, optimizer= or others by name")
    for name, value in wanted.items():
        if is_sampler(value) or not framework.is_component(value):
            raise ConfigError(
                name,
                f"a {type(value).__name__} can't be loaded into; the commit's value is in the result's "
                f"objects[{name!r}]",
            )
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


def _read(storage: Storage, commit: str | int | CommitId | None, only: set[str]) -> Snapshot:
    if commit is not None:
        found = inspection.find(storage, str(commit))
        return retried(SYSTEM_CLOCK, read_commit, storage, found, only)
    inspection.commits(storage)  # whether there is a root at all

    def skipped(passed_over: CommitId, reason: str, error: CheckpointError | None) -> None:
        if error is not None:  # and not merely one that is being written
            logger.warning("%s: skipping %s: %s", storage.url, passed_over, reason)

    snapshot = read_newest(storage, skipped, only)
    if snapshot is None:
        raise UnknownCommitError(storage.url, "it holds no complete commit yet", [])
    return snapshot
