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
from hvdrecover.cli import options
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.checkpoint.storage import Storage


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    ls = _command(commands, "ls", _ls, "list the commits of a checkpoint root, newest first")
    ls.add_argument("--verify", action="store_true", help="read every byte, and check it")

    show = _command(commands, "show", _show, "show what one commit holds: tensors, objects, sample cursors")
    _add_commit(show)

    verify = _command(
        commands,
        "verify",
        _verify,
        "read commits through and compare their digests; exit 1 if one is broken",
    )
    verify.add_argument("commits", metavar="COMMIT", nargs="*", help="by default all that are complete")

    diff = _command(
        commands,
        "diff",
        _diff,
        "show what differs between two commits of a root",
        "For tensors of the same dtype and shape, the change is max|b - a| / max|a| over the elements that "
        "are finite in both. Elements that became or ceased to be NaN or infinite are counted apart.",
    )
    diff.add_argument("a", metavar="A", help="the commit to compare with")
    diff.add_argument("b", metavar="B", help="the commit that is compared with it")

    _add_prune(commands)
    _add_export(commands)


def _add_prune(commands: argparse._SubParsersAction[Any]) -> None:
    prune = _command(
        commands,
        "prune",
        _prune,
        "delete the commits that no rule keeps",
        "A commit that any of the rules asks for is kept. What killed processes have left is deleted, too, "
        "when it is certain that nobody is writing it. Broken commits are left alone, and so is a commit "
        "that somebody reads. No commit is deleted unless one that is kept is intact. With --near, "
        "what crashed jobs have left in this host's memory is deleted instead: of URL, or of all roots.",
        needs_url=False,
    )
    rule = prune.add_mutually_exclusive_group(required=True)
    rule.add_argument("--keep", type=options.count, metavar="N", help="keep the newest N commits")
    rule.add_argument(
        "--near",
        action="store_true",
        help="delete this user's near roots that no process keeps, on this host",
    )
    prune.add_argument(
        "--keep-every",
        type=options.count,
        metavar="K",
        help="keep the first commit of each run of K commit numbers",
    )
    prune.add_argument(
        "--keep-younger",
        type=options.seconds,
        metavar="TIME",
        help="keep commits younger than this: seconds, or a number with s, m, h, d or w, such as 7d",
    )
    prune.add_argument(
        "--keep-best",
        type=options.best,
        metavar="METRIC:min|max[:N]",
        help="keep the best N (1) by an attribute of the state that is a number, such as val_loss:min",
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    prune.set_defaults(refuse=prune.error)


def _add_export(commands: argparse._SubParsersAction[Any]) -> None:
    export = _command(
        commands,
        "export",
        _export,
        "write a commit to a plain file of torch, Keras or safetensors",
        "A .pt file holds a dict, attribute to state_dict, for torch.load(weights_only=True); writing it "
        "takes torch and Horovod. A .keras file holds a model, for keras.models.load_model; writing it takes "
        "TensorFlow and Horovod. A .safetensors file holds tensors alone, under their own names, or with the "
        "attribute's before them if several attributes are exported.",
    )
    _add_commit(export)
    export.add_argument(
        "--to",
        type=options.exported_file,
        metavar="FILE",
        required=True,
        help="FILE.pt, FILE.keras or FILE.safetensors",
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


def _command(
    commands: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    more: str = "",
    *,
    needs_url: bool = True,
) -> argparse.ArgumentParser:
    description = f"{help[0].upper()}{help[1:]}. {more}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    count = None if needs_url else "?"
    parser.add_argument("url", metavar="URL", nargs=count, help="the root: a path or an fsspec URL")
    parser.add_argument("--json", action="store_true", help="write JSON (docs/commands.md)")
    parser.set_defaults(run=run)
    return parser


def _add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "commit",
        metavar="COMMIT",
        nargs="?",
        help="a name such as g0003-c00000120, or its number, 120; by default the newest complete one",
    )


def _open(arguments: argparse.Namespace) -> Storage:
    from hvdrecover.checkpoint.storage import open_storage

    return open_storage(arguments.url)


def _put(arguments: argparse.Namespace, document: Callable[[], Any], text: Callable[[], Any]) -> None:
    """Write what a command has found: as JSON, or for people."""
    from hvdrecover.cli import documents, tables

    if arguments.json:
        sys.stdout.write(documents.dumps(document()))
    else:
        tables.put(text())


def _ls(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint import leftovers
    from hvdrecover.checkpoint.inspection import catalog, verify
    from hvdrecover.cli import documents, progress_bar, tables

    storage = _open(arguments)
    entries = catalog.entries(storage)
    left = leftovers.find(storage)
    verdicts: dict[Any, Any] = {}
    if arguments.verify:
        readable = [entry.id for entry in entries if entry.manifest is not None]
        with progress_bar.bar("verifying", verify.total_bytes(storage, readable)) as advance:
            verdicts = verify.verify_all(storage, readable, SYSTEM_CLOCK, advance)
    _put(
        arguments,
        lambda: documents.listing(storage.url, entries, left, verdicts),
        lambda: tables.listing(storage.url, entries, left, verdicts, SYSTEM_CLOCK.now()),
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog, contents
    from hvdrecover.cli import documents, tables

    storage = _open(arguments)
    found = contents.look_into(storage, catalog.find(storage, arguments.commit))
    _put(
        arguments,
        lambda: documents.contents(storage.url, found),
        lambda: tables.contents(storage.url, found, SYSTEM_CLOCK.now()),
    )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import verify
    from hvdrecover.cli import documents, progress_bar, tables

    storage = _open(arguments)
    commits = verify.due(storage, arguments.commits)
    with progress_bar.bar("verifying", verify.total_bytes(storage, commits)) as advance:
        verdicts = verify.verify_all(storage, commits, SYSTEM_CLOCK, advance)
    _put(
        arguments,
        lambda: documents.verdicts(storage.url, verdicts),
        lambda: tables.verdicts(storage.url, verdicts),
    )
    return 0 if all(verdict.intact for verdict in verdicts.values()) else 1


def _diff(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog, compare, verify
    from hvdrecover.cli import documents, progress_bar, tables

    storage = _open(arguments)
    pair = catalog.find(storage, arguments.a), catalog.find(storage, arguments.b)
    with progress_bar.bar("comparing", verify.total_bytes(storage, pair)) as advance:
        difference = compare.compare(storage, *pair, SYSTEM_CLOCK, advance)
    _put(
        arguments,
        lambda: documents.difference(storage.url, *pair, difference),
        lambda: tables.difference(storage.url, *pair, difference),
    )
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import prune, verify
    from hvdrecover.checkpoint.settings import Keep
    from hvdrecover.cli import documents, progress_bar, tables

    if arguments.near:
        return _prune_near(arguments)
    if arguments.url is None:
        arguments.refuse("--keep needs the URL of a checkpoint root")
    storage = _open(arguments)
    keep = Keep(arguments.keep, arguments.keep_every, arguments.keep_younger, arguments.keep_best)
    plan = prune.plan(storage, keep, SYSTEM_CLOCK)
    newest = [entry.id for entry in plan.keep[:1]]
    with progress_bar.bar("verifying what is kept", verify.total_bytes(storage, newest)) as advance:
        prune.check_one_is_intact(storage, plan, SYSTEM_CLOCK, advance)
    deleted = None if arguments.dry_run else list(prune.delete(storage, plan, SYSTEM_CLOCK))
    _put(
        arguments,
        lambda: documents.pruned(storage.url, plan, deleted),
        lambda: tables.pruned(storage.url, plan, deleted),
    )
    return 0


def _prune_near(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.near import place
    from hvdrecover.cli import documents, tables

    told = config.read().near
    near = "auto" if told == "off" else told
    named = None if arguments.url is None else place.folder(near, place.named(arguments.url))
    found = [each for each in place.roots(near) if named is None or each.path == named]
    gone = [(each, not each.in_use and (arguments.dry_run or place.remove(each.path))) for each in found]
    _put(
        arguments,
        lambda: documents.pruned_near(gone, dry_run=arguments.dry_run),
        lambda: tables.pruned_near(gone, SYSTEM_CLOCK.now(), dry_run=arguments.dry_run),
    )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog
    from hvdrecover.cli import documents, tables

    if arguments.to.suffix == ".keras" and arguments.model_config is None:
        arguments.refuse("a commit holds no model's config, so a .keras file takes --model-config FILE, too")
    if arguments.to.suffix != ".keras" and arguments.model_config is not None:
        arguments.refuse("--model-config is for a .keras file only")
    storage = _open(arguments)
    commit = catalog.find(storage, arguments.commit)
    wanted = storage, commit, arguments.only, arguments.to
    names = _exporter(arguments)(*wanted, force=arguments.force, clock=SYSTEM_CLOCK)
    _put(
        arguments,
        lambda: documents.exported(storage.url, commit, names, arguments.to),
        lambda: tables.exported(storage.url, commit, names, arguments.to),
    )
    return 0


def _exporter(arguments: argparse.Namespace) -> Callable[..., list[str]]:
    """Return what writes a file of the format that was asked for."""
    if arguments.to.suffix == ".pt":
        with _needed(".pt", "PyTorch"):
            from hvdrecover.torch.export import to_torch
        return to_torch
    if arguments.to.suffix == ".keras":
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
            "--to",
            f"writing a {suffix} file takes {framework} and Horovod, and one of them can't be imported here "
            f"({error}); install it, or export to a .safetensors file",
        ) from error
