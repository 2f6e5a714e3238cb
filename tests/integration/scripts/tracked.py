"""Training that an experiment tracker is told of.

::

    hvdrecover run -np 2 -- python tracked.py FOLDER wandb|mlflow

There is a commit every second step, and every tenth is durable. Rank 0 is killed after step 11, and all ranks
wait to be killed after step 26, each once, when the tracker has got all that it writes down at once. Rank 0
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
from tests.integration import wandb_files

STEPS, KILLED, STOPPED = 40, 11, 26


def tracker(name: str, folder: Path) -> recover.Tracker:
    if name == "wandb":
        return recover.WandB(project="digits", dir=str(folder), mode="offline")
    return recover.MLflow("digits", params={"lr": 0.1}, tracking_uri=(folder / "mlruns").as_uri())


def last_step(name: str, folder: Path) -> int:
    """The last step that the tracker's store has."""
    if name == "wandb":
        (run,) = {file.name[4:-6] for file in folder.glob("wandb/offline-run-*/run-*.wandb")} or {""}
        return wandb_files.last_step(folder / "wandb", run)
    tags = [file.read_text() for file in folder.glob("mlruns/*/*/tags/hvdrecover.step")]
    return int(tags[0]) if tags and tags[0] else 0


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    folder, name = Path(sys.argv[1]), sys.argv[2]
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    checkpoint = recover.Checkpoint(str(folder / "commits"), every_commits=5)
    state = recover.TorchState(model, optimizer, step=0, checkpoint=checkpoint, tracker=tracker(name, folder))

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
                state.commit()
            struck = folder / f"struck-{state.step}"
            if hvd.rank() == 0 and state.step in (KILLED, STOPPED) and not struck.exists():
                committed = state.step // 2 * 2
                while last_step(name, folder) < (committed - 1 if name == "wandb" else committed):
                    time.sleep(0.1)
                struck.touch()
                if state.step == KILLED:
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    train(state)


if __name__ == "__main__":
    main()
