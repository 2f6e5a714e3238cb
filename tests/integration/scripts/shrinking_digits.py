"""A training script that loses a rank for good when it has recovered: ``shrinking_digits.py HOSTS RATE``.

HOSTS is the file that names the hosts, and RATE the learning rate of the rank that is left.
"""

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import digits
from hvdrecover.examples.torch_digits import network

hosts, rate = Path(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
hvd.init()
samples, _ = digits()
dataset = TensorDataset(torch.from_numpy(samples.images), torch.from_numpy(samples.labels))
model = network()
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
)
sampler = recover.ElasticSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
state = recover.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)


@recover.run
def train(state):
    leaves = state.epoch + state.batch > 0 and hvd.size() == 2
    if leaves and hvd.rank() == 0:
        hosts.write_text("localhost:1\n")
    if hvd.size() == 1:
        optimizer.param_groups[0]["lr"] = rate
    while state.epoch < 2:
        sampler.set_epoch(state.epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            state.log_metrics(loss=loss)
            sampler.record_batch(state.batch, len(labels))
            state.batch += 1
            if state.batch % 3 == 0:
                state.commit()
            time.sleep(1.0 if leaves else 0.1)
        state.epoch += 1
        state.batch = 0


train(state)
