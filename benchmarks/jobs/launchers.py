"""The ways to start a job on this host, of two workers unless said otherwise, that survives a lost one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdrecover.examples.digits_run import supervised

WORKERS = 2
FAULTS = 3  # that a job survives; torchrun is told, and Horovod gets as many spare hosts
_PROGRAMS = Path(sys.executable).parent
# To Horovod each is another host: it resolves them all to this one's loopback.
_NAMES = ("localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f.1")


@dataclass(frozen=True)
class Launcher:
    """A way to start a job.

    Attributes:
        title: how tables name it.
        way: how the training survives; see `benchmarks.jobs.training.Orders`.
        words: the command before that of the training, given a folder for what it needs.
        python: whether the interpreter is part of the training's command.
        standbys: how many processes stand by.
        settings: environment variables that it needs.
        workers: how many it starts.
    """

    title: str
    way: str
    words: Callable[[Path], list[str]]
    python: bool = True
    standbys: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    workers: int = WORKERS


def _horovodrun(folder: Path, hosts: list[str], *options: str) -> list[str]:
    """Elastic ``horovodrun``, with no other settings than those of ``hvdrecover run``."""
    listed, script = folder / "hosts", folder / "hosts.sh"
    listed.write_text("".join(f"{host}\n" for host in hosts))
    script.write_text(f"#!/bin/sh\nexec cat '{listed}'\n")
    script.chmod(0o755)
    words = [os.fspath(_PROGRAMS / "horovodrun"), "-np", str(WORKERS), *options]
    return [*words, "--host-discovery-script", os.fspath(script), "--network-interface", "lo"]


def _spare(folder: Path) -> list[str]:
    bounds = ("--min-np", str(WORKERS), "--max-np", str(WORKERS))
    return _horovodrun(folder, [f"{name}:1" for name in _NAMES[: WORKERS + FAULTS]], *bounds)


def _torchrun(folder: Path) -> list[str]:
    words = [os.fspath(_PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node", str(WORKERS)]
    return [*words, "--max-restarts", str(FAULTS), "-m"]


STANDBY = Launcher("hvdrecover run", "hvdrecover", lambda _: supervised(workers=WORKERS), standbys=WORKERS)
NO_STANDBY = Launcher(
    "hvdrecover run --no-standby", "hvdrecover", lambda _: supervised("--no-standby", workers=WORKERS)
)
SPARE_HOST = Launcher("plain elastic horovodrun with spare hosts", "horovod", _spare)
# Torch 2.13 keeps the store in which ranks look each other's addresses up, and new workers may find those of
# the lost ones in it: connecting fails after seconds, and torchrun restarts once more. A new store helps.
TORCHRUN = Launcher(
    "torchrun --max-restarts",
    "torchrun",
    _torchrun,
    python=False,
    settings={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"},
)
UNGUARDED = Launcher(
    "plain elastic horovodrun",
    "hvdrecover",
    lambda folder: _horovodrun(folder, [f"localhost:{WORKERS}"], "--min-np", "1"),
)
