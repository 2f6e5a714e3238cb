"""The script of simulated processes: it trains a model that is computed from the list of its samples.

Each step appends to ``state.history`` which samples all ranks have trained on, and a random number. The
weights are a function of that list, so any commit can be checked alone: its tensors must be those of its
list, its sampler must be at the end of the list, and each sample of an epoch stands in there once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdrecover import heartbeat
from hvdrecover.checkpoint import Checkpoint, values
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.manifest import HasState, Snapshot
from hvdrecover.config import Config
from hvdrecover.errors import RemovedError, RendezvousError
from hvdrecover.state.hooks import Agreement, Hook
from hvdrecover.state.rank_local import PerRank, Randomness
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeFramework, FakeLoader, FakeModel, FakeSampler
from tests.simulation.disk import URL
from tests.simulation.horovod import SimulatedWorld
from tests.simulation.scheduler import SimulatedClock

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

TORN = "the device is gone"  # the error of `FakeFramework.copy_out`
_PRIME = 1_000_003


@dataclass(frozen=True)
class Training:
    """The settings of a script."""

    samples: int = 24  # of an epoch
    epochs: int = 2
    batch_size: int = 2
    commit_every: int = 1  # steps between commits
    durable_every: int = 1  # commits between durable ones
    keep: int = 2
    rng: Randomness = "reseed"
    durable: bool = False  # whether each commit asks to be durable
    flush: bool = False  # whether each commit is waited for until it is durable
    checks: bool = False  # whether ranks look for changes of hosts between commits
    near: bool = False
    returns_early: bool = False  # whether it ends its loop when the job is to stop, before the next commit
    step_seconds: float = 1.0  # how long a step takes at most
    plain: bool = False  # without a training function, so that all ranks start again after a fault

    def __call__(self, cluster: Cluster, world: SimulatedWorld, config: Config) -> None:
        scheduler = cluster.scheduler
        _init(world)
        framework = world.framework
        state = State(
            framework,
            world,
            checkpoint=Checkpoint(
                URL,
                every_commits=self.durable_every,
                keep=self.keep,
                near="auto" if self.near else None,
            ),
            config=config,
            clock=SimulatedClock(scheduler),
            hooks=[Witness(cluster, world)],
            attributes={
                "rng": self.rng,
                "model": FakeModel(weights=np.zeros(4), steps=0.0),
                "other": FakeModel(weights=np.ones(2)),
                "sampler": FakeSampler(self.samples, seed=3),
                "epoch": 0,
                "step": 0,
                "history": [],
                "counted": PerRank(0, _all_of_rank_0),
            },
        )
        world.slot.driver.states[world.process] = state
        if self.plain:
            state.resume()
            self._train(cluster, world, state)
            state.finish()
        else:
            run(lambda state: self._train(cluster, world, state))(state)

    def _train(self, cluster: Cluster, world: SimulatedWorld, state: State) -> None:
        loader = FakeLoader(state.sampler, self.batch_size, world.framework.generator)
        while state.epoch < self.epochs:
            state.sampler.order.set_epoch(state.epoch)
            for batch in loader:
                if self._step(cluster, world, state, batch) and self.returns_early:
                    return
            state.epoch += 1

    def _step(self, cluster: Cluster, world: SimulatedWorld, state: State, batch: Sequence[int]) -> bool:
        """Do a step; return whether any rank was asked to stop."""
        scheduler = cluster.scheduler
        scheduler.sleep(scheduler.dice.random() * self.step_seconds)
        mine = np.zeros(self.samples + 2)
        for index in batch:
            mine[index] += 1
            mine[-2] += world.framework.generator.draw() % 1000
        mine[-1] = heartbeat.page.stop
        total = world.allreduce(mine)
        entry = [state.epoch, [i for i in range(self.samples) for _ in range(int(total[i]))], int(total[-2])]
        model, other = state.model.weights, state.other.weights
        model["weights"][...], model["steps"][...] = advance(model["weights"], entry), model["steps"] + 1
        other["weights"][...] = (other["weights"] + entry[2]) % _PRIME
        state.sampler.order.record(len(batch))
        state.step += 1
        state.history.append(entry)
        state.counted.value += len(batch)
        if self.returns_early and total[-1]:
            return True
        if self.checks:
            state.check_host_updates()
        if state.step % self.commit_every == 0:
            try:
                state.commit(durable=self.durable)
            except RuntimeError as error:
                if str(error) != TORN:
                    raise  # else the script continues, as on all other ranks
                scheduler.say("catches the error of a commit")
                return False
            if self.flush:
                state.flush()
        return False


def _init(world: SimulatedWorld) -> None:
    """Do as ``hvd.init()`` does in a script."""
    try:
        world.init()
    except RemovedError as error:
        heartbeat.enter(heartbeat.Phase.REMOVED)
        raise ValueError("Horovod initialization failed") from error
    except RendezvousError as error:
        heartbeat.lost_ranks(f"HorovodInternalError: {error}")
        raise ValueError("Horovod initialization failed") from error
    heartbeat.initialised(world.rank())


def _all_of_rank_0(states: Sequence[int], rank: int, size: int) -> int:
    """Keep the sum of a rank-local value when the ranks change."""
    return sum(states) if rank == 0 else 0


def advance(weights: np.ndarray[Any, Any], entry: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the weights after a step; whole numbers, so the order of sums makes no difference."""
    epoch, samples, noise = entry
    return (weights * 3 + noise + np.arange(1, 5) * sum(samples) + epoch) % _PRIME


class Witness(Hook):
    """Reports the commits and agreements of this process to the invariants."""

    def __init__(self, cluster: Cluster, world: SimulatedWorld) -> None:
        self._cluster = cluster
        self._world = world

    def captured(self, snapshot: Snapshot) -> None:
        self._cluster.invariants.captured(self._world, snapshot)

    def agreed(self, agreement: Agreement) -> None:
        self._cluster.invariants.agreed(self._world, agreement)


# -- checks of one commit ----------------------------------------------------------------------------------


def opened(files: Mapping[str, bytes]) -> dict[str, Arena]:
    """Return the data files of a commit at the root, by attribute name."""
    return {name: Arena.of_file(np.frombuffer(content, dtype=np.uint8)) for name, content in files.items()}


def digest(commit: HasState, arenas: Mapping[str, Arena]) -> str:
    """Return a digest of all that must be the same in an undisturbed run."""
    state = {name: commit.state[name] for name in ("attributes", "samplers", "random")}
    text = json.dumps(state, sort_keys=True, default=dict)
    parts = [text.encode(), *(arenas[name].buffer.tobytes() for name in sorted(arenas))]
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def flaw(commit: HasState, arenas: Mapping[str, Arena], training: Training) -> str | None:
    """Return the flaw of a commit, or None."""
    framework = FakeFramework()
    names = ("step", "history", "counted")
    attributes = {name: json.loads(json.dumps(commit.attributes[name], default=dict)) for name in names}
    history = values.decode(attributes["history"])
    counted = values.decode(attributes["counted"])
    model, other = (framework.views(arenas[name]) for name in ("model", "other"))
    weights, noise = np.zeros(4), np.ones(2)
    for entry in history:
        weights, noise = advance(weights, entry), (noise + entry[2]) % _PRIME
    if [*model["weights"]] != [*weights] or [*other["weights"]] != [*noise]:
        return "the tensors are not those of the samples in its history"
    if float(model["steps"]) != len(history) or attributes["step"] != len(history):
        return f"it counts {attributes['step']} steps, and has done {len(history)}"
    if sum(counted.values()) != sum(len(entry[1]) for entry in history):
        return f"the ranks have counted {counted} samples, and the history has others"
    return _samples_once(history, training)


def _samples_once(history: Sequence[Sequence[Any]], training: Training) -> str | None:
    """Return which sample was trained on twice or not at all; the last step of an epoch may be padded."""
    newest = history[-1][0] if history else 0
    for epoch in range(newest + 1):
        steps = [entry[1] for entry in history if entry[0] == epoch]
        before = [sample for step in steps[:-1] for sample in step]
        if len(before) != len(set(before)):
            return f"epoch {epoch}: a sample was trained on twice: {sorted(before)}"
        seen = {*before, *(steps[-1] if steps else ())}
        last = set(steps[-1] if steps else ())
        if len(last & set(before)) and len(seen) < training.samples:
            return f"epoch {epoch}: samples were trained on again: {sorted(last & set(before))}"
        if epoch < newest and len(seen) < training.samples:
            return f"epoch {epoch}: samples were left out: {sorted(set(range(training.samples)) - seen)}"
    return None
