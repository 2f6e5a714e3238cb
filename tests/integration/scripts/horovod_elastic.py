"""A script for Horovod's own elastic API, as its documentation says; only ELASTIC differs between runs.

If there is a variable CONTINUE, training stops in mid-epoch 1 until the file of that name is there.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

elastic = importlib.import_module(os.environ["ELASTIC"])

hvd.init()
torch.manual_seed(0)
samples = torch.arange(240, dtype=torch.float32)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-6 * hvd.size()), named_parameters=model.named_parameters()
)
sampler = elastic.ElasticSampler(samples, shuffle=True)
loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=sampler)
resets = []
may_continue = Path(os.environ.get("CONTINUE", "/"))


def on_state_reset():
    resets.append(hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = 1e-6 * hvd.size()


@elastic.run
def train(state):
    for state.epoch in range(state.epoch, 3):
        for batch_idx, batch in enumerate(loader):
            optimizer.zero_grad()
            model(batch[:, None]).square().mean().backward()
            optimizer.step()
            state.batch = batch_idx
            state.seen = [*state.seen, len(batch) * hvd.size()]
            sampler.record_batch(batch_idx, len(batch))
            print("progress", os.getpid(), hvd.rank(), state.epoch, sum(state.seen), flush=True)
            time.sleep(0.02)
            while (state.epoch, batch_idx) == (1, 8) and not may_continue.exists():
                time.sleep(0.02)
            if batch_idx % 5 == 0:
                state.commit()
        state.batch = 0
        sampler.set_epoch(state.epoch + 1)
        state.commit()
    return "trained"


state = elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[])
state.register_reset_callbacks([on_state_reset])
result = train(state)
if hvd.rank() == 0:
    rate = optimizer.param_groups[0]["lr"] / 1e-6
    report = {"result": result, "seen": sum(state.seen), "resets": resets, "rate": rate, "epoch": state.epoch}
    report["weights"] = [model.weight.item().hex(), model.bias.item().hex()]
    print("report", json.dumps(report), flush=True)
sys.exit(0)
