"""The slots of a job on Ray: actors that hold them, where they are, and new ones for those that are lost."""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdrecover.errors import LaunchError
from hvdrecover.ray.actor import Place, Slot

logger = logging.getLogger(__name__)

_LOOK = 0.5  # seconds between looks at actors
_PAUSE = 5.0  # seconds until a slot is asked for again that could not be had
_END = 5.0  # seconds for the thread that looks


@dataclass(frozen=True)
class Request:
    """The request.

    Attributes:
        processes: how many slots there are to be at first, all at once.
        most: how many there may be, as room comes up.
        resources: of each slot, by Ray's names: ``{"CPU": 1, "GPU": 1}``.
        timeout: seconds for the first ones to be there.
    """

    processes: int
    most: int
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    timeout: float = 600.0


class Roster:
    """The slots.

    The first ones are bundles of a placement group, so that a job gets all of them or none. When a node is
    lost, Ray moves its bundles to another one, as soon as there is one. The others are actors that wait for
    room.

    Args:
        request: what slots to hold.
        folder: where it keeps `seats`, for `hvdrecover.ray.shell`, and `hosts`, for host discovery.

    Raises:
        LaunchError: there are not enough of them in time.
    """

    def __init__(self, request: Request, folder: Path) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self.seats, self.hosts = folder / "seats.json", folder / "hosts"
        self.key = secrets.token_hex(16)
        self._ray = ray
        self._request = request
        self._places: dict[int, Place] = {}  # by number of the slot, those that have come first first
        self._actors: dict[int, Any] = {}
        self._awaited: dict[Any, int] = {}  # references of what Ray is to answer: a place, or an end
        self._due: dict[int, float] = {}  # when to ask for a slot again
        self._draining: frozenset[str] = frozenset()
        self._problem = ""
        self._closed = threading.Event()
        bundle = dict(request.resources)
        self._group: Any = placement_group([bundle] * request.processes, strategy="PACK")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all slots back."""
        from ray.util.placement_group import remove_placement_group

        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_END)
        for actor in self._actors.values():
            self._ray.kill(actor)
        remove_placement_group(self._group)

    def _begin(self) -> None:
        request, deadline = self._request, time.monotonic() + self._request.timeout
        if not self._group.wait(request.timeout):
            room = f"has no room for {request.processes} slots of {dict(request.resources)} each"
            total = {name: amount for name, amount in self._ray.cluster_resources().items() if name.isalpha()}
            raise LaunchError("Ray", f"{room}, {total} in all, and has waited {request.timeout:g} s for more")
        for number in range(request.most):
            self._ask(number)
        while len(self._places) < request.processes:
            if time.monotonic() > deadline:
                started = f"only {len(self._places)} of {request.processes} slots have started"
                why = self._problem or "Ray says nothing"
                raise LaunchError("Ray", f"{started} in {request.timeout:g} s; {why}")
            self._look()
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # Ray is gone, say
                self._complain(f"Ray can't be asked: {error}")
                self._closed.wait(_PAUSE)

    def _look(self) -> None:
        """See which slots have come and gone since the last look."""
        now = time.monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            self._ask(number)
        self._note_draining()
        if not self._awaited:
            self._closed.wait(_LOOK)
            return
        answered, _ = self._ray.wait(list(self._awaited), timeout=_LOOK)
        for reference in answered:
            number = self._awaited.pop(reference)
            try:
                answer = self._ray.get(reference)
            except Exception as error:  # of many classes: the actor, its worker, its node is gone
                self._lost(number, str(error))
            else:
                self._answered(number, answer)

    def _note_draining(self) -> None:
        """Name no hosts that Ray is about to take away: processes then leave them at their next commit."""
        tables = importlib.import_module("ray._private.state").state  # nothing public tells
        draining = frozenset(getattr(tables, "get_draining_nodes", dict)())
        if draining != self._draining:
            self._draining = draining
            self._write()

    def _ask(self, number: int) -> None:
        """Have Ray make the actor of a slot, whenever there is room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._due.pop(number, None)
        amounts = dict(self._request.resources)
        options: dict[str, Any] = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0)}
        if number < self._request.processes:
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            options["scheduling_strategy"] = bundle
        kind = self._ray.remote(Slot).options(**options, resources=amounts, max_concurrency=2)
        self._actors[number] = actor = kind.remote(self.key)
        self._awaited[actor.place.remote()] = number

    def _answered(self, number: int, answer: Place | int) -> None:
        if isinstance(answer, Place):
            self._places[number] = answer
            self._awaited[self._actors[number].hold.remote()] = number
            self._write()
        else:
            self._lost(number, f"its seat has ended with exit code {answer}")

    def _lost(self, number: int, problem: str) -> None:
        """Ask for another slot in a lost one's place; after a pause, if it was never there."""
        place = self._places.pop(number, None)
        self._ray.kill(self._actors.pop(number))
        self._due[number] = time.monotonic() + (0.0 if place is not None else _PAUSE)
        if place is None:
            self._complain(f"Ray has not started a slot: {problem}")
            return
        logger.info("a slot on %s is lost: %s", place.host, problem.splitlines()[0] if problem else "")
        self._write()

    def _complain(self, problem: str) -> None:
        """Say what goes wrong, once."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s", problem)

    def _write(self) -> None:
        found = by_host(self._places.values())
        stay = by_host(place for place in self._places.values() if place.node not in self._draining)
        # First how to reach them, then that they are there.
        replace(self.seats, json.dumps({"key": self.key, "seats": found}))
        replace(self.hosts, "".join(f"{host}:{len(seats)}\n" for host, seats in stay.items()))


def by_host(places: Iterable[Place]) -> dict[str, list[dict[str, Any]]]:
    """The seats of each host, in the order of local ranks: that in which they have come."""
    found: dict[str, list[dict[str, Any]]] = {}
    for place in places:
        facts = {name: getattr(place, name) for name in ("address", "port", "interface", "devices")}
        found.setdefault(place.host, []).append(facts)
    return found


def replace(path: Path, text: str) -> None:
    """Write a file that only its owner may read, in one step."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.replace(path)
