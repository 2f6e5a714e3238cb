"""The time until a commit is on the disk, and what that costs."""

from __future__ import annotations

from typing import NamedTuple

import horovod.torch as hvd

import hvdrecover.torch as recover
from benchmarks import peers
from benchmarks.measure import GB, Reserve, by_turns, cpu_seconds, let_clean_up, stopwatch
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting, Training
from hvdrecover.checkpoint.arena import PAGE, allocate

_KEEP = 2
_PEERS = {
    "torch.save + fsync": (peers.torch_save, Goal(0.7, 0.5)),
    "safetensors save_file + fsync": (peers.safetensors_save, Goal(0.7, 0.5)),
    "DCP save": (peers.dcp_save, Goal(0.5, 0.5)),
}


class _Write(NamedTuple):
    """One durable commit: seconds from the call of `commit`, from its return, and of processor time since."""

    whole: float
    background: float
    cpu: float


def measure(setting: Setting) -> list[Row]:
    """The way to the disk, against the disk itself and other ways."""
    hvd.init()
    training = Training(setting.shape, trained=True)
    root = recover.Checkpoint(str(setting.folder / "root"), keep=_KEEP)
    state = recover.TorchState(model=training.model, optimizer=training.optimizer, batch=0, checkpoint=root)
    state.sync()
    for _ in range(_KEEP + 1):  # from then on, files of deleted commits are written over
        training.step()
        state.commit()
        state.flush()
        let_clean_up(state)
    reserve = Reserve(training.nbytes)

    def ours() -> _Write:
        training.step()
        with reserve.freed():
            stall = stopwatch(state.commit)
            before = cpu_seconds()
            background = stopwatch(state.flush)
            write = _Write(stall + background, background, cpu_seconds() - before)
            let_clean_up(state)
            return write

    nbytes = -(-training.nbytes // PAGE) * PAGE
    raw = peers.Disk(setting.folder, allocate(nbytes).data)
    others = [
        peers.until_durable(save, training, setting.folder / "peer", reserve) for save, _ in _PEERS.values()
    ]
    writes, disk, *saves = by_turns(setting.rounds(5), [ours, raw.write, *others])
    large, title = setting.state == "large", setting.shape.title
    rows = [
        Row(
            "durable",
            "durable throughput to a local disk",
            title,
            "GB/s",
            [training.nbytes / GB / write.background for write in writes],
            "raw O_DIRECT write",
            [nbytes / GB / seconds for seconds in disk],
            Goal(0.8, 0.95, at_least=True) if large else None,
        ),
        Row(
            "durable",
            "processor time of writing in the background",
            title,
            "s/GB",
            [write.cpu / (training.nbytes / GB) for write in writes],
            goal=Goal(0.15, 0.06, digits=3) if large else None,
        ),
    ]
    whole = [write.whole for write in writes]
    for (peer, (_, goal)), theirs in zip(_PEERS.items(), saves, strict=True):
        rows.append(Row("durable", "time until durable", title, "s", whole, peer, theirs, goal))
    return rows
