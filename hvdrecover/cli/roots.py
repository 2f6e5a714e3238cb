"""Arguments and output that the commands on a checkpoint root share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdrecover.checkpoint.storage import Storage


def command(
    commands: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    more: str = "",
    *,
    needs_url: bool = True,
) -> argparse.ArgumentParser:
    """Add a command that is given the URL of a root."""
    description = f"{help[0].upper()}{help[1:]}. {more}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    count = None if needs_url else "?"
    parser.add_argument("url", metavar="URL", nargs=count, help="the root: a path or an fsspec URL")
    parser.add_argument("--json", action="store_true", help="write JSON (docs/commands.md)")
    parser.set_defaults(run=run)
    return parser


def open_root(arguments: argparse.Namespace) -> Storage:
    """The root that was named."""
    from hvdrecover.checkpoint.storage import open_storage

    return open_storage(arguments.url)


def put(arguments: argparse.Namespace, document: Callable[[], Any], text: Callable[[], Any]) -> None:
    """Write what a command has found: as JSON, or for people."""
    from hvdrecover.cli import documents, tables

    if arguments.json:
        sys.stdout.write(documents.dumps(document()))
    else:
        tables.put(text())
