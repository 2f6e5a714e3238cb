"""A job on Ray that records its steps. Arguments: the file for the steps, and the checkpoint root."""

from __future__ import annotations

import functools
import json
import os
import sys
import time

import ray

import hvdrecover_ray

STEPS = 100_000  # more than any test waits for


def train(ledger: str) -> None:
    import horovod.torch as hvd
    import torch

    import hvdrecover.torch as recover

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    state = recover.TorchState(model=model, optimizer=optimizer, step=0)

    @recover.run
    def loop(state: recover.TorchState) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.step += 1
            line = [time.time(), os.getpid(), hvd.rank(), hvd.size(), state.step]
            with open(ledger, "a") as file:  # noqa: PTH123
                file.write(f"{json.dumps(line)}\n")
            time.sleep(0.1)
            state.commit()

    loop(state)


if __name__ == "__main__":
    ledger, root = sys.argv[1:]
    ray.init(log_to_driver=False)
    options = ["--no-standby", "--hang-timeout", "10"]
    hvdrecover_ray.run(functools.partial(train, ledger), 2, least=1, checkpoint=root, options=options)
