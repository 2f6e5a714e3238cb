"""The last calls of modules, to see later which of them made a number that is not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hvdrecover.torch.finite import not_finite
from hvdrecover.torch.hooks import before_calls

logger = logging.getLogger(__name__)


class Calls:
    """Remembers the last call of each module while it trains.

    Args:
        modules: by attribute name.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._last: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None
        for name, module in modules.items():

            def note(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                if called.training and torch.is_grad_enabled():
                    self._last = name, args, kwargs

            before_calls(module, note)

    def first_bad(self) -> str:
        """Return what was the first of the last call that was not finite: the input, or a module's output.

        The call is made again for that, with other random numbers, and leaves the module as it was.

        Returns:
            What it is, in words; empty if all is finite, or the call can't be made again.
        """
        if self._last is None:
            return ""
        name, args, kwargs = self._last
        if _is_bad((args, kwargs)):
            return f"the input of {name}"
        bad: list[str] = []
        module = self._modules[name]
        with ExitStack() as stack:
            for inner, child in module.named_modules():
                path = f"{name}.{inner}" if inner else name

                def look(called: Any, args: Any, output: Any, path: str = path) -> None:
                    if not bad and _is_bad(output):
                        bad.append(f"the output of {path} ({type(called).__name__})")

                stack.callback(child.register_forward_hook(look).remove)
            stack.enter_context(_unchanged(module))
            try:
                module(*args, **kwargs)
            except Exception as error:  # it may need what is over, such as an autocast
                logger.debug("the modules can't be called again: %s", error)
        return bad[0] if bad else ""


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Leave the module's buffers and the random streams as they are."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield
        finally:
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


def _is_bad(tree: Any) -> bool:
    return bool(not_finite({str(number): each for number, each in enumerate(_tensors(tree))}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of numbers with a point in a nested structure."""
    leaves = pytree.tree_leaves(tree)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.dtype.is_floating_point]
