"""The commands that look at a checkpoint root; see ``docs/commands.md``."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.cli import options, pruning
from hvdrecover.cli.roots import command, open_root, put
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    pass


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    ls = command(commands, "ls", _ls, "list the commits of a checkpoint root, newest first")
    ls.add_argument("--verify", action="store_true", help="read every byte, and check it")

    show = command(commands, "show", _show, "show what a commit holds: tensors, objects, sample cursors")
    _add_commit(show)

    verify = command(
        commands,
        "verify",
        _verify,
        "read commits through, and compare their digests",
        "Exits with 1 if one is broken.",
    )
    verify.add_argument("commits", metavar="COMMIT", nargs="*", help="by default all that are complete")

    diff = command(
        commands,
        "diff",
        _diff,
        "show what differs between two commits of a root",
        "For tensors of the same dtype and shape, the change is max|b - a| / max|a| over the elements that "
        "are finite in both. Elements that became or ceased to be NaN or infinite are counted apart.",
    )
    diff.add_argument("a", metavar="A", help="the commit to compare with")
    diff.add_argument("b", metavar="B", help="the commit that is compared with it")

    pruning.add_prune(commands)
    _add_export(commands)


def _add_export(commands: argparse._SubParsersAction[Any]) -> None:
    export = command(
        commands,
        "export",
        _export,
        "write a commit to a file of torch, Keras or safetensors",
        "A .pt file holds a dict, attribute to state_dict, for torch.load(weights_only=True); writing it "
        "takes torch and Horovod. A .keras file holds a model, for keras.models.load_model; writing it takes "
        "TensorFlow and Horovod. A .safetensors file holds tensors alone, under their own names, or with the "
        "attribute's before them if several attributes are exported.",
    )
    _add_commit(export)
    output = export.add_mutually_exclusive_group(required=True)
    output.add_argument(
        "-o",
        "--output",
        type=options.exported_file,
        metavar="FILE",
        help="FILE.pt, FILE.keras or FILE.safetensors",
    )
    output.add_argument(
        "--to", type=options.exported_file, dest="output", action=options.OldName, now="--output"
    )
    export.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ATTRIBUTE",
        help="export this attribute of the state, such as model; can be given several times",
    )
    export.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="for a .keras file: what model.to_json() gives, or another .keras file of the model",
    )
    export.add_argument("--force", action="store_true", help="replace the file if it exists")
    export.set_defaults(refuse=export.error)


def _add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "commit",
        metavar="COMMIT",
        nargs="?",
        help="a name such as g0003-c00000120, or its number, 120; by default the newest complete one",
    )


def _ls(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint import leftovers
    from hvdrecover.checkpoint.inspection import catalog, verify
    from hvdrecover.cli import documents, progress_bar, tables

    storage = open_root(arguments)
    entries = catalog.entries(storage)
    left = leftovers.find(storage)
    verdicts: dict[Any, Any] = {}
    if arguments.verify:
        readable = [entry.id for entry in entries if entry.manifest is not None]
        with progress_bar.bar("verifying", verify.total_bytes(storage, readable)) as advance:
            verdicts = verify.verify_all(storage, readable, advance)
    put(
        arguments,
        lambda: documents.listing(storage.url, entries, left, verdicts),
        lambda: tables.listing(storage.url, entries, left, verdicts, SYSTEM_CLOCK.now()),
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog, contents
    from hvdrecover.cli import documents, tables

    storage = open_root(arguments)
    found = contents.look_into(storage, catalog.find(storage, arguments.commit))
    put(
        arguments,
        lambda: documents.contents(storage.url, found),
        lambda: tables.contents(storage.url, found, SYSTEM_CLOCK.now()),
    )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import verify
    from hvdrecover.cli import documents, progress_bar, tables

    storage = open_root(arguments)
    commits = verify.due(storage, arguments.commits)
    with progress_bar.bar("verifying", verify.total_bytes(storage, commits)) as advance:
        verdicts = verify.verify_all(storage, commits, advance)
    put(
        arguments,
        lambda: documents.verdicts(storage.url, verdicts),
        lambda: tables.verdicts(storage.url, verdicts),
    )
    return 0 if all(verdict.intact for verdict in verdicts.values()) else 1


def _diff(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog, compare, verify
    from hvdrecover.cli import documents, progress_bar, tables

    storage = open_root(arguments)
    pair = catalog.find(storage, arguments.a), catalog.find(storage, arguments.b)
    with progress_bar.bar("comparing", verify.total_bytes(storage, pair)) as advance:
        difference = compare.compare(storage, *pair, advance)
    put(
        arguments,
        lambda: documents.difference(storage.url, *pair, difference),
        lambda: tables.difference(storage.url, *pair, difference),
    )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog
    from hvdrecover.cli import documents, tables

    if arguments.output.suffix == ".keras" and arguments.model_config is None:
        arguments.refuse("a commit holds no model's config, so a .keras file takes --model-config FILE, too")
    if arguments.output.suffix != ".keras" and arguments.model_config is not None:
        arguments.refuse("--model-config is for a .keras file only")
    storage = open_root(arguments)
    commit = catalog.find(storage, arguments.commit)
    wanted = storage, commit, arguments.only, arguments.output
    names = _exporter(arguments)(*wanted, force=arguments.force)
    put(
        arguments,
        lambda: documents.exported(storage.url, commit, names, arguments.output),
        lambda: tables.exported(storage.url, commit, names, arguments.output),
    )
    return 0


def _exporter(arguments: argparse.Namespace) -> Callable[..., list[str]]:
    """Return what writes a file of the format that was asked for."""
    if arguments.output.suffix == ".pt":
        with _needed(".pt", "PyTorch"):
            from hvdrecover.torch.export import to_torch
        return to_torch
    if arguments.output.suffix == ".keras":
        config.quiet_tensorflow()
        with _needed(".keras", "TensorFlow"), _unheard():
            from hvdrecover.tensorflow.export import to_keras
        return functools.partial(to_keras, model_config=arguments.model_config)
    from hvdrecover.checkpoint.inspection.export import to_safetensors

    return to_safetensors


@contextmanager
def _unheard() -> Iterator[None]:
    """Import what speaks while it is loaded, before it knows what it was asked to leave out."""
    if config.read().log == "debug":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _needed(suffix: str, framework: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            "--output",
            f"writing a {suffix} file takes {framework} and Horovod, and one of them can't be imported here "
            f"({error}); install it, or export to a .safetensors file",
        ) from error
