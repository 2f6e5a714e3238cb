"""A training script with a bug that only a fault brings to light, or none: ``buggy_digits.py BUG EPOCHS``."""

import random
import sys
import time

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import digits
from hvdrecover.examples.torch_digits import network

bug, epochs = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
hvd.init()
samples, _ = digits()
dataset = TensorDataset(torch.from_numpy(samples.images), torch.from_numpy(samples.labels))
if bug == "reshuffles":
    order = list(range(len(dataset)))
    random.Random().shuffle(order)  # anew in each process
    dataset = Subset(dataset, order)
model = network()
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
)
sampler = recover.ElasticSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
state = recover.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
steps = 0  # which a script that forgets it warms its learning rate up by


@recover.run
def train(state):
    global steps
    if bug == "resets its optimizer":
        optimizer.state.clear()
    if bug == "resets a counter":
        state.batch = 0
    while state.epoch < epochs:
        sampler.set_epoch(state.epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            if bug == "forgets a counter":
                steps += 1
                optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, steps / 100)
            if bug == "commits before the step":
                sampler.record_batch(state.batch, len(labels))
                state.batch += 1
                if state.batch % 3 == 0:
                    optimizer.synchronize()
                    state.commit()
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
            else:
                optimizer.step()
                sampler.record_batch(state.batch, len(labels))
                state.batch += 1
                if state.batch % 3 == 0:
                    state.commit()
            time.sleep(0.15)
        state.epoch += 1
        state.batch = 0


train(state)
