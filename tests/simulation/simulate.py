"""One seed, one run: a job, its faults, and what must hold; ``python -m tests.simulation SEED`` prints it."""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvdrecover import events, heartbeat
from hvdrecover.checkpoint import storage
from hvdrecover.discovery import selection
from hvdrecover.launch import guardian, presence, ssh
from tests.simulation import faults as all_faults
from tests.simulation.cluster import Cluster
from tests.simulation.disk import SimulatedStorage
from tests.simulation.faults import Injector
from tests.simulation.invariants import Invariants
from tests.simulation.scheduler import HANDLER_FAILS, Scheduler, SimulatedClock, installed
from tests.simulation.training import Training


@dataclass(frozen=True)
class Setting:
    """The job of a seed."""

    training: Training
    hosts: int
    per_host: int
    elastic: bool  # whether hosts may come and go
    inside: bool  # whether the supervisor is on the first host of the job, or on one of its own


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    failure: str | None  # what was found; None if all held
    transcript: list[str]
    events: int
    order: int  # a checksum of the order in which tasks ran
    seconds: float
    states: set[int]  # the states that were reached, as hashes
    faults: dict[str, int] = field(default_factory=dict)  # how many faults of each kind struck

    def report(self) -> str:
        """Return the finding, how to see it again, and what led to it."""
        lines = [
            f"seed {self.seed}: {self.failure or 'all held'}",
            f"again: .venv/bin/python -m tests.simulation {self.seed}",
            *self.transcript,
        ]
        return "\n".join(lines)


def setting_of(dice: random.Random, *, near: bool, plain: bool) -> Setting:
    """Draw a job. There are few kinds, so that undisturbed runs can be compared with."""
    training = Training(
        commit_every=dice.choice((1, 2)),
        durable_every=dice.choice((1, 1, 2)),
        keep=dice.choice((1, 2)),
        rng=dice.choice(("reseed", "reseed", "store")),
        durable=dice.random() < 0.15,
        flush=dice.random() < 0.15,
        checks=dice.random() < 0.2,
        returns_early=dice.random() < 0.4,
        near=near,
        plain=plain,
    )
    hosts, per_host = dice.choice((1, 2, 2, 3)), dice.choice((1, 1, 2))
    return Setting(training, hosts, per_host, elastic=dice.random() < 0.5, inside=dice.random() < 0.5)


def run_seed(seed: int) -> Outcome:
    """Simulate the run of a seed."""
    dice = random.Random(seed)
    setting = setting_of(dice, near=seed % 5 == 4, plain=seed % 6 == 3)
    elastic = setting.elastic and setting.hosts > 1
    reference, seconds = undisturbed(setting)
    faults = all_faults.draw(dice, elastic=elastic, seconds=seconds)
    # Where the ranks change, or leave between two commits, later commits hold other steps. A rank whose
    # commit failed continues with its own random stream.
    differs = elastic or setting.training.checks or any(fault.kind == "copy" for fault in faults)
    return _run(setting, seed, faults, None if differs else reference)


@lru_cache(1024)
def undisturbed(setting: Setting) -> tuple[dict[int, str], float]:
    """Return the digests of an undisturbed run's commits by number, and how long it takes."""
    found: dict[int, str] = {}
    outcome = _run(setting, 0, [], None, found)
    assert outcome.failure is None, outcome.report()
    return found, outcome.seconds


def _run(
    setting: Setting,
    seed: int,
    faults: list[all_faults.Fault],
    reference: dict[int, str] | None,
    commits: dict[int, str] | None = None,
) -> Outcome:
    scheduler = Scheduler(seed)
    near = tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm") if setting.training.near else None
    cluster = Cluster(scheduler, setting.training, near)
    invariants = cluster.invariants = cluster.disk.watch = Invariants(cluster, setting.training, reference)
    with installed(scheduler, cluster.system.modules()), _in_place_of(cluster):
        cluster.say(f"{setting.hosts} hosts with {setting.per_host} processes each; {setting.training}")
        hosts = [f"h{number + 1}" for number in range(setting.hosts)]
        least = 1 if setting.elastic and setting.hosts > 1 else setting.hosts * setting.per_host
        cluster.submit("A", hosts, setting.per_host, least=least, head="h1" if setting.inside else "h0")
        Injector(cluster, faults, plain=setting.training.plain)
        scheduler.run()
        if scheduler.failure is None:
            invariants.finished()
    if near is not None:
        shutil.rmtree(near)
    if commits is not None:
        commits.update(invariants.by_number)
    return Outcome(
        seed,
        scheduler.failure,
        scheduler.transcript,
        scheduler.events,
        scheduler.order,
        scheduler.now - 100,
        invariants.states,
        dict(invariants.faults),
    )


@contextmanager
def _in_place_of(cluster: Cluster) -> Iterator[None]:
    """Have the package open the simulated disk, and its events and log lines come here."""
    scheduler = cluster.scheduler

    def open_storage(url: str) -> SimulatedStorage:
        return SimulatedStorage(cluster.disk, url)

    def of_training(config: Any, clock: Any = None) -> events.Events:
        process = scheduler.process

        descriptor = heartbeat.event_pipe
        assert descriptor is not None
        pipe = events.Pipe(descriptor)

        def add(event: Any) -> None:
            cluster.invariants.event(process, event)
            pipe.add(event)

        return events.Events(add, config.host, SimulatedClock(scheduler))

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            task = scheduler.current
            if task is not None and not task.process.dead:
                scheduler.say(record.getMessage().splitlines()[0].replace(f"{cluster.near}/", ""))
                if cluster.handler_fails and task.name == "hvdrecover-writer":
                    cluster.handler_fails = False
                    raise RuntimeError(HANDLER_FAILS)

    class Recorded:
        """Stands for `hvdrecover.events.Record`."""

        def __init__(self, folder: Path, seconds: float) -> None:
            self._job = cluster.job_of(cluster.system.process)

        def add(self, event: Any) -> None:
            cluster.invariants.recorded(self._job, event)

        put = add

        def flush(self) -> None:
            scheduler.check()

    replaced = {
        storage.open_storage: open_storage,
        events.of_training: of_training,
        events.Record: Recorded,
        presence.announce: lambda folder, supervised: Path("/dev/null/announced"),
        ssh.kept_alive: lambda config, folder: "",
        selection.report_failure: lambda path, host, now: None,
        guardian._append: lambda file, text: None,
        **cluster.system.functions(),
    }
    by_identity = {id(original): stand_in for original, stand_in in replaced.items()}
    undo = []
    for name, module in sorted(sys.modules.items()):
        if name.startswith("hvdrecover."):
            for key, value in list(vars(module).items()):
                if id(value) in by_identity:
                    undo.append((vars(module), key, value))
                    vars(module)[key] = by_identity[id(value)]
    handler, level, propagate = Lines(), events.logger.level, events.logger.propagate
    events.logger.addHandler(handler)
    events.logger.setLevel(logging.INFO)
    events.logger.propagate = False
    try:
        yield
    finally:
        events.logger.removeHandler(handler)
        events.logger.setLevel(level)
        events.logger.propagate = propagate
        for space, key, value in undo:
            space[key] = value
