"""``hvdrecover prune``: what a root holds beyond what rules keep is deleted, once that is agreed to."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.cli import options
from hvdrecover.cli.roots import command, open_root, put
from hvdrecover.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from rich.console import RenderableType


def add_prune(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    prune = command(
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
        "--keep", type=options.count, dest="keep_last", action=options.OldName, now="--keep-last"
    )
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
        "--keep-every", type=options.count, dest="keep_period", action=options.OldName, now="--keep-period"
    )
    prune.add_argument(
        "--keep-within", type=options.duration, metavar="DURATION", help="keep commits younger than this"
    )
    prune.add_argument(
        "--keep-younger",
        type=options.duration,
        dest="keep_within",
        action=options.OldName,
        now="--keep-within",
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
    prune.set_defaults(refuse=prune.error)


def _prune(arguments: argparse.Namespace) -> int:
    from hvdrecover.checkpoint.inspection import prune, verify
    from hvdrecover.checkpoint.settings import Keep
    from hvdrecover.cli import documents, progress_bar, tables

    if not (arguments.yes or arguments.dry_run or sys.stdin.isatty()):
        arguments.refuse("there is no terminal to ask at; add --yes to delete, or --dry-run to only look")
    if arguments.near:
        return _prune_near(arguments)
    storage = open_root(arguments)
    keep = Keep(arguments.keep_last, arguments.keep_period, arguments.keep_within, arguments.keep_best)
    plan = prune.plan(storage, keep, SYSTEM_CLOCK)
    newest = [entry.id for entry in plan.keep[:1]]
    with progress_bar.bar("verifying what is kept", verify.total_bytes(storage, newest)) as advance:
        prune.check_one_is_intact(storage, plan, advance)
    found = plan.delete or plan.leftovers or plan.aside
    if found and not arguments.dry_run and not _agreed(arguments, tables.pruned(storage.url, plan, None)):
        return 1
    deleted = None if arguments.dry_run else list(prune.delete(storage, plan))
    put(
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
    planned = [(each, not each.in_use) for each in found]
    if (
        any(goes for _, goes in planned)
        and not arguments.dry_run
        and not _agreed(arguments, tables.pruned_near(planned, SYSTEM_CLOCK.now(), dry_run=True))
    ):
        return 1
    gone = [(each, goes and (arguments.dry_run or place.remove(each.path))) for each, goes in planned]
    put(
        arguments,
        lambda: documents.pruned_near(gone, dry_run=arguments.dry_run),
        lambda: tables.pruned_near(gone, SYSTEM_CLOCK.now(), dry_run=arguments.dry_run),
    )
    return 0


def _agreed(arguments: argparse.Namespace, planned: RenderableType) -> bool:
    """Return whether to delete: ``--yes`` says so, or the answer to a question."""
    if arguments.yes:
        return True
    from hvdrecover.cli.tables import Harmless, console_for

    console_for(sys.stderr).print(Harmless(planned))
    sys.stderr.write("delete these? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("hvdrecover: nothing was deleted\n")
    return False
