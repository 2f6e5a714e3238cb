"""A tiny torch training whose ranks print more than a pipe takes, and bytes that are not UTF-8."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

STEPS = 8
hvd.init()
model = torch.nn.Linear(2, 1)
state = recover.TorchState(model=model, step=0)


@recover.run
def train(state: recover.TorchState) -> None:
    while state.step < STEPS:
        print(f"step {state.step} {'.' * 40_000}", flush=True)
        sys.stderr.buffer.write(b"caf\xe9 " + b"." * 40_000 + b"\n")
        sys.stderr.flush()
        state.step += 1
        state.commit()


train(state)
print("the end of rank", hvd.rank(), flush=True)
