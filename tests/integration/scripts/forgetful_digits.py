"""A training script that forgets a counter: the bug shows only after a fault."""

import time

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import digits
from hvdrecover.examples.torch_digits import network

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
steps = 0  # that the learning rate is warmed up by; not kept in the state


@recover.run
def train(state):
    global steps
    while state.epoch < 1:
        sampler.set_epoch(state.epoch)
        for images, labels in loader:
            steps += 1
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, steps / 100)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            sampler.record_batch(state.batch, len(labels))
            state.batch += 1
            if state.batch % 3 == 0:
                state.commit()
            time.sleep(0.15)
        state.epoch += 1
        state.batch = 0


train(state)
