"""Host memory that a device copies into by itself, several times as fast as into ordinary memory."""

from __future__ import annotations

import contextlib
import weakref

import torch

from hvdrecover.checkpoint.arena import Arena

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


def pin(arena: Arena) -> None:
    """Pin an arena's memory until the arena is let go; if that can't be had, it is merely filled more slowly.

    CUDA refuses memory of some file systems, and more than the machine can spare.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = arena.buffer.ctypes.data
    if int(cudart.cudaHostRegister(address, arena.buffer.nbytes, _PORTABLE)) == 0:
        weakref.finalize(arena, cudart.cudaHostUnregister, address).atexit = False
    else:
        with contextlib.suppress(RuntimeError):  # CUDA would report the refusal to who launches a kernel next
            torch.zeros((), device="cuda")
