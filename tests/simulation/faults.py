"""Faults, and when they strike: at a time, at a kind of operation, or shortly after another fault."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdrecover.heartbeat import Phase
from hvdrecover.launch.waits import KILLED
from tests.simulation.cluster import HANG_TIMEOUT, STARTUP_TIMEOUT, Cluster, Job
from tests.simulation.horovod import SimulatedWorld
from tests.simulation.system import Running

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
    "kill_any": 8,
    "stop_any": 3,
    "cut_link": 2,
    "exit": 2,
    "hang": 2,
}
_OF_ANY = ("kill_any", "stop_any")  # strike any process of a job; the others a training process
_ELASTIC = {"host_lost": 4, "host_leaves": 2, "host_joins": 3, "partition": 4, "preempt_host": 2}
_OPERATIONS = ("list", "read", "write", "publish", "remove", "delete", "discard", "size")
_REPLACED_WITHIN = 60.0  # seconds from the end of a process to its successor
_UNLIMITED = (Phase.PLAIN, Phase.FINISHED)  # a process may be silent there for a day, or for ever
_USED_WITHIN = 60.0  # seconds without a fault until a host that is back is used
_CALLS = ("start", "signal", "connect", "send")
_COLLECTIVES = ("hvdrecover.", "hvdrecover.header", "hvdrecover.snapshot", "hvdrecover.election", "gradient")


@dataclass
class Fault:
    kind: str  # what happens
    at: str  # when: ``time``, ``disk``, ``collective``, ``call`` of the system, or ``after`` another fault
    what: str  # the kind of operation or call, or how the collective's name begins
    nth: float  # seconds; or at which visit, or how many events after the fault before it
    here: bool  # whether it strikes the process that is there, or any
    seconds: float  # how long it lasts
    visits: int = 0
    fired: bool = False

    def __str__(self) -> str:
        where = {
            "time": f"at {self.nth:.1f} s",
            "disk": f"at the {self.nth:.0f}. {self.what} of storage",
            "collective": f"at the {self.nth:.0f}. collective {self.what}*",
            "call": f"at the {self.nth:.0f}. {self.what} of a process",
            "after": f"{self.nth:.0f} events after the fault before it",
        }[self.at]
        return f"{self.kind} {where}"


def draw(dice: random.Random, *, elastic: bool, seconds: float) -> list[Fault]:
    """Draw the faults of one run, which takes about so many seconds undisturbed."""
    kinds = _KINDS | (_ELASTIC if elastic else {})
    count = dice.choices((0, 1, 2, 3, 4), (2, 30, 35, 20, 13))[0]
    faults = []
    for place in range(count):
        ways = ["time", "disk", "collective", "call"] + 4 * ["after"] * (place > 0)
        at = dice.choice(ways)
        nth: float = {
            "time": dice.uniform(0, seconds * 1.2),
            "disk": int(dice.expovariate(1 / 12)) + 1,
            "collective": int(dice.expovariate(1 / 20)) + 1,
            "call": int(dice.expovariate(1 / 20)) + 1,
            "after": int(dice.expovariate(1 / 100)) + 1,
        }[at]
        what = dice.choice({"disk": _OPERATIONS, "call": _CALLS}.get(at, _COLLECTIVES))
        kind = dice.choices(list(kinds), list(kinds.values()))[0]
        lasts = dice.choice((0.3, 3.0, 20.0, 70.0, 200.0)) * dice.uniform(0.5, 1.5)
        faults.append(Fault(kind, at, what, nth, dice.random() < 0.7, lasts))
    return faults


class Injector:
    """Has faults strike a cluster."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], *, plain: bool) -> None:
        self._cluster = cluster
        self._is_plain = plain
        self._scheduler = cluster.scheduler
        self._faults = list(faults)
        self._last = 0  # the event of the last fault
        self._last_time = 0.0  # when it struck, or when the stop of a process ends
        cluster.at_collective = self._at_collective
        cluster.disk.at_operation = lambda kind, path: self._visit("disk", kind, self._here())
        cluster.system.at_call = lambda name: self._visit("call", name, self._here())
        cluster.scheduler.before_event = self._before_event
        for fault in faults:
            if fault.at == "time":
                cluster.later(fault.nth, lambda fault=fault: self._strike(fault, None))

    def _at_collective(self, world: SimulatedWorld, name: str) -> None:
        self._visit("collective", name, world.process)

    def _visit(self, at: str, what: str, process: Running | None) -> None:
        for fault in self._faults:
            if not fault.fired and fault.at == at and what.startswith(fault.what):
                fault.visits += 1
                if fault.visits == fault.nth:
                    self._strike(fault, process)
        self._scheduler.check()

    def _before_event(self) -> None:
        before = True  # whether the fault before has struck
        for fault in self._faults:
            follows = fault.at == "after" and before and self._scheduler.events >= self._last + fault.nth
            if follows and not fault.fired:
                self._strike(fault, None)
            before = fault.fired

    def _here(self) -> Running | None:
        process = self._scheduler.process
        return process if isinstance(process, Running) else None

    def _strike(self, fault: Fault, process: Running | None) -> None:
        """Have a fault strike a process, if it is given; else any one of a job."""
        if fault.fired:
            return
        fault.fired = True
        self._last = self._scheduler.events
        self._last_time = max(self._last_time, self._scheduler.now)
        dice = self._scheduler.dice
        jobs = [job for job in self._cluster.jobs if not job.outcome and job.processes]
        if not jobs:
            return
        job = self._cluster.job_of(process) if process is not None and fault.here else dice.choice(jobs)
        if process is None or not fault.here:
            process = dice.choice(job.processes)
        world = self._cluster.training.get(process)
        if world is None or world not in job.worlds:
            world = dice.choice(job.worlds) if job.worlds else None
        if fault.kind in _OF_ANY:
            self._tell(fault)
            getattr(self, f"_{fault.kind}")(fault, process)
        elif world is not None and self._is_struck(fault, world):
            self._tell(fault)
            action: Callable[[Fault, Job, SimulatedWorld], None] = getattr(self, f"_{fault.kind}")
            action(fault, job, world)

    def _tell(self, fault: Fault) -> None:
        self._cluster.say(f"FAULT: {fault}")
        self._cluster.invariants.faults[fault.kind] += 1

    def _is_struck(self, fault: Fault, world: SimulatedWorld) -> bool:
        """Return whether a fault changes anything, or a user could tell how it ended."""
        if fault.kind == "exit":
            has_committed: bool = self._cluster.invariants.has_committed(world.process)
            return has_committed and not self._is_plain  # where 0 is the end of a script
        return fault.kind not in ("stop", "hang") or not world.process.hangs

    # -- what happens ------------------------------------------------------------------------------------

    def _kill(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._cluster.kill(world.process)

    def _kill_all(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        for each in job.worlds:
            self._cluster.kill(each.process)

    def _kill_any(self, fault: Fault, process: Running) -> None:
        self._cluster.kill(process)

    def _stop(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        guardian = world.process.parent
        self._halt(world.process, fault.seconds)

        def look() -> None:
            if guardian is None or guardian.dead or self._cluster.invariants.faults["stop_any"]:
                return
            page = self._cluster.pages[world.process]
            limited = not page.pauses and not page.paused and page.phase not in _UNLIMITED
            if world.process.stopped and limited and not world.process.hangs:
                self._scheduler.fail(f"{world.process.name} hangs, and is not killed")

        self._cluster.later(max(HANG_TIMEOUT, STARTUP_TIMEOUT) + 10.0, look)

    def _stop_any(self, fault: Fault, process: Running) -> None:
        if "horovodrun" not in process.name and not process.hangs:  # that is decided outside its process
            self._halt(process, fault.seconds)

    def _halt(self, process: Running, seconds: float) -> None:
        self._scheduler.say(f"is stopped for {seconds:.1f} s", process)
        self._last_time = max(self._last_time, self._scheduler.now + seconds)
        self._cluster.system.send(process, signal.SIGSTOP)

        def goes_on() -> None:
            if not process.dead:
                self._cluster.system.send(process, signal.SIGCONT)
                self._scheduler.say("continues", process)

        self._cluster.later(seconds, goes_on)

    def _exit(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        """End a process with exit code 0, as a wrapper does that hides how its program has ended."""
        self._scheduler.say("exits with 0", world.process)
        self._cluster.system.end(world.process, 0)

    def _hang(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        """Stop a process in the kernel, as a disk that hangs does: not even SIGKILL ends it until then."""
        process, seconds = world.process, 2 * HANG_TIMEOUT + fault.seconds
        self._scheduler.say(f"hangs in the kernel for {seconds:.1f} s", process)
        process.stopped = process.hangs = True

        def goes_on() -> None:
            process.stopped = process.hangs = False
            if process.is_doomed:
                self._cluster.kill(process)

        self._cluster.later(seconds, goes_on)
        self._cluster.later(seconds - 1.0, lambda: self._look_for_successor(process))

    def _look_for_successor(self, process: Running) -> None:
        """A guardian must not wait for a process that it cannot kill."""
        guardian, system, training = process.parent, self._cluster.system, self._cluster.training
        due = process.killed_at + KILLED + _REPLACED_WITHIN
        if guardian is None or self._scheduler.now < due or self._cluster.invariants.faults["stop_any"]:
            return
        if all(each is process or each not in training for each in system.children(guardian)):
            self._scheduler.fail(f"{process.name} cannot be killed, and is not replaced")

    def _cut(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if world.ring is not None:
            world.ring.tear()

    def _cut_link(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if world.process.parent is not None:
            for each in list(world.process.parent.sockets):
                self._scheduler.say("loses its connection", world.process.parent)
                each.break_off()

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
        if job.supervisor is not None:
            self._scheduler.say("gets SIGTERM", job.supervisor)
            self._cluster.system.send(job.supervisor, signal.SIGTERM)

    def _preempt_host(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        host = world.process.host
        self._cluster.say(f"the guardians on {host} get SIGTERM")
        for each in job.worlds:
            if each.process.host == host and each.process.parent is not None:
                self._cluster.system.send(each.process.parent, signal.SIGTERM)

    def _second_job(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if len(self._cluster.jobs) == 1 and self._cluster.disk.unmounted is None:
            hosts = [f"b{host}" for host in job.hosts]
            self._cluster.submit("B", hosts, job.per_host, least=job.least, head=hosts[0])

    def _relaunch(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        """Kill the driver while the guardians cannot be reached, and do not notice that for a while."""
        dice = self._scheduler.dice
        if job.driver is not None:
            for slot in job.driver.slots:
                for each in slot.guardian.sockets:
                    each.peer.lose(0.0)
                    each.lose(dice.uniform(1.0, 60.0))
                slot.guardian.parent = None
            self._cluster.kill(job.driver.process)

    def _host_lost(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._lose(fault, job, world, alive=False)

    def _partition(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        self._lose(fault, job, world, alive=True)

    def _lose(self, fault: Fault, job: Job, world: SimulatedWorld, *, alive: bool) -> None:
        host = world.process.host
        if host in self._cluster.lost:
            return

        def back() -> None:
            self._cluster.find_host(host)
            job.add_host(host)
            self._cluster.later(_USED_WITHIN, look)

        def look() -> None:
            driver = job.driver
            quiet = self._scheduler.now - self._last_time > _USED_WITHIN
            quiet = quiet and not self._cluster.invariants.storage_faults
            if quiet and driver is not None and not driver.uses(host):
                self._scheduler.fail(f"{host} is back, and is not used")

        self._cluster.later(fault.seconds, back)
        self._scheduler.say(f"{host} {'cannot be reached' if alive else 'is switched off'}")
        self._cluster.lose_host(host, alive=alive)

    def _host_leaves(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        if len(job.hosts) > 1:
            job.remove_host(world.process.host)

    def _host_joins(self, fault: Fault, job: Job, world: SimulatedWorld) -> None:
        job.add_host(f"h{len(job.hosts) + 1}")
