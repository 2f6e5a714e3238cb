"""The commands that look at a checkpoint root; see ``docs/commands.md``."""

from __future__ import annotations

import argparse
import functools
import os
import re
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
    from hvdrecover.cli.printer import Result

_COMMIT = re.compile(r"[0-9]+|g[0-9]+-c[0-9]+")


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    ls = _command(commands, "ls", _ls, "list the commits of a checkpoint root, newest first")
    ls.add_argument("--verify", action="store_true", help="read every byte, and check it")

    show = _command(commands, "show", _show, "show what a commit holds: tensors, objects, sample cursors")
    _add_commit(show)

    verify = _command(
        commands,
        "verify",
        _verify,
        "read commits through, and compare their digests",
        "Exits with 1 if one is broken.",
    )
    verify.add_argument("commits", metavar="COMMIT", nargs="*", help="by default all that are complete")

    diff = _command(
        commands,
        "diff",
        _diff,
        "show what differs between two commits of a root",
        "For tensors whose elements differ, the largest difference is max|b - a| over the elements that are "
        "finite in both.",
    )
    diff.add_argument("a", metavar="A", help="the commit to compare with")
    diff.add_argument("b", metavar="B", help="the commit that is compared with it")

    _add_prune(commands)
    _add_export(commands)


def _add_export(commands: argparse._SubParsersAction[Any]) -> None:
    export = _command(
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
    export.add_argument(
        "-o",
        "--output",
        required=True,
        type=options.exported_file,
        metavar="FILE",
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


def _add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "commit",
        metavar="COMMIT",
        nargs="?",
        help="a name such as g0003-c00000120, or its number, 120; by default the newest complete one",
    )


def _add_prune(commands: argparse._SubParsersAction[Any]) -> None:
    prune = _command(
        commands,
        "prune",
        _prune,
        "delete the commits that no rule keeps",
        "A commit that any of the rules asks for is kept. What killed processes have left is deleted, too, "
        "when it is certain that nobody is writing it. Broken commits are left alone, and so is a commit "
        "that somebody reads. No commit is deleted unless one that is kept is intact. What is to be deleted "
        "is shown first, and asked for. With --near, "
        "what crashed jobs have left in this host's memory is deleted instead: of URL, or of all roots.",
    )
    rule = prune.add_mutually_exclusive_group(required=True)
    rule.add_argument("--keep-last", type=options.count, metavar="N", help="keep the newest N commits")
    rule.add_argument(
        "--near",
        action="store_true",
        help="delete this user's near roots that no process keeps, on this host",
    )
    prune.add_argument(
        "--keep-period",
        type=options.count,
        metavar="K",
        help="keep the first commit of each run of K commit numbers",
    )
    prune.add_argument(
        "--keep-within", type=options.duration, metavar="DURATION", help="keep commits younger than this"
    )
    prune.add_argument(
        "--keep-best",
        type=options.best,
        metavar="METRIC:min|max[:N]",
        help="keep the best N (1) by an attribute of the state that is a number, such as val_loss:min",
    )
    sure = prune.add_mutually_exclusive_group()
    sure.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    sure.add_argument("-y", "--yes", action="store_true", help="delete without asking, for scripts")


def _command(
    commands: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    more: str = "",
) -> argparse.ArgumentParser:
    """Add a command that is given the URL of a root, or takes the environment's."""
    description = f"{help[0].upper()}{help[1:]}. {more}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    what = "the root: a path or an fsspec URL (default: HVDRECOVER_CHECKPOINT)"
    parser.add_argument("url", metavar="URL", nargs="?", help=what)
    parser.add_argument("--json", action="store_true", help="write JSON (docs/commands.md)")
    parser.set_defaults(run=run, refuse=parser.error)
    return parser


def _open_root(arguments: argparse.Namespace) -> Storage:
    """Return the root of the command line, or else of the environment.

    With that one, the first argument may be a commit already. Without any, the command exits with 2.
    """
    from hvdrecover.checkpoint.storage import open_storage

    default, given = config.read().checkpoint, arguments.url
    if given is not None and default is not None and _COMMIT.fullmatch(given) and not Path(given).exists():
        if "commits" in arguments:
            arguments.url, arguments.commits = None, [given, *arguments.commits]
        elif "commit" in arguments and arguments.commit is None:
            arguments.url, arguments.commit = None, given
    url: str = arguments.url or default or ""
    if not url:
        arguments.refuse("no checkpoint root was given: name its URL, or set HVDRECOVER_CHECKPOINT to it")
    return open_storage(url)


def _ls(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint import leftovers
    from hvdrecover.checkpoint.inspection import catalog, verify
    from hvdrecover.cli import printer, results

    storage = _open_root(arguments)
    entries, left = catalog.entries(storage), leftovers.find(storage)
    verdicts: dict[Any, Any] = {}
    if arguments.verify:
        readable = [entry.id for entry in entries if entry.manifest is not None]
        with printer.progress("verifying", verify.total_bytes(storage, readable)) as advance:
            verdicts = verify.verify_all(storage, readable, advance)
    printer.put(results.Listing.of(storage.url, entries, left, verdicts), as_json=arguments.json)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog
    from hvdrecover.cli import printer, results

    storage = _open_root(arguments)
    found = catalog.look_into(storage, catalog.find(storage, arguments.commit))
    printer.put(results.Content.of_root(storage.url, found), as_json=arguments.json)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog, verify
    from hvdrecover.cli import printer, results

    storage = _open_root(arguments)
    commits = verify.due(storage, arguments.commits)
    with printer.progress("verifying", verify.total_bytes(storage, commits)) as advance:
        verdicts = verify.verify_all(storage, commits, advance)
    entries = filter(None, (catalog.entry(storage, commit) for commit in verdicts))
    read = [results.Commit.of(entry, verdicts[entry.id]) for entry in entries]
    found = results.Verification(storage.url, all(each.intact for each in read), read)
    printer.put(found, as_json=arguments.json)
    return 0 if found.intact else 1


def _diff(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog, compare, verify
    from hvdrecover.cli import printer, results

    storage = _open_root(arguments)
    a, b = catalog.find(storage, arguments.a), catalog.find(storage, arguments.b)
    with printer.progress("comparing", verify.total_bytes(storage, (a, b))) as advance:
        found, unchanged = compare.compare(storage, a, b, advance)
    printer.put(results.Comparison.of(storage.url, a.name, b.name, found, unchanged), as_json=arguments.json)
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import prune, verify
    from hvdrecover.checkpoint.settings import Keep
    from hvdrecover.cli import printer, results

    if not (arguments.yes or arguments.dry_run or sys.stdin.isatty()):
        arguments.refuse("there is no terminal to ask at; add --yes to delete, or --dry-run to only look")
    if arguments.near:
        return _prune_near(arguments)
    storage = _open_root(arguments)
    keep = Keep(arguments.keep_last, arguments.keep_period, arguments.keep_within, arguments.keep_best)
    plan = prune.plan(storage, keep, SYSTEM_CLOCK)
    newest = [entry.id for entry in plan.keep[:1]]
    with printer.progress("verifying the newest commit", verify.total_bytes(storage, newest)) as advance:
        prune.check_one_is_intact(storage, plan, advance)
    found = results.Pruned.of(storage.url, plan, None)
    if (found.deleted or found.aside) and not _agreed(arguments, found):
        return 1
    if not arguments.dry_run:
        found = results.Pruned.of(storage.url, plan, list(prune.delete(storage, plan)))
    printer.put(found, as_json=arguments.json)
    return 0


def _prune_near(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.near import place
    from hvdrecover.cli import printer, results

    setting = config.read().near
    near = "auto" if setting == "off" else setting
    only = None if arguments.url is None else place.folder(near, place.named(arguments.url))
    roots = [each for each in place.roots(near) if only is None or each.path == only]
    free = [each for each in roots if not each.in_use]
    if free and not _agreed(arguments, results.PrunedNear.of(roots, free, dry_run=True)):
        return 1
    if not arguments.dry_run:
        free = [each for each in free if place.remove(each.path)]
    printer.put(results.PrunedNear.of(roots, free, dry_run=arguments.dry_run), as_json=arguments.json)
    return 0


def _agreed(arguments: argparse.Namespace, plan: Result) -> bool:
    """Return whether to go ahead: nothing is deleted, ``--yes`` is given, or the user agrees."""
    if arguments.dry_run or arguments.yes:
        return True
    from hvdrecover.cli import printer

    printer.put(plan, stream=sys.stderr)
    sys.stderr.write("delete these? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("hvdrecover: nothing was deleted\n")
    return False


def _export(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import catalog
    from hvdrecover.cli import printer, results

    file = arguments.output
    if file.suffix == ".keras" and arguments.model_config is None:
        arguments.refuse("a commit holds no model config, so a .keras file takes --model-config FILE, too")
    if file.suffix != ".keras" and arguments.model_config is not None:
        arguments.refuse("--model-config is for a .keras file only")
    storage = _open_root(arguments)
    commit = catalog.find(storage, arguments.commit)
    names = _exporter(arguments)(storage, commit, arguments.only, file, force=arguments.force)
    found = results.Exported(storage.url, commit.name, list(names), file, file.stat().st_size)
    printer.put(found, as_json=arguments.json)
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
