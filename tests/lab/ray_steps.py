"""A job on Ray that writes down its steps; ``ours`` or ``horovod``, for Horovod's own executor.

Arguments: which way, the file for steps, and the checkpoint root.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time

import ray

STEPS = 100_000  # more than any test waits for


def train(ours: bool, ledger: str) -> None:
    import horovod.torch as hvd
    import torch

    import hvdrecover.torch as recover

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    elastic = recover.elastic if ours else hvd.elastic
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
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
    way, ledger, root = sys.argv[1:]
    ray.init(log_to_driver=True)
    job = functools.partial(train, way == "ours", ledger)
    if way == "ours":
        import hvdrecover.ray

        hvdrecover.ray.run(job, 2, checkpoint=root, options=["--no-standby", "--hang-timeout", "10"])
    else:
        from horovod.ray import ElasticRayExecutor

        settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, nics=["eth0"])
        executor = ElasticRayExecutor(settings, cpus_per_slot=1)
        executor.start()
        executor.run(job)
