"""A tiny torch training that says each start on rank 0, and goes wrong as its first argument says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

how, starts = sys.argv[1], Path(sys.argv[2])
hvd.init()
if how == "constructor":
    torch.nn.Linear(2, 1, biass=False)
model = torch.nn.Linear(2, 1 if how != "large" else 5_000_000)  # 60 MB
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
root = recover.Checkpoint(os.environ["HVDRECOVER_CHECKPOINT"], keep=1) if how == "large" else None
state = recover.TorchState(model=model, optimizer=optimizer, step=0, checkpoint=root)


@recover.run
def train(state: recover.TorchState) -> None:
    with starts.open("a") as file:
        file.write(f"{hvd.rank()} from {state.step} in {os.getpid()}\n")
    state.commit()
    while state.step < int(sys.argv[3]):
        if how == "fail" and state.step == 20:
            raise ValueError("this script is wrong")
        if how == "abort" and state.step == 1:
            os.abort()
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit(durable=True)
        time.sleep(float(sys.argv[4]))


train(state)
