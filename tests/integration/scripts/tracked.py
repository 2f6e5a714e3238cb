"""Training that an experiment tracker is told of.

::

    hvdrecover run -np 2 -- python tracked.py FOLDER wandb|mlflow

Rank 0 is killed once, after step 11. There is a commit every second step, and every tenth is durable. Rank 0
writes a line to ``FOLDER/steps`` for each step, as often as it does it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

STEPS, KILLED, DURABLE_EVERY = 40, 11, 10


def tracker(name: str, folder: Path) -> recover.Tracker:
    if name == "wandb":
        return recover.WandB(project="digits", dir=str(folder), mode="offline")
    return recover.MLflow("digits", params={"lr": 0.1}, tracking_uri=(folder / "mlruns").as_uri())


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    folder, name = Path(sys.argv[1]), sys.argv[2]
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    state = recover.TorchState(model, optimizer, step=0, tracker=tracker(name, folder))

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), float(state.step))).square().mean()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.log_metrics(loss=loss, number=state.step)
            time.sleep(0.1)
            if hvd.rank() == 0:
                with (folder / "steps").open("a") as steps:
                    steps.write(f"{state.step}\n")
            if state.step % 2 == 0:
                state.commit(durable=state.step % DURABLE_EVERY == 0)
            struck = folder / "struck"
            if hvd.rank() == 0 and state.step == KILLED and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    train(state)


if __name__ == "__main__":
    main()
