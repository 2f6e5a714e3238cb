"""A tiny torch training that says each start on rank 0, and goes wrong as its first argument says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

how, starts = sys.argv[1], Path(sys.argv[2])
hvd.init()
torch.manual_seed(0)
stopped: list[int] = []  # by a handler of its own
if how == "handler":
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
# The steps that were not done to their end: state that the script keeps outside of `state`.
begun: list[int] = []
# For a training process that is killed: at which steps, each once.
KILLED = {"killed": (2, 5), "killed at 4": (4,) * 4, "leftovers": (2,)}


def make(number: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, recover.TorchState]:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    url = os.environ["HVDRECOVER_CHECKPOINT"]
    roots = {"folds": recover.Checkpoint(f"{url}{number}")}
    return (
        model,
        optimizer,
        recover.TorchState(model=model, optimizer=optimizer, step=0, checkpoint=roots.get(how)),
    )


@recover.run
def train(state: recover.TorchState, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with starts.open("a") as file:
        file.write(f"{hvd.rank()} from {state.step} in {os.getpid()}\n")
    state.commit()
    while state.step < int(sys.argv[3]):
        if how == "fail" and state.step == 20:
            raise ValueError(f"this script is wrong ({os.getpid()})")
        if how == "abort" and state.step == 1:
            os.abort()
        begun.append(state.step)
        if how == "leftovers" and len(begun) > 1:
            raise RuntimeError(f"left over: {begun}")
        for kill, step in enumerate(KILLED.get(how, ())):
            struck = Path(f"{starts}.killed{kill}")
            if state.step == step and hvd.rank() == hvd.size() - 1 and not struck.exists():
                state.flush()
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        lost = Path(f"{starts}.{number}.{hvd.rank()}")
        dies = how == "folds" and (number == 0 or hvd.rank() == 1)
        if dies and state.step == 2 and not lost.exists():
            state.flush()
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        begun.clear()
        if hvd.allreduce(torch.tensor(float(len(stopped))), op=hvd.Sum) > 0:
            break
        state.commit(durable=True)
        time.sleep(float(sys.argv[4]))


for number in range(2 if how == "folds" else 1):
    model, optimizer, state = make(number)
    train(state, model, optimizer)
Path(f"{starts}.{hvd.rank()}.weights").write_text(str([each.tolist() for each in model.parameters()]))
