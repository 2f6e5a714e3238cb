"""Two epochs of token samples, of which one is bad in the first epoch; each start has another bad one.

Variables: ``BAD``, the number of the bad sample; ``RATE``, the learning rate; ``STOP``, to end once a commit
leaves the bad batch out. Part of the loop is as in a training framework, which names epochs of its own. A
metric of the state keeps nothing. In the second epoch, rank 1 is killed once. Rank 0 writes down how often
each sample was trained on in each epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import hvdrecover.torch as hvd

SAMPLES, EPOCHS = 40, 2

hvd.init()
torch.manual_seed(0)
folder, bad, stop = Path(sys.argv[1]), int(os.environ["BAD"]), "STOP" in os.environ
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))


class Metric(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())


model = torch.nn.Embedding(SAMPLES, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), float(os.environ["RATE"])), named_parameters=model.named_parameters()
)
sampler = hvd.ElasticSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
state = hvd.TorchState(
    model,
    optimizer,
    sampler=sampler,
    metric=Metric(),
    epoch=0,
    steps=0,
    seen=torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64),
    guard=hvd.Guard(numerics="rollback"),
    checkpoint=hvd.Checkpoint(str(folder / "root"), every_commits=1),
)


def fit_one_epoch() -> None:
    sampler.set_epoch(0)  # the framework's own count of epochs
    for (samples,) in loader:
        optimizer.zero_grad()
        loss = model(samples).pow(2).mean()
        (loss * float("nan") if state.epoch == 0 and bad in samples else loss).backward()
        optimizer.step()
        sampler.record_batch(state.steps, len(samples))
        state.seen[state.epoch] += torch.bincount(hvd.allgather(samples), minlength=SAMPLES)
        state.steps += 1
        if state.epoch == 1 and state.steps % 5 == 0 and hvd.rank() == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.steps % 2 == 0:
            state.commit()


@hvd.run
def train(state: Any) -> None:
    state.commit()
    if stop and "left_out" in sampler.state_dict():
        state.flush()
        raise SystemExit(3)
    while state.epoch < EPOCHS:
        sampler.set_epoch(state.epoch)
        fit_one_epoch()
        state.epoch += 1


train(state)
if hvd.rank() == 0:
    (folder / "seen.json").write_text(json.dumps(state.seen.tolist()))
