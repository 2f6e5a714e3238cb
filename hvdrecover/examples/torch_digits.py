r"""Train a small network on scikit-learn's handwritten digits, in a job that recovers from faults.

::

    hvdrecover run -np 2 --checkpoint file:///data/digits -- python -m hvdrecover.examples.torch_digits

Kill any process and start the job again: it resumes from its last commit.
"""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import Digits, Ledger, digits, options


def network() -> torch.nn.Module:
    """Return two hidden layers with dropout; float32 [N, 64] to float32 [N, 10]."""
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
    layers += [torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))


def optimizer_for(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=2e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def accuracy(model: torch.nn.Module, samples: Digits) -> float:
    model.eval()
    with torch.no_grad():
        named = model(torch.from_numpy(samples.images)).argmax(1)
    model.train()
    return float((named == torch.from_numpy(samples.labels)).float().mean())


def main(arguments: list[str] | None = None) -> None:
    """Train from the newest commit of the checkpoint root to the end."""
    chosen = options("torch", __doc__, arguments)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hvd.init()
    samples, test = digits()
    dataset = TensorDataset(*map(torch.from_numpy, samples))
    model = network()
    optimizer = hvd.DistributedOptimizer(
        optimizer_for(chosen.optimizer, model.parameters()), named_parameters=model.named_parameters()
    )
    sampler = recover.ElasticSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(
        dataset, batch_size=chosen.batch_size, sampler=sampler, num_workers=chosen.loader_workers
    )
    state = recover.TorchState(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        epoch=0,
        batch=0,
        checkpoint=chosen.checkpoint,
        virtual_ranks=chosen.virtual_ranks,
    )
    ledger = Ledger(chosen.ledger, state)
    virtual = chosen.virtual_ranks is not None
    rank, size = (recover.virtual_rank, recover.virtual_size) if virtual else (hvd.rank, hvd.size)

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.epoch < chosen.epochs:
            sampler.set_epoch(state.epoch)
            for step in state.steps(loader) if virtual else ([batch] for batch in loader):
                optimizer.zero_grad()
                for images, labels, indices in step:
                    # Before the step: if this rank is killed after it, the others may already have committed.
                    ledger.batch(rank(), size(), indices.tolist())
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if not virtual:
                    sampler.record_batch(state.batch, len(labels))
                state.batch += 1
                if state.batch % chosen.commit_every == 0:
                    state.commit()
                time.sleep(chosen.step_seconds)
            state.epoch += 1
            state.batch = 0

    train(state)
    if hvd.rank() == 0:
        share = accuracy(model, test)
        print(f"test accuracy {share:.4f} after {state.epoch} epochs", flush=True)
        if chosen.save:
            final = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "accuracy": share}
            torch.save(final, chosen.save)


if __name__ == "__main__":
    main()
