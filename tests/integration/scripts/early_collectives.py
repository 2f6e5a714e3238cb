"""A script that begins with collectives, as Horovod's examples do, and loses rank 1 in its third step.

::

    hvdrecover run -np 2 -- python early_collectives.py torch|tensorflow FOLDER [allreduce]

The ranks have different weights before the broadcast. Each writes those at the end to ``FOLDER/RANK``. With
``allreduce`` the script begins with a collective whose work the state does not do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

STEPS = 6
RATE = 0.125


def lose_rank_1(step: int, rank: int, folder: Path) -> None:
    if step == 2 and rank == 1 and not (folder / "lost").exists():
        (folder / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def with_torch(folder: Path, *, allreduces: bool) -> tuple[int, list[float]]:
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI  # would end the process if Open MPI did not find its files

    import hvdrecover.torch as recover

    hvd.init()
    assert MPI.COMM_WORLD.Get_size() == 1
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1.0 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.broadcast_object({"rate": RATE}) == {"rate": RATE}
    if allreduces:
        assert hvd.allreduce(torch.ones(1)).item() == 1
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), num_groups=2)
    state = recover.TorchState(model, optimizer, step=0)

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.step < STEPS:
            lose_rank_1(state.step, hvd.rank(), folder)
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return hvd.rank(), [parameter.item() for parameter in model.parameters()]


def with_tensorflow(folder: Path, *, allreduces: bool) -> tuple[int, list[float]]:
    import tensorflow as tf

    import hvdrecover.tensorflow as hvd

    hvd.init()
    weights = [tf.Variable(1.0 + hvd.rank()) for _ in range(2)]
    hvd.broadcast_variables(weights, root_rank=0)
    assert hvd.broadcast_object({"rate": RATE}) == {"rate": RATE}
    if allreduces:
        assert float(hvd.allreduce(tf.ones(1))[0]) == 1
    state = hvd.TensorFlowState(weights, step=0)

    @hvd.run
    def train(state: hvd.TensorFlowState) -> None:
        while state.step < STEPS:
            lose_rank_1(state.step, hvd.rank(), folder)
            for number, weight in enumerate(weights):
                weight.assign_sub(RATE * hvd.allreduce(tf.constant(1.0), name=f"gradient-{number}"))
            state.step += 1
            state.commit()

    train(state)
    return hvd.rank(), [float(weight) for weight in weights]


def main(framework: Callable[..., tuple[int, list[float]]], folder: Path, *, allreduces: bool) -> None:
    rank, weights = framework(folder, allreduces=allreduces)
    (folder / str(rank)).write_text(" ".join(map(str, weights)))


if __name__ == "__main__":
    frameworks = {"torch": with_torch, "tensorflow": with_tensorflow}
    main(frameworks[sys.argv[1]], Path(sys.argv[2]), allreduces="allreduce" in sys.argv)
