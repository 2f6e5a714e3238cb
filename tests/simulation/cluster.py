"""Jobs on hosts. The code of their supervisors, guardians and training processes is the real one.

`Job` is a user's job: a supervisor on one host, which starts Horovod's driver (`driver.Driver`), which starts
a guardian for each slot, which starts training processes and standbys. Who submits it starts it again when
the supervisor has ended and the training is not finished, as a batch system or a person does.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover import config as configs
from hvdrecover import error_kinds, heartbeat
from hvdrecover.config import FENCED, Config
from hvdrecover.errors import HvdrecoverError
from hvdrecover.heartbeat import Page, Phase
from hvdrecover.launch.guardian import Guardian
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.supervisor import Supervisor
from tests.simulation.disk import Disk
from tests.simulation.driver import Driver, Slot
from tests.simulation.horovod import SimulatedWorld
from tests.simulation.scheduler import Died, Scheduler, SimulatedClock, told
from tests.simulation.system import Running, System

SUBMISSIONS = 40  # of a job; far more than faults can cause
HANG_TIMEOUT = 100.0
STARTUP_TIMEOUT = 180.0

_COMMAND = ["python", "train.py"]
_SETTINGS = {
    "HVDRECOVER_HANG_TIMEOUT": f"{HANG_TIMEOUT:g}",
    "HVDRECOVER_STARTUP_TIMEOUT": f"{STARTUP_TIMEOUT:g}",
    "HVDRECOVER_EVENTS": "/run",
}

Script = Callable[["Cluster", SimulatedWorld, Config], None]


class Job:
    """One job."""

    def __init__(
        self, cluster: Cluster, name: str, hosts: list[str], per_host: int, least: int, head: str
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.hosts = hosts  # that discovery names
        self.per_host = per_host  # slots of each
        self.least = least  # ranks that suffice
        self.head = head  # the host of the supervisor
        self.supervisor: Running | None = None
        self.drivers: list[Driver] = []  # of all starts, in the order of time
        self.submissions = 0  # how often it was started from outside
        self.rendezvous = 0  # how often ranks have met
        self.outcome = ""  # ``finished``, ``replaced`` or empty
        self.claimed = False  # whether a commit was made durable since then

    @property
    def driver(self) -> Driver | None:
        """The present driver."""
        return self.drivers[-1] if self.drivers and not self.drivers[-1].process.dead else None

    @property
    def worlds(self) -> list[SimulatedWorld]:
        """The training processes that live, and that the driver counts on."""
        return self.driver.worlds if self.driver is not None else []

    @property
    def processes(self) -> list[Running]:
        """All its processes that live."""
        return [each for each in self.cluster.system.living if each.name.startswith(f"{self.name} ")]

    @property
    def is_whole(self) -> bool:
        """Whether the guardians of all slots of the last start have ended with a finished training."""
        return bool(self.drivers) and all(slot.code == 0 for slot in self.drivers[-1].slots)

    def submit(self) -> None:
        """Start the supervisor, when its host is there."""
        cluster = self.cluster
        if self.head in cluster.lost:
            cluster.later(5.0, self.submit)
            return
        self.submissions += 1
        self.claimed = False  # as far as the new supervisor knows
        cluster.disk.mount()  # a root that is not mounted looks like a fresh one to a new supervisor
        if self.submissions > SUBMISSIONS:
            cluster.scheduler.fail(f"job {self.name} was submitted {self.submissions} times")
        supervisor = self.supervisor = Running(cluster.scheduler, f"{self.name} supervisor", self.head)
        supervisor.skew = cluster.skews.get(self.head, 0.0)
        supervisor.at_end.append(lambda: self._ended(supervisor))
        cluster.system.spawn(supervisor, self._supervise)

    def _supervise(self, process: Running) -> int:
        hosts = ",".join(f"{host}:{self.per_host}" for host in self.hosts)
        options = Options(len(self.hosts) * self.per_host, self.least, hosts=hosts, interfaces=("eth0",))
        config = configs.read(_SETTINGS)
        clock = SimulatedClock(self.cluster.scheduler)
        return Supervisor(_COMMAND, options, _SETTINGS, config, clock=clock).run()

    def _ended(self, supervisor: Running) -> None:
        code = supervisor.returncode
        outcome = {0: "finished", FENCED: "replaced"}.get(code or 0)
        self.cluster.say(f"job {self.name}: hvdrecover run has ended with {code}")
        if outcome is None:
            self.cluster.later(self.cluster.scheduler.dice.uniform(1.0, 30.0), self.submit)
            return
        self.outcome = outcome
        self.cluster.job_ended()

    def guardian_environment(self, environ: Mapping[str, str], host: str, number: int) -> dict[str, str]:
        """Return the environment of a guardian, from its driver's."""
        handed_on = {name: value for name, value in environ.items() if name.startswith("HVDRECOVER_")}
        return {
            **handed_on,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_RANK": "0",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_LOCAL_RANK": str(number),
            "HVDRECOVER_NEAR": self.cluster.near_folder(host),
        }

    # -- changes of hosts --------------------------------------------------------------------------------

    def add_host(self, host: str) -> None:
        """A host has come, or can be reached again."""
        if host not in self.hosts:
            self.hosts.append(host)
        if self.driver is not None:
            self.driver.meet()
            self.driver.host_comes(host)

    def remove_host(self, host: str) -> None:
        """A host is to leave."""
        self.hosts.remove(host)
        if self.driver is not None:
            self.driver.host_goes(host)


class Cluster:
    """Hosts, a disk, and the jobs on them."""

    def __init__(self, scheduler: Scheduler, script: Script, near: str | None = None) -> None:
        self.scheduler = scheduler
        self.system = System(scheduler)
        self.system.program = self._run
        self.script = script  # what each training process runs
        self.disk = Disk(scheduler)
        self.jobs: list[Job] = []
        self.lost: set[str] = set()  # hosts that are away
        self.skews: dict[str, float] = {}  # seconds by which the wall clock of a host is ahead
        self.slots: dict[Running, Slot] = {}  # of each guardian
        self.training: dict[Running, SimulatedWorld] = {}  # processes that run the script
        self.pages: dict[Running, Page] = {}  # that processes share with their guardians
        # Called when a process comes to a collective.
        self.at_collective: Callable[[SimulatedWorld, str], None] = lambda world, name: None
        self.invariants: Any = None  # checks that hold after every event
        self.handler_fails = False  # whether the script's log handler fails at the writer's next line
        self.near = near  # a folder for the near tiers of all hosts; None if jobs have none
        self.later = self.system.later

    def say(self, text: str) -> None:
        self.scheduler.say(text, self.system.around)

    def near_folder(self, host: str) -> str:
        """The folder of a host's near tier: real files, as the memory of a host outlives its processes."""
        return "off" if self.near is None else f"{self.near}/{host}"

    def submit(self, name: str, hosts: list[str], per_host: int, *, least: int, head: str) -> Job:
        """Submit a job."""
        job = Job(self, name, hosts, per_host, least, head)
        self.jobs.append(job)
        self.later(0.0, job.submit)
        return job

    def job_ended(self) -> None:
        """End the simulation when the last job has ended."""
        if all(job.outcome for job in self.jobs):
            self.later(0.0, self.scheduler.stop)

    def job_of(self, process: Running) -> Job:
        return next(job for job in self.jobs if process.name.startswith(f"{job.name} "))

    # -- hosts -------------------------------------------------------------------------------------------

    def lose_host(self, host: str, *, alive: bool) -> None:
        """Switch a host off, or cut it off: then its processes live for a while."""
        self.lost.add(host)
        dice = self.scheduler.dice
        if alive:
            # The kernel notices within ten seconds; a guardian that is stopped does later.
            self.system.cut(host, lambda: dice.uniform(1.0, dice.choice((10.0, 10.0, 100.0))))
            for world in self.training.values():
                if world.process.host == host and world.ring is not None:
                    world.ring.tear()
        else:
            self.system.cut(host, lambda: dice.uniform(1.0, 10.0))
            if self.near is not None:
                shutil.rmtree(f"{self.near}/{host}", ignore_errors=True)
            for process in self.system.living:
                if process.host == host:
                    self.system.end(process, -signal.SIGKILL)
        for job in self.jobs:
            if job.driver is not None:
                job.driver.hosts_are_lost()

    def find_host(self, host: str) -> None:
        """A host is back."""
        self.lost.discard(host)
        self.system.join(host)
        self.say(f"{host} is back")

    def kill(self, process: Running) -> None:
        if process not in self.training and not process.dead:  # `_gone` reports a training process
            self.scheduler.say("is killed", process)
        self.system.kill(process)

    # -- programs ----------------------------------------------------------------------------------------

    def _run(self, process: Running) -> int:
        """Run a process that the package has started."""
        assert process.parent is not None
        job = self.job_of(process)
        if "hvdrecover.launch.horovodrun" in process.command:
            process.name = f"{job.name} horovodrun"
            driver = Driver(job, process)
            job.drivers.append(driver)
            return driver.run()
        slot = self.slots[process.parent]
        name = f"{job.name} {slot.name}"
        if "hvdrecover.launch.training" in process.command:
            process.name = f"{name} standby"
            self._stand_by(process)
            process.name = name
            self.scheduler.say("starts: the standby takes over", process)
        else:
            process.name = name
            again = configs.read(process.environ).rejoins
            self.scheduler.say("starts" + (" in place of a lost process" if again else ""), process)
            self.scheduler.sleep(self.scheduler.dice.uniform(0.1, 1.0))  # imports
            self._attach(process)
        return self._train(process, slot)

    def guard(self, process: Running) -> int:
        """Run a guardian."""
        self.scheduler.sleep(self.scheduler.dice.uniform(0.05, 0.5))
        config = configs.read(process.environ)
        try:
            clock = SimulatedClock(self.scheduler)
            return Guardian(_COMMAND, dict(process.environ), config, clock).run()
        except HvdrecoverError as error:
            self.scheduler.say(f"ends with {told(error)}")
            return 1

    def _attach(self, process: Running) -> None:
        slot = configs.read(process.environ).slot
        assert slot is not None
        page, _, notes, events = (process.inherited[descriptor] for descriptor in slot)
        heartbeat.attach(page, notes, events)
        heartbeat.at_commit(_report_modules)
        self.pages[process] = heartbeat.page

    def _stand_by(self, process: Running) -> None:
        """Do as `hvdrecover.launch.training.main` does."""
        assert process.stdin is not None
        self.scheduler.sleep(self.scheduler.dice.uniform(0.5, 3.0))  # imports
        self._attach(process)
        heartbeat.enter(Phase.READY)
        process.environ = {**process.environ, **json.loads(process.stdin.line())}
        heartbeat.enter(Phase.STARTING)

    def _train(self, process: Running, slot: Slot) -> int:
        world = slot.world = self.training[process] = SimulatedWorld(slot, process)
        self.invariants.starts(slot, process)
        process.at_end.append(lambda: self._gone(slot, world))
        code = self._play(process, world)
        for action in process.at_exit:
            action()
        return code

    def _play(self, process: Running, world: SimulatedWorld) -> int:
        """Run the script; return the exit code."""
        try:
            self.script(self, world, configs.read(process.environ))
        except Died:
            raise
        except SystemExit as error:
            self.scheduler.say("leaves")
            return int(str(error.code))
        except BaseException as error:
            self.scheduler.say(f"ends with {told(error)[:300]}")
            self._report(error)
            self.invariants.process_failed(world.job, error)
            return 1
        self.scheduler.say("returns")
        return 0

    def _report(self, error: BaseException) -> None:
        """Report as `heartbeat.report_errors_to` does."""
        name = type(error).__name__
        heartbeat.notify(error=f"{name}: {error}", identity=name, kinds=error_kinds.kinds(error))

    def _gone(self, slot: Slot, world: SimulatedWorld) -> None:
        process = world.process
        assert process.returncode is not None
        if process.returncode < 0:
            self.scheduler.say("is killed", process)
            self.invariants.process_died(process)
        del self.training[process]
        slot.driver.leaves(slot, world)


def _report_modules() -> None:
    """Do as `hvdrecover.state.horovod` does: at the second commit, a standby may be made."""
    if heartbeat.page.commits < 2:
        heartbeat.at_commit(_report_modules)
    else:
        heartbeat.notify(modules=["json"])
