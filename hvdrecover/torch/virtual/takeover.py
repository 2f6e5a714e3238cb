"""Horovod's optimizer, kept from averaging gradients: virtual ranks sum them up."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.errors import ConfigError
from hvdrecover.torch.names import parameters_of


def check(name: str, optimizer: Any) -> None:
    """Make sure that virtual ranks can sum up an optimizer's gradients.

    Args:
        name: its attribute of the state.
        optimizer: the optimizer.

    Raises:
        ConfigError: they can't; the message says why, and what to do.
    """
    if hasattr(optimizer, "virtual_gradients"):
        problem = "another state with virtual ranks has it; make a new DistributedOptimizer for this one"
    elif hasattr(optimizer, "_starting_models"):
        problem = "Adasum combines updates of processes, not gradients; pass op=Average or op=Sum"
    elif not hasattr(optimizer, "_allreduce_grad_async"):
        problem = "virtual ranks need its gradients; wrap it in DistributedOptimizer"
    elif optimizer.op not in (hvd.Average, hvd.Sum):
        problem = "virtual ranks average gradients or sum them up; pass op=Average or op=Sum"
    elif optimizer.process_set.process_set_id != 0:
        problem = "virtual ranks are those of the whole job; leave out process_set"
    elif optimizer.gradient_predivide_factor != 1.0:
        problem = (
            "gradients of virtual ranks are divided once, after the sum; leave out gradient_predivide_factor"
        )
    elif optimizer._compression not in (hvd.Compression.none, hvd.Compression.fp16):
        problem = (
            f"a sum of what {optimizer._compression!r} makes would depend on the number of processes; "
            "pass Compression.none or Compression.fp16"
        )
    else:
        return
    raise ConfigError(f"state.{name}", problem)


def take_over(name: str, optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    """Have Horovod's optimizer send no gradients.

    Args:
        name: its attribute of the state.
        optimizer: wrapped by ``hvd.DistributedOptimizer``.

    Returns:
        Names and parameters whose gradients it would have sent, in its order.
    """
    check(name, optimizer)
    named = [
        (optimizer._parameter_names[each], each) for each in parameters_of(optimizer) if each.requires_grad
    ]

    def send(*arguments: Any) -> Any:
        raise ConfigError(
            f"state.{name}", "a loss from before the state was made is still there; delete it before"
        )

    # Only these references keep the nodes alive that Horovod's hooks are on, unless a graph does.
    optimizer._grad_accs.clear()
    optimizer._allreduce_grad_async = optimizer._grouped_allreduce_grad_async = send
    optimizer._requires_update.clear()
    optimizer._handles = {}
    optimizer._groups, optimizer._p_to_group, optimizer._group_counts = None, {}, {}
    return named
