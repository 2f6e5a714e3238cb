"""A cross validation: two folds, each with a model and a state of its own; rank 1 is killed in the second.

::

    hvdrecover run -np 2 -- python folds.py FOLDER

Each rank writes the weight that a fold ends with to ``FOLDER/FOLD-RANK``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import hvdrecover.torch as hvd

STEPS = 4


def fold(number: int, folder: Path) -> float:
    """Train from the fold's number on, by an eighth of it in each step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, number)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125), named_parameters=model.named_parameters()
    )
    state = hvd.TorchState(model, optimizer, step=0)

    @hvd.run
    def train(state: hvd.TorchState) -> None:
        while state.step < STEPS:
            if number == 2 and state.step == 2 and hvd.rank() == 1 and not (folder / "lost").exists():
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.full((1, 1), float(number))).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return model.weight.item()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    hvd.init()
    for number in (1, 2):
        weight = fold(number, folder)
        (folder / f"{number}-{hvd.rank()}").write_text(str(weight))
