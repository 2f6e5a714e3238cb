"""The attributes of a State: what is copied at a commit, and what a commit is loaded into."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.values import Json
from hvdrecover.data.order import SampleOrder
from hvdrecover.elastic.components import capture, is_copy, rebuild
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.errors import ConfigError, CorruptCheckpointError, MismatchError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Contents:
    """The tracked attributes of one State.

    Components (models, optimizers, whatever has ``state_dict`` and ``load_state_dict``) are loaded in place.
    Samplers give their cursor. All else is a plain object, which is replaced by a copy.

    Args:
        framework: the adapter.
        values: attribute name to value.
        reserved: names that an attribute can't have.
        on_iterate: called when an iteration of a sampler begins; see `hvdrecover.data.order.SampleOrder`.

    Raises:
        ConfigError: an attribute has a reserved or unusable name.
    """

    def __init__(
        self,
        framework: Framework,
        values: Mapping[str, Any],
        reserved: set[str],
        on_iterate: Callable[[], None] | None = None,
    ) -> None:
        self._framework = framework
        self._on_iterate = on_iterate
        self.values: dict[str, Any] = {}
        for name, value in values.items():
            if name in reserved or name.startswith("_") or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"state.{name}", "an attribute of a state can't have this name; choose another ASCII name"
                )
            self.put(name, value)

    def put(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self.values[name] = value
        if _is_sampler(value):
            value.order.on_iterate = self._on_iterate

    @property
    def orders(self) -> dict[str, SampleOrder]:
        """The sample orders of all samplers, by attribute name."""
        return {name: value.order for name, value in self.values.items() if _is_sampler(value)}

    def positions(self) -> dict[str, tuple[int, int]]:
        """Each sampler's epoch and cursor."""
        return {name: (order.epoch, order.done) for name, order in self.orders.items()}

    def capture(self, reuse: Mapping[str, Arena]) -> tuple[dict[str, Json], dict[str, Arena]]:
        """Copy all attributes; see `hvdrecover.elastic.components.capture`.

        Returns:
            ``attributes`` and ``samplers`` as JSON, and the arenas.
        """
        structure, arenas = capture(self._framework, self._trees(), reuse)
        return {"attributes": structure, "samplers": self._cursors()}, arenas

    def is_copy(self, state: Mapping[str, Json], arenas: Mapping[str, Arena]) -> bool:
        """Whether what `capture` gave is what it would give now, bit for bit."""
        return self._cursors() == state["samplers"] and is_copy(
            self._framework, state["attributes"], arenas, self._trees()
        )

    def load(
        self, state: Mapping[str, Json], arenas: Mapping[str, Arena], where: str, *, strict: bool
    ) -> list[str]:
        """Load what `capture` gave into the attributes.

        Args:
            state: the JSON part.
            arenas: the tensors.
            where: what to call the commit in an error.
            strict: whether all must fit; if not, what doesn't is left as it is.

        Returns:
            A line for each difference; empty if all fits.

        Raises:
            MismatchError: ``strict``, and something doesn't fit: nothing was loaded. Or a component refused
                what had seemed to fit.
            CorruptCheckpointError: the structure of the commit is nonsense. Nothing was loaded.
        """
        try:
            trees = {
                name: rebuild(self._framework, structure, arenas.get(name), own=self._keeps(name))
                for name, structure in state["attributes"].items()
            }
            cursors = dict(state["samplers"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                where, f"the structure of the commit can't be read: {error}"
            ) from error
        fitting, misfits = self._fit_trees(trees)
        places, misplaced = self._fit_cursors(cursors)
        differences = sorted([*self._missing({*trees, *cursors}), *misfits, *misplaced])
        if strict and differences:
            raise MismatchError(where, differences)
        try:
            self._apply(fitting, places)
        except Exception as error:
            raise MismatchError(where, [f"an attribute refused what the commit holds: {error}"]) from error
        return differences

    def _trees(self) -> dict[str, Any]:
        return {
            name: self._framework.tree(value) if self._framework.is_component(value) else value
            for name, value in self.values.items()
            if not _is_sampler(value)
        }

    def _cursors(self) -> dict[str, Json]:
        return {name: order.state_dict() for name, order in self.orders.items()}

    def _missing(self, stored: set[str]) -> list[str]:
        mine = set(self.values)
        return [
            *(f"{name}: in the commit, but not an attribute of this state" for name in stored - mine),
            *(f"{name}: an attribute of this state, but not in the commit" for name in mine - stored),
        ]

    def _fit_trees(self, trees: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        fitting: dict[str, Any] = {}
        differences: list[str] = []
        for name in [name for name in self.values if name in trees]:
            value, tree = self.values[name], trees[name]
            stateful = self._framework.is_component(value)
            if _is_sampler(value) or (stateful and tree is None):
                differences.append(
                    f"{name}: a {type(tree).__name__} in the commit, a {type(value).__name__} in this state"
                )
            elif not stateful:
                fitting[name] = tree
            else:
                fitting[name], found = self._framework.fit(name, value, tree)
                differences += found
        return fitting, differences

    def _fit_cursors(self, cursors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        fitting: dict[str, Any] = {}
        differences: list[str] = []
        for name in [name for name in self.values if name in cursors]:
            value = self.values[name]
            if not _is_sampler(value):
                differences.append(f"{name}: a sampler in the commit, a {type(value).__name__} in this state")
                continue
            try:
                copy.copy(value.order).load_state_dict(cursors[name], name)
            except MismatchError as error:
                differences += error.differences
            else:
                fitting[name] = cursors[name]
        return fitting, differences

    def _apply(self, fitting: Mapping[str, Any], cursors: Mapping[str, Any]) -> None:
        for name, tree in fitting.items():
            if self._framework.is_component(self.values[name]):
                self._framework.load(self.values[name], tree)
            else:
                self.values[name] = tree
        for name, order in self.orders.items():
            if name in cursors:
                order.load_state_dict(cursors[name], name)

    def _keeps(self, name: str) -> bool:
        """Whether an attribute keeps the very tensors that it is loaded from."""
        value = self.values.get(name)
        return not (self._framework.is_component(value) and self._framework.copies_on_load(value))


def _is_sampler(value: Any) -> bool:
    return isinstance(getattr(value, "order", None), SampleOrder)
