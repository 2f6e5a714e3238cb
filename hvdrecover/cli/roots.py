"""Arguments and output that the commands on a checkpoint root share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config

if TYPE_CHECKING:
    from hvdrecover.checkpoint.storage import Storage


_COMMIT = re.compile(r"[0-9]+|g[0-9]+-c[0-9]+")


def command(
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


def open_root(arguments: argparse.Namespace) -> Storage:
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


def put(arguments: argparse.Namespace, document: Callable[[], Any], text: Callable[[], Any]) -> None:
    """Write what a command has found: as JSON, or for people."""
    from hvdrecover.cli import documents, tables

    if arguments.json:
        sys.stdout.write(documents.dumps(document()))
    else:
        tables.put(text())
