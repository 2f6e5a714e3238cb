"""The slots of a job: the pool starts an actor for each slot, and replaces the actors that are lost.

The first slots are bundles of a placement group, so a job gets all of them or none. When a node is lost, Ray
moves its bundles to another node as soon as there is room. Further slots are actors that wait for room.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdrecover.errors import LaunchError
from hvdrecover_ray.slot_actor import Slot, SlotActor

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between looks at the actors
_RETRY_SECONDS = 5.0  # before a slot that did not start is asked for again
_JOIN_SECONDS = 5.0  # for the thread to end


class SlotPool:
    """The pool.

    Attributes:
        key: key of the job, which protects the slot servers.
        slots_file: lists the slot servers of each host, for `hvdrecover_ray.remote_shell`.
        host_file: lists the hosts, for host discovery.

    Args:
        processes: number of slots at the start.
        most: largest number of slots.
        resources: of each slot, by Ray's names: ``{"CPU": 1, "GPU": 1}``.
        timeout: seconds to wait for the first slots.
        folder: for the two files.

    Raises:
        LaunchError: not enough slots started in time.
    """

    def __init__(
        self, processes: int, most: int, resources: Mapping[str, float], timeout: float, folder: Path
    ) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self.key = secrets.token_hex(16)
        self.slots_file, self.host_file = folder / "slots.json", folder / "hosts"
        self._ray = ray
        self._processes = processes
        self._resources = dict(resources)
        # These three are by the number of the slot.
        self._slots: dict[int, Slot] = {}  # in the order in which they started, which is that of local ranks
        self._actors: dict[int, Any] = {}
        self._retries: dict[int, float] = {}  # when to ask for a slot again
        self._awaited: dict[Any, int] = {}  # reference to an answer of an actor: number of its slot
        self._draining: frozenset[str] = frozenset()
        self._problem = ""
        self._closed = threading.Event()
        self._group: Any = placement_group([self._resources] * processes, strategy="PACK")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        try:
            self._start(most, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all slots back to Ray."""
        from ray.util.placement_group import remove_placement_group

        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        for actor in self._actors.values():
            self._ray.kill(actor)
        remove_placement_group(self._group)

    def _start(self, most: int, timeout: float) -> None:
        processes, deadline = self._processes, time.monotonic() + timeout
        if not self._group.wait(timeout):
            wanted = f"no room for {processes} slots of {self._resources} each"
            total = {name: amount for name, amount in self._ray.cluster_resources().items() if name.isalpha()}
            raise LaunchError("Ray", f"{wanted} within {timeout:g} s; the cluster has {total}")
        for number in range(most):
            self._ask(number)
        while len(self._slots) < processes:
            if time.monotonic() > deadline:
                problem = f"only {len(self._slots)} of {processes} slots started within {timeout:g} s"
                raise LaunchError("Ray", f"{problem}: {self._problem or 'Ray gives no reason'}")
            self._look()
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # for example, Ray has ended
                self._warn(f"Ray does not answer: {error}")
                self._closed.wait(_RETRY_SECONDS)

    def _look(self) -> None:
        """Update the slots by the answers that came since the last look."""
        now = time.monotonic()
        for number in [number for number, due in self._retries.items() if due <= now]:
            self._ask(number)
        self._update_draining()
        if not self._awaited:
            self._closed.wait(_LOOK_SECONDS)
            return
        answered, _ = self._ray.wait(list(self._awaited), timeout=_LOOK_SECONDS)
        for reference in answered:
            number = self._awaited.pop(reference)
            try:
                answer = self._ray.get(reference)
            except Exception as error:  # Ray has many classes for a lost actor, worker or node
                self._handle_loss(number, str(error))
                continue
            if isinstance(answer, Slot):
                self._slots[number] = answer
                self._awaited[self._actors[number].wait.remote()] = number
                self._write()
            else:
                self._handle_loss(number, f"its slot server ended with exit code {answer}")

    def _update_draining(self) -> None:
        """Leave out hosts that Ray is about to take away, so their processes leave at the next commit."""
        tables = importlib.import_module("ray._private.state").state  # no public function tells
        draining = frozenset(getattr(tables, "get_draining_nodes", dict)())
        if draining != self._draining:
            self._draining = draining
            self._write()

    def _ask(self, number: int) -> None:
        """Ask Ray for the actor of a slot. It starts as soon as there is room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._retries.pop(number, None)
        amounts = dict(self._resources)
        options: dict[str, Any] = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0)}
        if number < self._processes:
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            options["scheduling_strategy"] = bundle
        # Two calls at once: `wait` runs for as long as the actor lives.
        actor_class = self._ray.remote(SlotActor).options(**options, resources=amounts, max_concurrency=2)
        self._actors[number] = actor = actor_class.remote(self.key)
        self._awaited[actor.slot.remote()] = number

    def _handle_loss(self, number: int, problem: str) -> None:
        """Replace a lost slot at once. If the slot never started, wait before the next try."""
        slot = self._slots.pop(number, None)
        self._ray.kill(self._actors.pop(number))
        if slot is None:
            self._retries[number] = time.monotonic() + _RETRY_SECONDS
            self._warn(f"a slot did not start: {problem}")
            return
        self._retries[number] = time.monotonic()
        logger.info("lost a slot on %s: %s", slot.host, problem.partition("\n")[0])
        self._write()

    def _warn(self, problem: str) -> None:
        """Log a problem, but not twice in a row."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s", problem)

    def _write(self) -> None:
        hosts = by_host(self._slots.values())
        staying = by_host(slot for slot in self._slots.values() if slot.node not in self._draining)
        # A host must be reachable before it is listed.
        replace_file(self.slots_file, json.dumps({"key": self.key, "hosts": hosts}))
        replace_file(self.host_file, "".join(f"{host}:{len(slots)}\n" for host, slots in staying.items()))


def by_host(slots: Iterable[Slot]) -> dict[str, list[dict[str, Any]]]:
    """Return the slot servers of each host, in the order of local ranks."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for slot in slots:
        facts = {name: getattr(slot, name) for name in ("address", "port", "interface", "devices")}
        hosts.setdefault(slot.host, []).append(facts)
    return hosts


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically. Only its owner can read it."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.replace(path)
