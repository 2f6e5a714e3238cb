"""Horovod's elastic driver: ``horovodrun`` starts guardians, and brings training processes together.

Each slot is *recorded* when its training process waits in ``hvd.init()``, or its guardian has ended. When all
slots are, the driver decides, as Horovod 0.28.1 does:

1. If a guardian has ended with 0, or all have failed, the job ends.
2. The hosts of other failures rest for a while, and are left out.
3. If hosts have come or gone, the slots change: guardians are started on new hosts, and processes of hosts
   that leave learn that they were removed. If hosts are too few, the driver waits.
4. Otherwise the processes rendezvous.

The driver sees no process that a guardian replaces in place.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdrecover.state.state import State
from tests.simulation.horovod import Ring, SimulatedWorld
from tests.simulation.scheduler import Process
from tests.simulation.system import Running

if TYPE_CHECKING:
    from tests.simulation.cluster import Job

_TERMINATION = 5.0  # seconds from SIGTERM to SIGKILL for guardians on this host
_WAITING = 120.0  # seconds for enough hosts; Horovod's --elastic-timeout
_REST = 10.0  # seconds for which a host that has failed is left out; doubled with each failure
_SSH = 255  # exit code of a connection that was lost


@dataclass(eq=False)
class Slot:
    """A place for a process on a host."""

    driver: Driver
    host: str
    number: int
    guardian: Running  # its process
    world: SimulatedWorld | None = None  # its training process that lives, as Horovod sees it
    code: int | None = None  # how its guardian has ended, as the driver knows

    @property
    def name(self) -> str:
        return f"{self.host}:{self.number}"

    @property
    def is_reachable(self) -> bool:
        return self.driver.reaches(self.host)

    @property
    def is_removed(self) -> bool:
        """Whether the driver says that it no longer counts on it."""
        return self not in self.driver.slots and self.is_reachable and not self.driver.is_over

    @property
    def is_recorded(self) -> bool:
        world = self.world
        waits = world is not None and world.at_init and world.ring is None and not world.refused
        return self.code is not None or (waits and self.is_reachable)


class Driver:
    """One ``horovodrun``."""

    def __init__(self, job: Job, process: Running) -> None:
        self.job = job
        self.process = process
        self.slots: list[Slot] = []  # that the driver counts on, in the order of ranks
        self.states: dict[Process, State] = {}  # of each process, to be told of changes of hosts
        self.result: int | None = None  # its exit code, once it has decided
        self._resting: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._waits = False

    def run(self) -> int:
        """Run until the job ends; return the exit code."""
        cluster, scheduler = self.job.cluster, self.job.cluster.scheduler
        scheduler.sleep(scheduler.dice.uniform(0.2, 1.0))
        self._resume()
        scheduler.wait(lambda: self.result is not None)
        local = [slot.guardian for slot in self.slots if slot.host == self.process.host]
        for guardian in local:
            cluster.system.send(guardian, signal.SIGTERM)
        scheduler.wait(lambda: all(guardian.dead for guardian in local), _TERMINATION)
        for guardian in local:
            cluster.system.send(guardian, signal.SIGKILL)
        assert self.result is not None
        return self.result

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.process.dead

    @property
    def worlds(self) -> list[SimulatedWorld]:
        """The training processes that live."""
        return [slot.world for slot in self.slots if slot.world is not None]

    def uses(self, host: str) -> bool:
        """Return whether a host is used, if it can be: it may rest, or not belong to the job any more."""
        rests = self._resting.get(host, 0.0) + _REST > self.job.cluster.scheduler.now
        left_out = host not in self.job.hosts or not self.reaches(host)
        return self.is_over or rests or left_out or any(slot.host == host for slot in self.slots)

    def reaches(self, host: str) -> bool:
        """Return whether a host is there, and not cut off from this one."""
        here, lost = self.process.host, self.job.cluster.lost
        return host == here or lost.isdisjoint((here, host))

    def meet(self) -> None:
        """Decide what follows if all slots are recorded."""
        slots = self.slots
        if self.is_over or self._waits or not slots or not all(slot.is_recorded for slot in slots):
            return
        now, codes = self.job.cluster.scheduler.now, [slot.code for slot in slots]
        failed = {slot.host for slot in slots if slot.code}
        for host in sorted(failed):
            self._failures[host] = self._failures.get(host, 0) + 1
            self._resting[host] = now + _REST * 2.0 ** self._failures[host]
        if 0 in codes:
            self.result = int(any(codes))
        elif all(codes) or all(slot.host in failed for slot in slots):
            self.result = 1
        else:
            self._resume()

    def host_comes(self, host: str) -> None:
        """Notify the processes of a new host, when it may be used."""
        rest = max(0.0, self._resting.get(host, 0.0) - self.job.cluster.scheduler.now)

        def tell() -> None:
            if self.reaches(host) and not any(slot.host == host for slot in self.slots):
                self._tell(2)

        self.job.cluster.later(rest + 1.0, tell)

    def host_goes(self, host: str) -> None:
        """Notify the processes that a host is to leave; it does at the next rendezvous."""
        self._tell(1)

    def hosts_are_lost(self) -> None:
        """Let ssh notice which hosts are off, or cannot be reached from here."""
        for slot in self.slots:

            def notice(slot: Slot = slot) -> None:
                if slot.code is None and (slot.guardian.dead or not slot.is_reachable):
                    self.ends(slot, _SSH)

            if not slot.is_reachable:
                self.job.cluster.later(self.job.cluster.scheduler.dice.uniform(4.0, 10.0), notice)

    def ends(self, slot: Slot, code: int) -> None:
        """A guardian has ended, or is taken for lost."""
        slot.code = code
        self.meet()

    def leaves(self, slot: Slot, world: SimulatedWorld) -> None:
        """A training process has ended; at an unlucky moment, the rendezvous of the others fails."""
        dice = self.job.cluster.scheduler.dice
        world.leave(torn=world.process.returncode != 0)
        self.states.pop(world.process, None)
        if slot.world is world:
            slot.world = None
        if world.at_init and dice.random() < 0.5:
            for other in self.worlds:
                other.refused = other.at_init

    def _resume(self) -> None:
        """Fit the slots to the hosts, and let the processes rendezvous if all are there."""
        cluster, job, hosts = self.job.cluster, self.job, self._usable_hosts()
        old = {(slot.host, slot.number): slot for slot in self.slots if slot.code is None}
        places = [(host, number) for host in hosts for number in range(job.per_host)]
        places.sort(key=lambda place: place not in old)
        if len(places) < job.least:
            self._wait_for_hosts()
            return
        for place, slot in old.items():
            if place not in places and slot.world is not None and slot.is_reachable:
                slot.world.removed = True
        before, self.slots = self.slots, []
        new = [place for place in places if place not in old]
        for place in places:
            self.slots.append(old.get(place) or self._start(*place))
        if new or len(before) > len(self.slots):
            cluster.say(f"job {job.name}: {', '.join(slot.name for slot in self.slots)}")
        if not new and all(slot.is_recorded for slot in self.slots):
            self._bring_together()

    def _usable_hosts(self) -> list[str]:
        cluster = self.job.cluster
        there = [host for host in self.job.hosts if self.reaches(host)]
        return [host for host in there if self._resting.get(host, 0.0) <= cluster.scheduler.now]

    def _bring_together(self) -> None:
        worlds = self.worlds
        self.job.rendezvous += 1
        ring = Ring(worlds)
        names = ", ".join(world.process.name for world in worlds)
        self.job.cluster.say(f"job {self.job.name}: rendezvous of {names}")
        for rank, world in enumerate(worlds):
            world.joins(ring, rank)

    def _wait_for_hosts(self) -> None:
        cluster = self.job.cluster
        until = cluster.scheduler.now + _WAITING
        cluster.say(f"job {self.job.name}: waits for hosts")
        self._waits = True

        def wait() -> None:
            while not self.is_over:
                if len(self._usable_hosts()) * self.job.per_host >= self.job.least:
                    self._waits = False
                    self._resume()
                    return
                if cluster.scheduler.now > until:
                    self.result = 1
                    return
                cluster.scheduler.sleep(1.0)

        cluster.later(0.0, wait)

    def _start(self, host: str, number: int) -> Slot:
        cluster, system = self.job.cluster, self.job.cluster.system
        is_local = host == self.process.host
        name = f"{self.job.name} {host}:{number} guardian"
        guardian = Running(cluster.scheduler, name, host, self.process if is_local else None)
        guardian.skew = cluster.skews.get(host, 0.0)
        guardian.environ = self.job.guardian_environment(self.process.environ, host, number)
        slot = Slot(self, host, number, guardian)
        guardian.at_end.append(lambda: self._guardian_ended(slot))
        system.spawn(guardian, cluster.guard)
        cluster.slots[guardian] = slot
        return slot

    def _guardian_ended(self, slot: Slot) -> None:
        code = slot.guardian.returncode
        assert code is not None
        if slot.code is None and slot.is_reachable:
            self.job.cluster.later(0.0, lambda: self.ends(slot, code if code >= 0 else 128 - code))

    def _tell(self, update: int) -> None:
        for process, state in list(self.states.items()):

            def tell(state: State = state) -> None:
                state.on_hosts_updated(0.0, update)

            self.job.cluster.scheduler.start(process, "notification", tell)
