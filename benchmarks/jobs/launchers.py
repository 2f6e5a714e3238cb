"""The ways to start a job on this host, of two workers unless said otherwise, that survives a lost one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.jobs import supervised

WORKERS = 2
FAULTS = 3  # that a job survives
_PROGRAMS = Path(sys.executable).parent
# To Horovod each is another host, in place of a lost one: it resolves them all to this one's loopback.
_NAMES = ("localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f.1", "0x7f.0.1", "0177.1", "0177.0.1")
_RESTARTS = ("--max-restarts", "20")  # more than there are faults
_TORCHRUN = "torch.distributed.run"
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# Torch 2.13 keeps the store in which ranks look each other's addresses up, and new workers may find those of
# the lost ones in it: connecting fails after seconds, and torchrun restarts once more. A new store helps.
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **_LOOPBACK}

_RAY = {
    # By default its controller takes reports, and looks for lost workers, every 2 s. In between there is room
    # for one report, so a step that reports would take as long.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SPT_NOENV": "1",  # else a title of a process is written over the environment that it is known by
    **_LOOPBACK,
}


@dataclass(frozen=True)
class Launcher:
    """A way to start a job."""

    title: str  # how tables name it
    way: str  # how the training survives; see `benchmarks.jobs.training.Orders`
    # the command before that of the training, given a folder for what it needs
    words: Callable[[Path], list[str]]
    python: bool = True  # whether the interpreter is part of the training's command
    standbys: int = 0  # how many processes stand by
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables that it needs
    workers: int = WORKERS  # how many it starts


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
    return _horovodrun(folder, [f"{name}:1" for name in _NAMES], *bounds)


def _restarting(title: str, way: str, *, python: str = sys.executable, module: str = _TORCHRUN) -> Launcher:
    """Return a launcher that starts all workers again, as ``torchrun`` does."""
    words = [python, "-m", module, "--standalone", "--nproc-per-node", str(WORKERS), *_RESTARTS, "-m"]
    return Launcher(title, way, lambda _: [*words], python=False, settings=_NEW_STORE)


def peers(python: str | None) -> list[Launcher]:
    """Return the launchers of those that do what hvdrecover does.

    Args:
        python: of an environment with the peers that are packages of their own; None to leave them out.
    """
    found = [
        replace(SPARE_HOST, title="Horovod's own elastic"),
        _restarting("torchrun, torch.save", "torch_save"),
        _restarting("torchrun, DCP async_save", "dcp"),
    ]
    if python is None:
        return found
    ours = "benchmarks.jobs.peers.run_"
    trainer = [python, "-m", f"{ours}ray", str(WORKERS)]
    replicas = [python, "-m", f"{ours}torchft", str(WORKERS), *_RESTARTS, "-m"]
    return [
        *found,
        _restarting("dlrover 0.6.1", "dlrover", python=python, module=f"{ours}dlrover"),
        _restarting("lm-resiliency 0.2.0", "lm_resiliency", python=python),
        Launcher("torchft 0.2.0", "torchft", lambda _: [*replicas], python=False, settings=_LOOPBACK),
        Launcher("Ray Train 2.60.0", "ray", lambda _: [*trainer], python=False, settings=_RAY),
    ]


STANDBY = Launcher("hvdrecover run", "hvdrecover", lambda _: supervised(workers=WORKERS), standbys=WORKERS)
NO_STANDBY = Launcher(
    "hvdrecover run --no-standby", "hvdrecover", lambda _: supervised("--no-standby", workers=WORKERS)
)
SPARE_HOST = Launcher("plain elastic horovodrun with spare hosts", "horovod", _spare)
TORCHRUN = _restarting("torchrun --max-restarts", "torchrun")
UNGUARDED = Launcher(
    "plain elastic horovodrun",
    "hvdrecover",
    lambda folder: _horovodrun(folder, [f"localhost:{WORKERS}"], "--min-np", "1"),
)
