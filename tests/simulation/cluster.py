"""Jobs on hosts: the driver that brings processes together, and what restarts them.

`Job` stands for one `hvdrecover run`: Horovod's driver, a guardian for each slot, and the supervisor.

- A process that dies is replaced in place, and waits for the others in `SimulatedWorld.init`.
- If a host is lost, its slots go. If it comes back, new processes join, and the others are told.
- If no process is left, or one ends with an error, all start again. A job whose root was taken by another job
  ends.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdrecover import error_kinds, heartbeat
from hvdrecover.config import Config
from hvdrecover.errors import FencedError, OvertakenError, RemovedError
from hvdrecover.heartbeat import Stop
from hvdrecover.state.leaving import Preempted
from hvdrecover.state.state import State
from tests.simulation.disk import URL, Disk
from tests.simulation.horovod import Ring, SimulatedWorld
from tests.simulation.scheduler import Died, Process, Scheduler, told

RESTARTS = 40  # of a job; far more than faults can cause
_STALL = 30.0  # seconds after which collectives give up a rank that says nothing
_GRACE = 60.0  # seconds for the other processes to end when one has finished

_CONFIG = Config(elastic=True, launched=True)

Script = Callable[["Cluster", SimulatedWorld, Config], None]


@dataclass(eq=False)
class Slot:
    """A place for a process on a host."""

    host: str
    number: int
    world: SimulatedWorld | None = None
    finished: bool = False


@dataclass(eq=False)
class Job:
    """One job.

    Attributes:
        slots: that the driver counts on, in the order of ranks.
        states: of each process, to be told of changes of hosts.
        restarts: how often all processes were started again.
        outcome: ``finished``, ``replaced`` or empty.
    """

    cluster: Cluster
    name: str
    identity: str
    hosts: list[str]
    per_host: int
    slots: list[Slot] = field(default_factory=list)
    states: dict[Process, State] = field(default_factory=dict)
    restarts: int = 0
    rendezvous: int = 0
    outcome: str = ""
    claimed: bool = False
    _earlier: list[Slot] = field(default_factory=list)  # whose processes may still live
    _starting: bool = False
    _finishing: bool = False

    # -- the supervisor ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start processes on all hosts that are there."""
        if self.outcome:
            return
        self._starting = self._finishing = False
        hosts = [host for host in self.hosts if host not in self.cluster.lost]
        self.slots = [Slot(host, number) for host in hosts for number in range(self.per_host)]
        if not hosts:
            self._starting = True
            self.cluster.later(10.0, self.start)
        for slot in self.slots:
            self._launch(slot)

    def restart(self, reason: str, grace: float = 0.5) -> None:
        """End all processes, and start them again after a pause, which grows."""
        if self._starting or self._finishing or self.outcome:
            return
        self._starting = True
        self.restarts += 1
        self.cluster.say(f"job {self.name}: {reason}; all processes start again")
        if self.restarts > RESTARTS:
            self.cluster.scheduler.fail(f"job {self.name} was started {self.restarts} times: {reason}")

        def again() -> None:
            self.kill_all()
            self.cluster.scheduler.sleep(min(300.0, 2.5 * 2**self.restarts))
            self.start()

        self.cluster.later(grace, again)

    def relaunch(self) -> None:
        """The job is started again, and its processes, which are out of reach, live on for a while."""
        slots, self.slots = self.slots, []
        self._earlier += slots
        for slot in slots:
            seconds = self.cluster.scheduler.dice.uniform(1.0, 60.0)
            self.cluster.later(seconds, functools.partial(self._lose, slot, "of an earlier start is killed"))
        self.start()

    def kill_all(self) -> None:
        for slot in self.slots:
            if slot.world is not None:
                self._lose(slot, "is killed with its job")

    def end(self, outcome: str) -> None:
        self.kill_all()
        self.outcome = outcome
        self.cluster.say(f"job {self.name}: {outcome}")
        self.cluster.job_ended()

    # -- guardians ---------------------------------------------------------------------------------------

    @property
    def worlds(self) -> list[SimulatedWorld]:
        """The processes that live."""
        return [slot.world for slot in self.slots if slot.world is not None]

    def _launch(self, slot: Slot, *, rejoins: bool = False) -> None:
        scheduler = self.cluster.scheduler
        process = Process(scheduler, f"{self.name} {slot.host}:{slot.number}", slot.host)
        process.skew = self.cluster.skews.get(slot.host, 0.0)
        world = slot.world = SimulatedWorld(self, slot, process)
        config = dataclasses.replace(
            _CONFIG,
            host=slot.host,
            local_rank=slot.number,
            job=self.identity,
            rejoins=rejoins,
            claimed=URL if self.claimed else None,
            near=self.cluster.near_folder(slot.host),
        )
        scheduler.say("starts" + (" in place of a lost process" if rejoins else ""), process)
        scheduler.start(process, "main", lambda: self._live(slot, world, config))

    def _live(self, slot: Slot, world: SimulatedWorld, config: Config) -> None:
        try:
            self.cluster.script(self.cluster, world, config)
        except Died:
            raise
        except (Preempted, RemovedError):
            self._ended(slot, world, "left")
        except BaseException as error:
            self.cluster.scheduler.say(f"ends with {told(error)[:300]}")
            self._ended(slot, world, "failed", error)
        else:
            self._ended(slot, world, "returned")

    def _ended(self, slot: Slot, world: SimulatedWorld, how: str, error: BaseException | None = None) -> None:
        self.cluster.scheduler.say(how)
        self._gone(slot, world)
        if slot not in self.slots:  # of an earlier start, or of a host that is lost
            if error is not None:
                self.cluster.invariants.process_failed(self, error)
        elif how == "returned":
            slot.finished = True
            if not self._finishing:
                self._finishing = True
                self.cluster.later(_GRACE, self._others_end)
            if not self.worlds:
                self.end("finished")
        elif error is not None:
            self.cluster.invariants.process_failed(self, error)
            kinds = error_kinds.kinds(error)
            if FencedError.__name__ in kinds and OvertakenError.__name__ not in kinds:
                self.cluster.later(1.0, lambda: self.outcome or self.end("replaced"))
            else:
                self.restart(f"{world.process.name} failed ({type(error).__name__})")
        elif world.process.left == "job":
            self.restart("the job leaves", _GRACE)
        else:
            self._removed(slot)

    def _others_end(self) -> None:
        if self._finishing and not self.outcome:
            self.end("finished")

    def _removed(self, slot: Slot) -> None:
        if slot in self.slots:
            self.slots.remove(slot)
        if not self.slots:
            self.restart("all have left")
        self.meet()

    def _gone(self, slot: Slot, world: SimulatedWorld, *, torn: bool = False) -> None:
        world.leave(torn=torn)
        self.states.pop(world.process, None)
        self.cluster.scheduler.kill(world.process)
        if slot.world is world:
            slot.world = None

    def _lose(self, slot: Slot, how: str) -> None:
        world = slot.world
        if world is not None:
            self.cluster.scheduler.say(how, world.process)
            self.cluster.invariants.process_died(world.process)
            self._gone(slot, world, torn=True)

    def kill(self, world: SimulatedWorld, how: str = "is killed") -> None:
        """Kill a process, and have its guardian replace it."""
        slot = world.slot
        if slot.world is not world:
            return
        at_init = world.at_init
        self._lose(slot, how)
        if at_init and self.cluster.scheduler.dice.random() < 0.5:
            for other in self.worlds:
                other.refused = other.at_init
        if self._finishing:
            return
        if not self.worlds:
            self.restart("no process is left")
        else:
            self.cluster.later(self.cluster.scheduler.dice.uniform(0.05, 3.0), lambda: self._replace(slot))

    def _replace(self, slot: Slot) -> None:
        if (
            slot in self.slots
            and slot.world is None
            and not (slot.finished or self._starting or self._finishing or self.outcome)
        ):
            self._launch(slot, rejoins=True)

    # -- the driver --------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Connect the processes if all that are counted on are there."""
        worlds = self.worlds
        if (
            len(worlds) < len(self.slots)
            or not worlds
            or not all(world.at_init and world.ring is None and not world.refused for world in worlds)
        ):
            return
        self.rendezvous += 1
        ring = Ring(worlds)
        names = ", ".join(world.process.name for world in worlds)
        self.cluster.say(f"job {self.name}: rendezvous of {names}")
        for rank, world in enumerate(worlds):
            world.joins(ring, rank)

    def lose_host(self, host: str, *, reachable: bool) -> None:
        """The host is lost; or it cannot be reached, and its processes live on for a while."""
        for slot in self._earlier:
            if slot.host == host and reachable:
                self._lose(slot, "is lost with its host")
        for slot in [slot for slot in self.slots if slot.host == host]:
            self.slots.remove(slot)
            if slot.world is None:
                continue
            if reachable:
                self.cluster.forget_memory(host)
                self._lose(slot, "is lost with its host")
            else:
                if slot.world.ring is not None:
                    slot.world.ring.tear()
                self._earlier.append(slot)
                how = "is lost: its host could not be reached"
                seconds = self.cluster.scheduler.dice.uniform(1.0, 100.0)
                self.cluster.later(seconds, functools.partial(self._lose, slot, how))
        if not self.worlds:
            self.restart("no host is left")
        else:
            self.meet()

    def add_host(self, host: str) -> None:
        """A host has come: start processes there, and notify the processes of the other hosts."""
        if host not in self.hosts:
            self.hosts.append(host)
        if self.outcome or self._starting or self._finishing or not self.worlds:
            return
        if any(slot.host == host for slot in self.slots):
            return
        self._tell(2)
        for number in range(self.per_host):
            slot = Slot(host, number)
            self.slots.append(slot)
            self._launch(slot)

    def remove_host(self, host: str) -> None:
        """A host is to leave: its processes end at the next rendezvous."""
        self._tell(1)
        for slot in [slot for slot in self.slots if slot.host == host]:
            self.slots.remove(slot)
            if slot.world is not None:
                slot.world.removed = True

    def _tell(self, update: int) -> None:
        for process, state in list(self.states.items()):

            def tell(state: State = state) -> None:
                state.on_hosts_updated(0.0, update)

            self.cluster.scheduler.start(process, "notification", tell)

    # -- faults ------------------------------------------------------------------------------------------

    def ask_to_stop(self, world: SimulatedWorld, stop: Stop) -> None:
        self.cluster.scheduler.start(world.process, "guardian", lambda: heartbeat.ask_to_stop(stop))

    def halt(self, world: SimulatedWorld, seconds: float) -> None:
        """Stop a process for a while. If that takes too long, the others give it up, and it is killed."""
        process = world.process
        process.stopped = True

        def then() -> None:
            if seconds > _STALL:
                self.cluster.scheduler.sleep(_STALL)
                if world.ring is not None:
                    world.ring.tear()
                self.cluster.scheduler.sleep(seconds - _STALL)
                if not process.dead and self.cluster.scheduler.dice.random() < 0.7:
                    self.kill(world, "is killed, as it hangs")
            else:
                self.cluster.scheduler.sleep(seconds)
            if not process.dead:
                process.stopped = False
                self.cluster.scheduler.say("continues", process)

        self.cluster.later(0.0, then)


class Cluster:
    """Hosts, a disk, and the jobs on them.

    Attributes:
        script: what each process runs.
        lost: hosts that are away.
        skews: seconds by which the wall clock of a host is ahead.
        at_collective: called when a process comes to a collective.
        invariants: checks that hold after every event.
        near: a folder for the near tiers of all hosts; None if jobs have none.
        handler_fails: whether the script's handler of log lines fails at the writer's next line.
    """

    def __init__(self, scheduler: Scheduler, script: Script, near: str | None = None) -> None:
        self.scheduler = scheduler
        self.script = script
        self.disk = Disk(scheduler)
        self.jobs: list[Job] = []
        self.lost: set[str] = set()
        self.skews: dict[str, float] = {}
        self.at_collective: Callable[[SimulatedWorld, str], None] = lambda world, name: None
        self.invariants: Any = None
        self.handler_fails = False
        self.near = near
        self._around = Process(scheduler, "", "")  # the driver, guardians and the supervisor never die

    def say(self, text: str) -> None:
        self.scheduler.say(text, self._around)

    def near_folder(self, host: str) -> str:
        """The folder of a host's near tier: real files, as the memory of a host outlives its processes."""
        return "off" if self.near is None else f"{self.near}/{host}"

    def forget_memory(self, host: str) -> None:
        """The host is switched off."""
        if self.near is not None:
            shutil.rmtree(f"{self.near}/{host}", ignore_errors=True)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something after a while."""

        def wait_and_do() -> None:
            self.scheduler.sleep(seconds)
            action()

        self.scheduler.start(self._around, "around", wait_and_do)

    def submit(self, name: str, hosts: list[str], per_host: int) -> Job:
        """Start a job."""
        identity = f"{self.scheduler.dice.getrandbits(64):016x}"
        job = Job(self, name, identity, hosts, per_host)
        self.jobs.append(job)
        self.later(0.0, job.start)
        return job

    def job_ended(self) -> None:
        """End the simulation when the last job has ended."""
        if all(job.outcome for job in self.jobs):
            self.scheduler.stop()
