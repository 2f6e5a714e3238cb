r"""Train a small network on scikit-learn's handwritten digits, so that nothing can stop it.

::

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh \
        python -m hvdrecover.examples.torch_digits --checkpoint file:///data/digits

Kill any of it and start it again: it goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.ledger import Ledger

TEST_SAMPLES = 360


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1,437 training samples as a data set of (float32 [64], int64 [], index), and 360 test samples."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    indices = torch.arange(len(images) - TEST_SAMPLES)
    train = TensorDataset(images[:-TEST_SAMPLES], labels[:-TEST_SAMPLES], indices)
    return train, images[-TEST_SAMPLES:], labels[-TEST_SAMPLES:]


def network() -> torch.nn.Module:
    """Two hidden layers with dropout; float32 [N, 64] to float32 [N, 10]."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(64, 10),
    )


def optimizer_for(name: str, parameters: Any) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=2e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The part of the images that the model names right."""
    model.eval()
    with torch.no_grad():
        right = float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return right


def main(arguments: list[str] | None = None) -> None:
    """Train to the end, from wherever the checkpoint root says."""
    options = _options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hvd.init()
    dataset, test_images, test_labels = digits()
    model = network()
    optimizer = hvd.DistributedOptimizer(
        optimizer_for(options.optimizer, model.parameters()), named_parameters=model.named_parameters()
    )
    sampler = recover.ElasticSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(
        dataset, batch_size=options.batch_size, sampler=sampler, num_workers=options.loader_workers
    )
    state = recover.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, checkpoint=options.checkpoint
    )
    ledger = Ledger(options.ledger, state)

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.epoch < options.epochs:
            sampler.set_epoch(state.epoch)
            for images, labels, indices in loader:
                # Before the step: a worker that is killed after it may be part of a commit of the others.
                ledger.batch(hvd.rank(), hvd.size(), state.epoch, indices.tolist())
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                sampler.record_batch(state.batch, len(labels))
                state.batch += 1
                if state.batch % options.commit_every == 0:
                    state.commit()
                time.sleep(options.step_seconds)
            state.epoch += 1
            state.batch = 0

    train(state)
    if hvd.rank() == 0:
        right = accuracy(model, test_images, test_labels)
        print(f"test accuracy {right:.4f} after {state.epoch} epochs", flush=True)
        if options.save:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "accuracy": right},
                options.save,
            )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hvdrecover.examples.torch_digits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--checkpoint", metavar="URL", help="checkpoint root; default: HVDRECOVER_CHECKPOINT, or none"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in one worker's batch")
    parser.add_argument("--commit-every", type=int, default=5, metavar="BATCHES")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load data, per worker")
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="pretend that a step takes this much longer"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the final weights here")
    parser.add_argument(
        "--ledger", type=Path, metavar="FOLDER", help="write down each batch here, for the demo and tests"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
