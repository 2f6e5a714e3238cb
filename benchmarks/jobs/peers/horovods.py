"""The job by Horovod: with hvdrecover's state and loop, and with Horovod's own."""

from __future__ import annotations

from pathlib import Path

import horovod.torch as hvd

from benchmarks.jobs.peers.loop import SHAPE, Loop
from benchmarks.states import Training


def by_hvdrecover(steps: Path, checkpoint: Path) -> None:
    """By hvdrecover's state and loop."""
    import hvdrecover.torch as recover
    from benchmarks.jobs.near_state import kept

    training, loop = _begun(steps)
    state = kept(training, checkpoint)

    @recover.run
    def train(state: recover.TorchState) -> None:
        def keep(number: int) -> None:
            state.step = number
            state.commit()

        loop.run(state.step, lambda: _average(training), hvd.barrier, keep)

    train(state)


def by_horovod(steps: Path, checkpoint: Path) -> None:
    """By Horovod's own state and loop, which write nothing."""
    from horovod.torch.elastic import TorchState, run

    training, loop = _begun(steps)
    state = TorchState(model=training.model, optimizer=training.optimizer, step=0)

    @run
    def train(state: TorchState) -> None:
        def keep(number: int) -> None:
            state.step = number
            state.commit()

        loop.run(state.step, lambda: _average(training), hvd.barrier, keep)

    train(state)


def _begun(steps: Path) -> tuple[Training, Loop]:
    hvd.init()
    training = Training(SHAPE, trained=False)
    return training, Loop(hvd.rank, steps, training)


def _average(training: Training) -> None:
    gradients = [parameter.grad for parameter in training.model.parameters()]
    hvd.synchronize(hvd.grouped_allreduce_async_(gradients, name="gradients"))
