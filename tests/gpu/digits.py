"""The digits example with its network on a device; without NCCL, gradients go through host memory."""

from __future__ import annotations

import os
import time

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import Ledger, digits, options
from hvdrecover.examples.torch_digits import network, optimizer_for


def average(model: torch.nn.Module) -> None:
    """Average the gradients of all ranks."""
    held = [each.grad for each in model.parameters() if each.grad is not None]
    averaged = hvd.grouped_allreduce([each.cpu() for each in held], name="gradients")
    for mine, theirs in zip(held, averaged, strict=True):
        mine.copy_(theirs)


def main() -> None:
    chosen = options("torch", __doc__, None)
    device = torch.device(os.environ.get("DEVICE", "cuda"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    hvd.init()
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    samples, _ = digits()
    model = network().to(device)
    optimizer = optimizer_for(chosen.optimizer, model.parameters())
    has_nccl = device.type == "cuda" and hvd.nccl_built() and hvd.size() <= torch.cuda.device_count()
    if has_nccl:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = recover.ElasticSampler(TensorDataset(*map(torch.from_numpy, samples)), shuffle=True, seed=0)
    loader = DataLoader(sampler.dataset, batch_size=chosen.batch_size, sampler=sampler)
    state = recover.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, checkpoint=chosen.checkpoint
    )
    ledger = Ledger(chosen.ledger, state)

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.epoch < chosen.epochs:
            sampler.set_epoch(state.epoch)
            for images, labels, indices in loader:
                ledger.batch(hvd.rank(), hvd.size(), indices.tolist())
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
                if not has_nccl:
                    average(model)
                optimizer.step()
                sampler.record_batch(state.batch, len(labels))
                state.batch += 1
                if state.batch % chosen.commit_every == 0:
                    state.commit()
                time.sleep(chosen.step_seconds)
            state.epoch += 1
            state.batch = 0

    train(state)


if __name__ == "__main__":
    main()
