"""Trains a GAN in a plain loop with ``state.resume()``: gradients are accumulated over two batches.

Argument: a folder for the checkpoint root and gates. At a gate, each rank prints a line and awaits a file.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

folder = Path(sys.argv[1])
hvd.init()
torch.manual_seed(1)
samples = torch.arange(96)
generator = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
critic = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def optimizer_of(model):
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(
        adam, named_parameters=model.named_parameters(), backward_passes_per_step=2
    )


generating, judging = optimizer_of(generator), optimizer_of(critic)
sampler = recover.ElasticSampler(samples, shuffle=True)
loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=sampler)
state = recover.TorchState(
    model=generator,
    optimizer=generating,
    critic=critic,
    judging=judging,
    sampler=sampler,
    epoch=0,
    seen=recover.PerRank([]),
    checkpoint=recover.Checkpoint(str(folder / "root"), every_commits=4),
)
state.resume()
print("begins", hvd.rank(), state.last_commit.commit, state.finished, flush=True)
for state.epoch in range(state.epoch, 3):
    sampler.set_epoch(state.epoch)
    half = []
    for batch in loader:
        half.append(batch)
        if len(half) < 2:
            continue
        for each in half:
            made = generator(torch.randn(len(each), 2))
            real = each[:, None] / 96
            (critic(made.detach()).mean() - critic(real).mean()).backward()
        judging.step()
        judging.zero_grad()
        critic.requires_grad_(False)
        for each in half:
            (-critic(generator(torch.randn(len(each), 2))).mean()).backward()
        generating.step()
        generating.zero_grad()
        critic.requires_grad_(True)
        for each in half:
            sampler.record_batch(0, len(each))
            state.seen.value = [*state.seen.value, *each.tolist()]
        half = []
        state.commit()
        time.sleep(0.05)  # for the near tier's thread, also on a busy machine
        if sampler.processed_num == 48:
            print("gate", state.epoch, os.getpid(), hvd.rank(), state.last_commit.commit, flush=True)
            while not (folder / str(state.epoch)).exists():
                time.sleep(0.02)
state.finish()
seen = sorted(sample for each in hvd.allgather_object(state.seen.value) for sample in each)
if hvd.rank() == 0:
    parameters = [*generator.parameters(), *critic.parameters()]
    weights = b"".join(each.detach().numpy().tobytes() for each in parameters)
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    print("seen", json.dumps(seen), flush=True)
