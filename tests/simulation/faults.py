"""Faults, and when they strike: at a time, at a kind of operation, or shortly after another fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdrecover.heartbeat import Stop
from tests.simulation.cluster import Cluster, Job
from tests.simulation.horovod import SimulatedWorld

# How often each kind of fault is drawn, and of which storage operations a fault may strike at.
_KINDS = {
    "kill": 10,
    "kill_all": 4,
    "stop": 3,
    "cut": 2,
    "outage": 3,
    "slow": 2,
    "full": 2,
    "lost_answer": 3,
    "clock": 1,
    "preempt": 2,
    "second_job": 2,
    "copy": 2,
    "unmounted": 4,
    "handler": 1,
    "relaunch": 3,
}
_ELASTIC = {"host_lost": 4, "host_leaves": 2, "host_joins": 3, "partition": 4, "preempt_host": 2}
_OPERATIONS = ("list", "read", "write", "publish", "remove", "delete", "discard", "size")
_COLLECTIVES = ("hvdrecover.", "hvdrecover.header", "hvdrecover.snapshot", "hvdrecover.election", "gradient")


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: what happens.
        at: when: ``time``, ``disk``, ``collective``, or ``after`` the fault before it.
        what: the kind of operation, or how the collective's name begins.
        nth: seconds; or at which visit, or how many events after the fault before it.
        here: whether it strikes the process that is there, or any.
        seconds: how long it lasts.
    """

    kind: str
    at: str
    what: str
    nth: float
    here: bool
    seconds: float
    visits: int = 0
    fired: bool = False

    def __str__(self) -> str:
        where = {
            "time": f"at {self.nth:.1f} s",
            "disk": f"at the {self.nth:.0f}. {self.what} of storage",
            "collective": f"at the {self.nth:.0f}. collective {self.what}*",
            "after": f"{self.nth:.0f} events after the fault before it",
        }[self.at]
        return f"{self.kind} {where}"


def draw(dice: random.Random, *, elastic: bool, seconds: float) -> list[Fault]:
    """Draw the faults of one run, which takes about so many seconds undisturbed."""
    kinds = _KINDS | (_ELASTIC if elastic else {})
    count = dice.choices((0, 1, 2, 3, 4), (2, 30, 35, 20, 13))[0]
    faults = []
    for place in range(count):
        ways = ["time", "disk", "collective"] + 3 * ["after"] * (place > 0)
        at = dice.choice(ways)
        nth: float = {
            "time": dice.uniform(0, seconds * 1.2),
            "disk": int(dice.expovariate(1 / 12)) + 1,
            "collective": int(dice.expovariate(1 / 20)) + 1,
            "after": int(dice.expovariate(1 / 60)) + 1,
        }[at]
        what = dice.choice(_OPERATIONS if at == "disk" else _COLLECTIVES)
        kind = dice.choices(list(kinds), list(kinds.values()))[0]
        lasts = dice.choice((0.3, 3.0, 20.0, 70.0, 200.0)) * dice.uniform(0.5, 1.5)
        faults.append(Fault(kind, at, what, nth, dice.random() < 0.7, lasts))
    return faults


class Injector:
    """Has faults strike a cluster."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault]) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._faults = list(faults)
        self._last = 0  # the event of the last fault
        cluster.at_collective = self._at_collective
        cluster.disk.at_operation = self._at_operation
        cluster.scheduler.before_event = self._before_event
        for fault in faults:
            if fault.at == "time":
                cluster.later(fault.nth, lambda fault=fault: self._strike(fault, None))

    def _at_operation(self, kind: str, path: str) -> None:
        self._visit("disk", kind, None)

    def _at_collective(self, world: SimulatedWorld, name: str) -> None:
        self._visit("collective", name, world)

    def _visit(self, at: str, what: str, world: SimulatedWorld | None) -> None:
        for fault in self._faults:
            if not fault.fired and fault.at == at and what.startswith(fault.what):
                fault.visits += 1
                if fault.visits == fault.nth:
                    self._strike(fault, world or self._here())
        self._scheduler.check()

    def _before_event(self) -> None:
        before = True  # whether the fault before has struck
        for fault in self._faults:
            if (
                fault.at == "after"
                and not fault.fired
                and before
                and self._scheduler.events >= self._last + fault.nth
            ):
                self._strike(fault, None)
            before = fault.fired

    def _here(self) -> SimulatedWorld | None:
        mine = self._scheduler.process
        worlds = (world for job in self._cluster.jobs for world in job.worlds)
        return next((world for world in worlds if world.process is mine), None)

    def _strike(self, fault: Fault, world: SimulatedWorld | None) -> None:
        if fault.fired:
            return
        fault.fired = True
        self._last = self._scheduler.events
        dice = self._scheduler.dice
        jobs = [job for job in self._cluster.jobs if not job.outcome and job.worlds]
        if not jobs:
            return
        job = dice.choice(jobs)
        if world is None or not fault.here:
            world = dice.choice(job.worlds)
        job = world.job
        self._cluster.say(f"FAULT: {fault}")
        self._cluster.invariants.faults[fault.kind] += 1
        action: Callable[[Fault, Job, SimulatedWorld], None] = getattr(self, f"_{fault.kind}")
        action(fault, job, world)

    # -- what happens ------------------------------------------------------------------------------------

    def _kill(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        job.kill(world)

    def _kill_all(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        job.kill_all()
        if not job._finishing:
            job.restart("all processes were killed")
        elif not job.outcome:
            self._cluster.later(0.0, job._others_end)

    def _stop(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._scheduler.say(f"is stopped for {fault.seconds:.1f} s", world.process)
        job.halt(world, fault.seconds)

    def _cut(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if world.ring is not None:
            world.ring.tear()

    def _outage(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._cluster.disk.fails_until = self._scheduler.now + fault.seconds

    def _slow(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._cluster.disk.slow_until = self._scheduler.now + fault.seconds

    def _full(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        disk = self._cluster.disk
        disk.capacity = disk.used + self._scheduler.dice.randrange(2000)

        def freed() -> None:
            disk.capacity = float("inf")

        self._cluster.later(fault.seconds, freed)

    def _lost_answer(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._cluster.disk.lost_answers += 1

    def _unmounted(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if job.claimed and len(self._cluster.jobs) == 1:  # a new job could only start from the beginning
            self._cluster.disk.unmount()
            self._cluster.later(fault.seconds, self._cluster.disk.mount)

    def _handler(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._cluster.handler_fails = True
        self._cluster.disk.fails_until = self._scheduler.now + 2.0

    def _copy(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        world.framework.tear = self._scheduler.dice.randrange(3)

    def _clock(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        world.process.skew += self._scheduler.dice.choice((-86400.0, -1.0, 3600.0))
        self._cluster.skews[world.process.host] = world.process.skew

    def _preempt(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        job.ask_to_stop(world, Stop.JOB)

    def _preempt_host(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        job.ask_to_stop(world, Stop.HOST)

    def _second_job(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if len(self._cluster.jobs) == 1 and self._cluster.disk.unmounted is None:
            self._cluster.submit("B", [f"b{host}" for host in job.hosts], job.per_host)

    def _relaunch(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if not job._finishing and not job._starting:
            job.relaunch()

    def _host_lost(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._lose(fault, job, world, reachable=True)

    def _partition(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._lose(fault, job, world, reachable=False)

    def _lose(self, fault: Fault, job: Job, world: SimulatedWorld, *, reachable: bool) -> None:
        host = world.process.host
        self._cluster.lost.add(host)

        def back() -> None:
            self._cluster.lost.discard(host)
            self._cluster.say(f"{host} is back")
            job.add_host(host)

        self._cluster.later(fault.seconds, back)
        job.lose_host(host, reachable=reachable)

    def _host_leaves(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if len({slot.host for slot in job.slots}) > 1:
            job.remove_host(world.process.host)

    def _host_joins(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        job.add_host(f"h{len(job.hosts) + 1}")
