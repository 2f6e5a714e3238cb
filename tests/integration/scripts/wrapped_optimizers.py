"""Training with optimizers and parameters that Horovod's own wrapper does not average, kind by kind.

::

    horovodrun -np 2 python wrapped_optimizers.py REPORTS KIND ...

Each rank writes ``REPORTS/KIND-RANK.json``: its weights. Each rank has samples of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import hvdrecover.torch as hvd

STEPS, THAW = 4, 2
PASSES = {"passes": 2}


def wrapped(kind: str, model: torch.nn.Module) -> Any:
    parameters = list(model.parameters())
    if kind == "adam":
        inner: Any = torch.optim.Adam(parameters)
    else:
        inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(
        inner, model.named_parameters(), backward_passes_per_step=PASSES.get(kind, 1)
    )


def train(kind: str) -> list[float]:
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    form = torch.channels_last if kind == "channels_last" else torch.contiguous_format
    model = model.to(memory_format=form)
    optimizer = wrapped(kind, model)
    model[0].weight.requires_grad_(kind != "frozen")
    guard = hvd.Guard(parameters_every_commits=1)
    state = hvd.TorchState(model, optimizer, guard=guard, step=0)
    samples = torch.Generator().manual_seed(hvd.rank())

    def loop(state: hvd.TorchState) -> None:
        while state.step < STEPS:
            if state.step == THAW:
                model[0].weight.requires_grad_(True)
            images = torch.randn(8, 3, 6, 6, generator=samples).to(model[0].weight.dtype)
            images = images.contiguous(memory_format=form)
            labels = torch.randint(0, 3, (8,), generator=samples)

            optimizer.zero_grad(set_to_none=True)
            for _ in range(PASSES.get(kind, 1)):
                torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.step += 1
            state.commit()

    hvd.run(loop)(state)
    weights: list[float] = torch.cat([each.flatten() for each in model.parameters()]).tolist()
    return weights


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for kind in sys.argv[2:]:
        report = Path(sys.argv[1]) / f"{kind}-{hvd.rank()}.json"
        report.write_text(json.dumps(train(kind)))


if __name__ == "__main__":
    main()
