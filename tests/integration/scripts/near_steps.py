"""Trains a small torch model, with a commit each step and few durable ones; writes its digest at the end.

Arguments: checkpoint root, number of steps, seconds a step, file for the digest, steps between durable
commits. Like a script of Hydra's, it first changes to a folder that is new at each start.
"""

# ruff: noqa: E402

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

outputs = Path(sys.argv[4]).parent / f"outputs-{os.getpid()}-{time.time_ns()}"
outputs.mkdir()
os.chdir(outputs)

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

root, steps, seconds, result = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
every = int(sys.argv[5])
hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())
checkpoint = recover.Checkpoint(root, every_commits=every)
state = recover.TorchState(model, optimizer, step=0, checkpoint=checkpoint)


@recover.run
def train(state: recover.TorchState) -> None:
    while state.step < steps:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        time.sleep(seconds)


train(state)
if hvd.rank() == 0:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    result.write_text(hashlib.sha256(weights).hexdigest())
