"""Train on a Ray cluster, and survive the loss of processes and nodes.

    ray job submit --working-dir . -- python example.py file:///shared/run-1

All nodes must reach the URL. A later start resumes from the newest commit there.
"""

import functools
import sys

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
import hvdrecover_ray


def train(steps: int) -> float:
    """Fit a line to numbers, and return the loss."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    state = recover.TorchState(model=model, optimizer=optimizer, step=0, loss=0.0)

    @recover.run
    def loop(state: recover.TorchState) -> float:
        while state.step < steps:
            inputs = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.loss = loss.item()
            state.commit()  # the job can return to this point
        return state.loss

    return loop(state)


if __name__ == "__main__":
    # Two processes with one CPU each, and up to four if there is room. Add gpus=1 for one GPU each.
    loss = hvdrecover_ray.run(functools.partial(train, 200), processes=2, most=4, checkpoint=sys.argv[1])
    print(f"loss of rank 0: {loss}")
