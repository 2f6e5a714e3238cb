"""The state of a torch training job; loading and exporting a commit outside of a job."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hvdrecover.checkpoint import Checkpoint, CommitId
from hvdrecover.checkpoint.inspection import chosen, written_aside
from hvdrecover.checkpoint.root import read_commit
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import ExportError
from hvdrecover.guard import Guard
from hvdrecover.scalars import Tracker
from hvdrecover.state import contents
from hvdrecover.state.adapter import rebuild
from hvdrecover.state.contents import Loaded
from hvdrecover.state.rank_local import Randomness
from hvdrecover.state.state import State
from hvdrecover.torch import virtual
from hvdrecover.torch.framework import TorchFramework, TorchWorld
from hvdrecover.torch.stepping import name_parameters
from hvdrecover.virtual.ranks import Policy, virtual_of
from hvdrecover.virtual.steps import Step, steps


class TorchState(State):
    """A `State` of torch modules, optimizers, schedulers, samplers and plain objects.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped by ``hvd.DistributedOptimizer`` or not, or None.
        checkpoint: a `Checkpoint` or its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that nothing
            is written.
        rng: ``"reseed"``, the default, or ``"store"``; see `hvdrecover.state.rank_local`.
        guard: what is watched about the ranks, such as ``Guard()``; None watches nothing.
        tensorboard: path or URL of a folder for TensorBoard's runs, one for each rank; None writes none.
        tracker: an experiment tracker, such as ``WandB()`` or ``MLflow()``; None reports to none.
        virtual_ranks: number of virtual ranks, whose work any number of processes carry out with one and the
            same result; None has none. Train by `steps`.
        shares: how they are dealt out: ``"equal"``, the default, or ``"by-speed"``.
        attributes: more modules, optimizers, samplers and anything else to track, by name.

    Raises:
        ConfigError: a setting has no usable value, or an attribute's name is taken.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.

    Examples:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state = recover.TorchState(model, optimizer, epoch=0)
        >>> state.epoch += 1
        >>> state.restore()  # as after a fault
        >>> state.epoch
        0
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness | None = None,
        guard: Guard | None = None,
        tensorboard: str | None = None,
        tracker: Tracker | None = None,
        virtual_ranks: int | None = None,
        shares: Policy | None = None,
        **attributes: Any,
    ) -> None:
        attributes = {"model": model, "optimizer": optimizer, **attributes}
        name_parameters(attributes)
        ranks = None
        if virtual_ranks is not None:
            ranks = virtual.virtual_ranks(attributes, virtual_ranks, shares)
        super().__init__(
            TorchFramework(),
            TorchWorld(),
            checkpoint=checkpoint,
            rng=rng,
            guard=guard,
            tensorboard=tensorboard,
            tracker=tracker,
            virtual=ranks,
            attributes=attributes,
        )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A tracked attribute."""

    def steps(self, loader: Any) -> Iterator[Step]:
        """Go through the rest of a pass over the data, step by step of all virtual ranks.

        ::

            for step in state.steps(loader):
                for images, labels in step:       # one batch for each virtual rank of this process
                    loss(model(images), labels).backward()
                optimizer.step()                  # by now, gradients of the whole job
                state.commit()

        Samples are counted as done; don't call ``record_batch``. A sampler's ``set_epoch`` is the script's.

        Args:
            loader: a ``DataLoader`` whose sampler is an `ElasticSampler` of this state, which deals samples
                out to the virtual ranks; or a `PerRank` of this state, with a loader for each of them.

        Raises:
            ConfigError: it is something else, or the state has no virtual ranks.
            StepError: a step was left before its end, or passed over.
        """
        context = self._session.context
        ranks = virtual_of(context.ranks)
        feed = virtual.feed(loader, context.contents.values, context.framework)
        return steps(ranks, feed, Step)


def load(
    url: str,
    *,
    model: Any = None,
    optimizer: Any = None,
    commit: str | int | CommitId | None = None,
    strict: bool = True,
    **attributes: Any,
) -> Loaded:
    """Load a commit into the objects that are handed in, and nothing else. Horovod need not be initialised.

    Only the files of these attributes are read, and every byte of them is verified. The job at the root, if
    any, is not disturbed.

    Args:
        url: the checkpoint root: a path or an fsspec URL.
        model: the module that was ``model`` in the state.
        optimizer: the optimizer that was ``optimizer`` in the state.
        commit: its name, such as ``"g0003-c00000120"``, or its number; None takes the newest that verifies,
            and warns of each that it passes over.
        strict: whether what is handed in must fit the commit exactly. If not, what fits is loaded, and the
            rest is warned of.
        attributes: more modules, optimizers, schedulers and so on, by the names that they had in the state.

    Raises:
        ConfigError: no object was handed in, an object cannot be loaded into, or the URL cannot be opened.
        UnknownCommitError: the root holds no such commit, or is not a checkpoint root.
        MismatchError: something does not fit. Nothing was loaded.
        CorruptCheckpointError, NoUsableCommitError: the commit, or all commits, are damaged.

    Examples:
        >>> loaded = recover.load("s3://bucket/run-1", model=model)  # doctest: +SKIP
        >>> loaded.objects["epoch"]  # doctest: +SKIP
        12
    """
    given = {"model": model, "optimizer": optimizer, **attributes}
    return contents.load(TorchFramework(), url, given, commit, strict=strict)


def to_torch(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, force: bool
) -> list[str]:
    """Write attributes, all if ``only`` is empty, to a file for ``torch.load(path, weights_only=True)``."""
    url = f"{storage.url}/{commit.name}"
    with written_aside(path, force=force) as aside:
        snapshot = read_commit(storage, commit, only or None)
        names = chosen(snapshot, only, url)
        exported, refused = {}, {}
        for name in names:
            try:
                if name in snapshot.samplers:
                    exported[name] = snapshot.samplers[name]
                else:
                    structure, arena = snapshot.attributes[name], snapshot.arenas.get(name)
                    exported[name] = rebuild(TorchFramework(), structure, arena, own=False)
            except ValueError as error:
                refused[name] = str(error)
        with aside.open("xb") as file:
            torch.save(exported, file)
        if get_unsafe_globals_in_checkpoint(aside):
            refused |= {name: kinds for name, each in exported.items() if (kinds := _code_in(each))}
        if refused:
            listing = "; ".join(f"{name} ({reason})" for name, reason in refused.items())
            raise ExportError(
                url,
                f"a torch file that is loaded without running code can't hold {listing}; name other "
                "attributes with --only",
            )
    return names


def _code_in(value: Any) -> str:
    """Return the names of the classes for which ``torch.load(weights_only=True)`` would have to run code."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return ", ".join(get_unsafe_globals_in_checkpoint(file))
