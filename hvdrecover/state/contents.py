"""The tracked attributes of a state. A commit copies them; a recovery loads a commit into them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.values import Json
from hvdrecover.data.order import SampleOrder, is_sampler
from hvdrecover.errors import ConfigError, CorruptCheckpointError, MismatchError, StateError
from hvdrecover.state.adapter import Framework, HiddenAttribute
from hvdrecover.state.rank_local import PerRank, Ranks, Shares, Value
from hvdrecover.state.trees import Copier, Part, rebuild

Strict = bool | Literal["components"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Present:
    """The contents of the attributes, taken apart but not copied.

    Attributes:
        parts: by attribute name, all but the samplers; with the hidden and the rank-local ones.
        cursors: the samplers' cursors by attribute name, as JSON.
    """

    parts: Mapping[str, Part]
    cursors: dict[str, Json]
    own: Mapping[str, Shares]

    def layouts(self) -> dict[str, Layout]:
        """Return where the tensors lie in a commit's files, by attribute name."""
        return {name: part.plan.layout for name, part in self.parts.items() if part.plan.layout is not None}

    def state(self) -> dict[str, Json]:
        """A commit's ``attributes``, ``samplers``, and the number of ranks of each rank-local value."""
        attributes = {name: part.structure for name, part in self.parts.items()}
        own = {"own": {name: shares.ranks for name, shares in self.own.items()}} if self.own else {}
        return {"attributes": attributes, "samplers": self.cursors, **own}


class Contents:
    """The tracked attributes of one State.

    Components (models, optimizers, other objects with ``state_dict`` and ``load_state_dict``) are loaded in
    place. Samplers give their cursor. Of a `PerRank`, a commit holds a dict of the ranks' states by rank. All
    else is a plain object, which is replaced by a copy.

    Args:
        reserved: names that an attribute cannot have.
        on_iterate: called when an iteration of a sampler begins.
        hidden: attributes that an adapter adds, by names that begin with an underscore.

    Attributes:
        on_record: each is called when a sampler's batch is recorded.
    """

    def __init__(
        self,
        framework: Framework,
        values: Mapping[str, Any],
        reserved: Container[str],
        on_iterate: Callable[[], None] | None = None,
        hidden: Mapping[str, HiddenAttribute] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._framework = framework
        self.copier = Copier(framework)
        self._on_iterate = on_iterate
        self.on_record: list[Callable[[SampleOrder, int], None]] = []
        self.values: dict[str, Any] = {}
        self.orders: dict[str, SampleOrder] = {}
        framework.attributes = self.values
        self._ranks = ranks or Ranks()
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
            value.order.on_record = self._recorded

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
        """Each component's rank-local tensors, such as running statistics."""
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
        cursors = {name: self._cursor(name, order) for name, order in self.orders.items()}
        return Present(self.copier.take_apart(trees), cursors, own)

    def is_copy(self, present: Present, state: Mapping[str, Json], arenas: Mapping[str, Arena]) -> bool:
        """Return whether a commit's state and arenas equal the present state, bit for bit."""
        return present.cursors == state["samplers"] and self.copier.is_copy(
            present.parts, state["attributes"], arenas
        )

    def load(
        self,
        state: Mapping[str, Json],
        arenas: Mapping[str, Arena],
        where: str,
        *,
        strict: Strict,
        give: bool = False,
    ) -> list[str]:
        """Load a commit into the attributes; return a line for each difference.

        Args:
            strict: True if all must fit, "components" if only models and optimizers must. Any other attribute
                that does not fit stays as it is. At least a part of each model and optimizer must fit.
            give: whether the attributes may keep the arenas' memory; no other part may use it then.

        Raises:
            MismatchError: something that must fit does not: nothing was loaded. Or a component refused a tree
                that had seemed to fit.
            CorruptCheckpointError: the structure of the commit is nonsense. Nothing was loaded.
        """
        try:
            # The script gets plain values as they are, so these need memory of their own.
            plain = {name for name in self.values if not give} - self.components().keys()
            structures, ranks = dict(state["attributes"]), set(state.get("own", ()))
            trees = {
                name: rebuild(
                    self._framework, structure, arenas.get(name), own=name in plain or name in self._hidden
                )
                for name, structure in structures.items()
                if name not in ranks
            }
            cursors = dict(state["samplers"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                where, f"the structure of the commit can't be read: {error}"
            ) from error
        hidden = {name: trees.pop(name, None) for name in self._hidden}
        names = {name for name in (*structures, *cursors) if not name.startswith("_")}
        absent = [
            f"{name}: in the commit, but not an attribute of this state"
            for name in names - self.values.keys()
        ]
        absent += [
            f"{name}: an attribute of this state, but not in the commit"
            for name in self.values.keys() - names
        ]
        fitting, misfits = self._fit_trees({**trees, **dict.fromkeys(ranks)}, ranks)
        places, misplaced = self._fit_cursors(cursors)
        differences = sorted([*absent, *misfits, *misplaced])
        if differences if strict is True else strict and misfits:
            raise MismatchError(where, differences)
        if nothing := [
            name
            for name, tree in fitting.items()
            if isinstance(tree, dict) and not tree and _holds_something(trees[name])
        ]:
            raise MismatchError(where, [*differences, *(f"{name}: nothing of it fits" for name in nothing)])
        try:
            self._apply(fitting, places, give)
            for name, tree in hidden.items():
                self._hidden[name].load(tree)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise MismatchError(where, [f"an attribute refused what the commit holds: {reason}"]) from error
        return differences

    def _cursor(self, name: str, order: SampleOrder) -> dict[str, Json]:
        """Return a sampler's cursor, after a check: an invalid one in a commit would end all later starts."""
        cursor: dict[str, Json] = order.state_dict()
        if misfits := order.misfits(cursor, name):
            raise StateError(
                f"state.{name}",
                f"its cursor could not be loaded again, so there is no commit: {'; '.join(misfits)}. Change "
                "the sampler's attributes by set_epoch(), record_batch() and load_state_dict() only",
            )
        return cursor

    def _recorded(self, order: SampleOrder, count: int) -> None:
        for listener in self.on_record:
            listener(order, count)

    def _fit_trees(self, trees: Mapping[str, Any], ranks: set[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the trees that fit, and a line for each difference; ``ranks`` names the rank-local ones."""
        kinds = {True: "one for each rank", False: "one for all ranks"}
        fitting: dict[str, Any] = {}
        differences: list[str] = []
        for name in [name for name in self.values if name in trees]:
            value, tree = self.values[name], trees[name]
            own = (name in ranks, name in self.per_rank)
            if own[0] != own[1]:
                differences.append(f"{name}: {kinds[own[0]]} in the commit, {kinds[own[1]]} in this state")
            elif is_sampler(value) or (tree is None and self._framework.is_component(value)):
                differences.append(
                    f"{name}: a {type(tree).__name__} in the commit, a {type(value).__name__} in this state"
                )
            elif self._framework.is_component(value):
                fitting[name], found = self._framework.fit(name, value, tree)
                differences += found
            elif not own[0]:
                fitting[name] = tree
        return fitting, differences

    def _fit_cursors(self, cursors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        fitting: dict[str, Any] = {}
        differences: list[str] = []
        for name in [name for name in self.values if name in cursors]:
            value = self.values[name]
            if not is_sampler(value):
                differences.append(f"{name}: a sampler in the commit, a {type(value).__name__} in this state")
                continue
            try:
                copy.copy(value.order).load_state_dict(cursors[name], name)
            except MismatchError as error:
                differences += error.differences
            else:
                fitting[name] = cursors[name]
        return fitting, differences

    def _apply(self, fitting: Mapping[str, Any], cursors: Mapping[str, Any], give: bool) -> None:
        for name, tree in fitting.items():
            if self._framework.is_component(self.values[name]):
                self._framework.load(self.values[name], tree, keep=give)
            else:
                self.values[name] = self._framework.move(tree, self.values[name])
        for name, order in self.orders.items():
            if name in cursors:
                order.load_state_dict(cursors[name], name)


def _holds_something(tree: Any) -> bool:
    """Return whether a commit holds anything for a component."""
    return hasattr(tree, "shape") or bool(tree)  # an empty array has no truth value
