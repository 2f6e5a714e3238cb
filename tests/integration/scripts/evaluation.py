"""An evaluation on rank 0 that nobody was told of, and at the end a collective that always fails.

BUSY says how many seconds the evaluation takes: longer than the other ranks wait, shorter than what counts as
a hang. There is no `paused` around it, and no sign of progress in it.
"""

import os
import time

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

BUSY = float(os.environ["BUSY"])

hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
state = recover.TorchState(model=model, optimizer=optimizer, step=0)


def evaluate():
    if hvd.rank() == 0:
        time.sleep(BUSY)


def do_step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    state.step += 1


@recover.run
def train(state):
    while state.step < 12:
        do_step()
        if state.step == 9:
            evaluate()
        if state.step % 4 == 0:
            state.commit()
    state.flush()
    hvd.allreduce(torch.zeros(1 + hvd.rank()), name="of_different_lengths")


train(state)
