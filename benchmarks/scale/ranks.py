"""Election and consultation among many ranks, of which this process is one and all others are simulated."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.rows import Curve
from benchmarks.scale.simulated import Simulated
from benchmarks.states import Setting
from hvdrecover.checkpoint import manifest
from hvdrecover.guard import Guard
from hvdrecover.state.rank_local import RANDOM, PerRank, Randomness
from hvdrecover.state.state import State
from hvdrecover.torch.framework import TorchFramework

_RANKS = {"full": (2, 16, 128, 1024, 4096), "small": (2, 8)}
_ROUNDS, _WARMUPS = 7, 2
_OWN_BYTES = 64  # of a value of each rank's own


def measure(setting: Setting) -> list[Curve]:
    """Milliseconds of this rank's processor for what all ranks say, without sending it."""
    ways: dict[str, tuple[dict[str, Any], Callable[[State], None]]] = {
        "a commit": ({}, _commit),
        "a commit with a guard": ({"guard": Guard()}, _commit),
        'a commit, rng="store"': ({"rng": "store"}, _commit),
        "a commit, a value of each rank's own": ({"own": True}, _commit),
        "an election and agreement": ({}, State.sync),
    }
    found = []
    for what, (options, action) in ways.items():
        points = {float(ranks): _milliseconds(ranks, options, action) for ranks in _RANKS[setting.size]}
        found.append(Curve("ranks", what, "ms", "ranks", "simulated", points))
    written = {float(ranks): _manifest(ranks) for ranks in _RANKS[setting.size]}
    sizes = {ranks: [nbytes / 1e6] for ranks, (_, nbytes) in written.items()}
    times = {ranks: [1e3 * seconds] for ranks, (seconds, _) in written.items()}
    what = 'manifest of a durable commit, rng="store"'
    return [
        *found,
        Curve("manifest", what, "ms", "ranks", "simulated", times),
        Curve("manifest", what, "MB", "ranks", "simulated", sizes),
    ]


def _manifest(ranks: int) -> tuple[float, int]:
    """Return the seconds in which rank 0's writer makes a manifest of what all have sent, and its bytes."""
    state = _state(Simulated(ranks, _other), rng="store")
    state.sync()
    state.batch += 1
    state.commit()
    snapshot = state._session.memory.newest
    assert snapshot is not None
    began = time.perf_counter()
    text = manifest.dumps(snapshot.manifest(dict.fromkeys(snapshot.arenas, ""), {}, 0.0))
    return time.perf_counter() - began, len(text)


def _milliseconds(ranks: int, options: dict[str, Any], action: Callable[[State], None]) -> list[float]:
    world = Simulated(ranks, _other)
    state = _state(world, **options)
    state.sync()
    gc.collect()
    gc.freeze()
    took = []
    for _ in range(_WARMUPS + _ROUNDS):
        state.batch += 1
        began, others = time.perf_counter(), world.seconds
        action(state)
        took.append(1e3 * (time.perf_counter() - began - (world.seconds - others)))
    return took[_WARMUPS:]


def _state(
    world: Simulated, *, rng: Randomness = "reseed", guard: Guard | None = None, own: bool = False
) -> State:
    attributes: dict[str, Any] = {"model": torch.nn.Linear(16, 16), "batch": 0}
    if own:
        attributes["loss"] = PerRank(torch.zeros(_OWN_BYTES // 4))
    return State(TorchFramework(), world, rng=rng, guard=guard, attributes=attributes)


def _commit(state: State) -> None:
    state.commit()


def _other(mine: bytes, rank: int) -> bytes:
    """Return what another rank says of its own: what this one says, in its name."""
    try:
        message = json.loads(mine)
    except ValueError:
        return mine
    if not isinstance(message, dict) or RANDOM not in message:
        return mine
    values = {
        name: [{"$dict": [[rank, item] for _, item in structure["$dict"]]}, file]
        for name, (structure, file) in message["values"].items()
    }
    streams = {str(rank): state for state in message[RANDOM].values()}
    return json.dumps({"values": values, RANDOM: streams}).encode()
