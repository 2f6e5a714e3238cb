"""Healthy but irregular training: a slow rank, long evaluations on one rank, a long phase with heartbeats.

SECONDS says for how long at least, LONG how many of them a long phase takes: longer than the limit for hangs.
"""

import os
import random
import time

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

SECONDS, LONG = float(os.environ["SECONDS"]), float(os.environ["LONG"])

hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
guard = recover.Guard(parameters_every_commits=1)
state = recover.TorchState(model=model, optimizer=optimizer, guard=guard, step=0, elapsed=0.0)
mood = random.Random(hvd.rank())


def evaluate():
    with recover.paused():
        if hvd.rank() == 0:
            time.sleep(LONG)


def compile_slowly():
    ends = time.monotonic() + LONG
    while time.monotonic() < ends:
        recover.heartbeat()
        time.sleep(LONG / 20)


@recover.run
def train(state):
    began, computed = time.monotonic(), time.process_time()
    while state.elapsed < SECONDS or state.step < 9:  # after one of each of the long phases
        time.sleep(mood.uniform(0, 1.5))  # one rank is always the slow one
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        state.step += 1
        everybodys = hvd.allreduce(torch.tensor(time.monotonic() - began), op=hvd.Sum, name="elapsed")
        state.elapsed = float(everybodys) / hvd.size()  # the same on all ranks
        if state.step % 3 == 0:
            state.commit()
        if state.step % 8 == 0:
            evaluate()
        if state.step % 8 == 4:
            compile_slowly()
    return (time.process_time() - computed) / (time.monotonic() - began)


share = train(state)
print(f"steps {state.step}, computed for {share:.0%} of the time", flush=True)
