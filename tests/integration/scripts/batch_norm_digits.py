"""A training script whose ranks have statistics of batch norm and a list of losses of their own."""

import time

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import digits

torch.set_num_threads(1)
hvd.init()
samples, _ = digits()
dataset = TensorDataset(torch.from_numpy(samples.images), torch.from_numpy(samples.labels))
dataset = Subset(dataset, range(320))
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
)
sampler = recover.ElasticSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
state = recover.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, losses=[])


@recover.run
def train(state):
    while state.epoch < 2:
        sampler.set_epoch(state.epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            sampler.record_batch(state.batch, len(labels))
            state.batch += 1
            state.losses = [*state.losses[-3:], loss.item()]
            state.commit()
            time.sleep(0.3)
        state.epoch += 1
        state.batch = 0


train(state)
