"""The help texts of all commands, as ``docs/help.md`` shows them.

``python scripts/help_texts.py > docs/help.md`` writes that page; a test compares the two.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from hvdrecover import cli
from hvdrecover.cli.discovering import source_parser
from hvdrecover.discovery import sources

_WIDTH = 100  # columns
_SOURCE = "file"  # the source of hosts whose help is shown whole


def document() -> str:
    parser, commands = cli.build()
    parts = [
        "# The commands and their options",
        "`--help` of each command, written by `python scripts/help_texts.py > docs/help.md`.",
        _text(parser),
    ]
    for name in (name for names in cli.GROUPS.values() for name in names):
        parts += [f"## {name}", _text(commands[name])]
        if name == "discover":
            parts += [f"### discover {_SOURCE}", _text(source_parser(_SOURCE, sources.find(_SOURCE)))]
            parts.append(
                "All sources have the options of `file`; with `command` these options stand before the "
                "program. The sections below list only the additional options of each other source."
            )
            for other in [name for name in sources.OURS if name != _SOURCE]:
                parser = source_parser(other, sources.find(other), of_all=False)
                parts += [f"### discover {other}", _text(parser)]
    return "\n\n".join(parts) + "\n"


def _text(parser: argparse.ArgumentParser) -> str:
    formatter: Any = parser.formatter_class
    parser.formatter_class = functools.partial(formatter, width=_WIDTH)
    return f"```text\n{parser.format_help().rstrip()}\n```"


if __name__ == "__main__":
    sys.stdout.write(document())
