"""Copying and comparing many tensors at the speed of the machine's memory."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdrecover.checkpoint.arena import (
    HUGE_PAGE,
    WORTH_A_SPAN,
    Arena,
    Span,
    allocate,
    copy_spans,
    spans_equal,
)
from hvdrecover.state.adapter import Tree

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


def copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its target, of the same dtype and shape; done on return.

    Large ones that lie in one piece are copied as memory. The rest go to torch's multi-tensor copy, which
    spends next to nothing on each but does not get all of the memory's bandwidth.
    """
    spans: list[Span] = []
    rest: list[tuple[torch.Tensor, torch.Tensor]] = []
    for source, target in zip(sources, targets, strict=True):
        if source.nbytes >= WORTH_A_SPAN and _is_one_piece(source) and _is_one_piece(target):
            spans.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            rest.append((source, target))
    try:
        if rest:
            with torch.no_grad():
                torch._foreach_copy_(
                    [target for _, target in rest], [source for source, _ in rest], non_blocking=True
                )
        if spans:
            copy_spans(spans)
    finally:
        _wait_for_devices(rest)


def _wait_for_devices(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in {source.device for source, target in copies if source.is_cuda and target.is_cpu}:
            torch.cuda.current_stream(device).synchronize()


def all_equal(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    large: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept, so that the addresses stay valid
    for mine, other in pairs:
        if mine.nbytes >= WORTH_A_SPAN and _is_one_piece(mine) and _is_one_piece(other):
            large.append((mine, other))
        elif not torch.equal(bits := _bits(mine), _bits(other).to(bits.device)):
            return False
    return spans_equal([(other.data_ptr(), mine.data_ptr(), mine.nbytes) for mine, other in large])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def own(tree: Tree, present: Tree) -> Tree:
    """A copy of a tree. Tensors of the tree ``present`` that fit are overwritten, and become part of it."""
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    taken: set[int] = set()

    def copied(value: Any, old: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not can_take(old, value) or old.data_ptr() in taken:
                old = _new_like(value)
            taken.add(old.data_ptr())
            sources.append(value)
            targets.append(old)
            return old
        if type(value) is dict:
            old = old if isinstance(old, dict) else {}
            return {key: copied(item, old.get(key)) for key, item in value.items()}
        if type(value) is list:
            old = old if isinstance(old, list) and len(old) == len(value) else [None] * len(value)
            return [copied(item, other) for item, other in zip(value, old, strict=True)]
        return copy.deepcopy(value)

    outcome = copied(tree, present)
    copy_all(sources, targets)
    return outcome


def _new_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same dtype and shape; the content is undefined.

    A large one lies in huge pages. torch would take small ones, and spend several times as long on getting
    them as on filling them.
    """
    if tensor.nbytes < HUGE_PAGE or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return torch.empty_like(tensor)
    memory = allocate(tensor.nbytes, in_children=True)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def can_take(target: Any, value: torch.Tensor) -> bool:
    """Return whether a value can be copied into a tensor without changing its bits or other elements."""
    return (
        type(target) is torch.Tensor
        and (target.dtype, target.shape) == (value.dtype, value.shape)
        and target.is_contiguous()
        and not target.requires_grad
        and not target.is_inference()
    )


def _is_one_piece(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def pin(arena: Arena) -> None:
    """Pin an arena's memory until it is freed: a device copies into it by itself, several times as fast.

    CUDA refuses memory of some file systems, and more than the machine can spare. Copies are slower then.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = arena.buffer.ctypes.data
    if int(cudart.cudaHostRegister(address, arena.buffer.nbytes, _PORTABLE)) == 0:
        weakref.finalize(arena, cudart.cudaHostUnregister, address).atexit = False
    else:
        with contextlib.suppress(RuntimeError):  # CUDA would report the refusal to who launches a kernel next
            torch.zeros((), device="cuda")
