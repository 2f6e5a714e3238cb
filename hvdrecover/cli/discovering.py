"""``hvdrecover discover``: find out which hosts there are; see ``docs/discovery.md``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.cli import options
from hvdrecover.discovery import sources
from hvdrecover.discovery.sources import Source
from hvdrecover.errors import ConfigError
from hvdrecover.machine import SYSTEM_CLOCK

if TYPE_CHECKING:
    from hvdrecover.discovery.selection import Answer, Entry

_SETTINGS = ("timeout", "slots", "include", "exclude", "max_np", "last_good", "allow_empty")


def add_discover(parser: argparse.ArgumentParser) -> None:
    """A line host:slots is written for each host that can be used, the oldest first. `hvdrecover discover
    SOURCE --help` lists the options of a source.
    """
    parser.usage = "hvdrecover discover SOURCE [options]"
    parser.add_argument("source", metavar="SOURCE", help=f"{', '.join(sources.OURS)}, or an installed one")
    words = "arguments and options of the source"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help=words)


def run_discover(arguments: argparse.Namespace) -> int:
    source, given = parse([arguments.source, *arguments.words])
    answer = _answer(arguments.source, source, given)
    if not given.explain:
        sys.stdout.writelines(f"{host.name}:{host.slots}\n" for host in answer.hosts)
        return 0
    from hvdrecover.cli import printer
    from hvdrecover.reporting.text import duration

    now = SYSTEM_CLOCK.now()
    rows = [
        (each.name, str(each.slots), each.state, f"{duration(max(now - each.since, 0.0))} ago", each.why)
        for each in answer.entries
    ]
    printer.put_text([printer.table(("host", "slots>", "state", "since>", "why"), rows)])
    return 0


# -- requests ------------------------------------------------------------------------------------------
# A request is a list of words: the name of a source, its arguments, and options.


def request(words: str, job: Sequence[str]) -> list[str]:
    """Return the request of ``--discover``; options that follow from the job come before its own words."""
    try:
        split = shlex.split(words)
    except ValueError as error:
        raise ConfigError("--discover", f"'{words}' can't be taken apart: {error}") from error
    if not split:
        raise ConfigError("--discover", "it names no source")
    return [split[0], *job, *split[1:]]


def script(request: Sequence[str]) -> str:
    return shlex.join([sys.executable, "-m", "hvdrecover", "discover", *request])


def find(request: Sequence[str]) -> tuple[Entry, ...]:
    return _answer(request[0], *parse(request)).hosts


def parse(request: Sequence[str]) -> tuple[Source, argparse.Namespace]:
    """Return the source and the options of a request; wrong ones end the process with 2."""
    source = sources.find(request[0])
    given = source_parser(request[0], source).parse_args(request[1:])
    options = {name: getattr(given, name) for name in source.parameters}
    return dataclasses.replace(source, options=options), given


def _answer(name: str, source: Source, given: argparse.Namespace) -> Answer:
    from hvdrecover.discovery.discover import discover
    from hvdrecover.discovery.selection import Checks, Settings

    settings = Settings(
        cache=given.cache or config.cache(config.environment()) / "hosts",
        checks=Checks(None if given.no_ssh_check else given.ssh_port, given.identity, given.check),
        reports=config.read().host_reports,
        **{name: getattr(given, name) for name in _SETTINGS},
    )
    answer = discover(name, source, settings, config.environment(), patient=given.explain)
    if answer.warning:
        sys.stderr.write(f"hvdrecover: {answer.warning}\n")
    return answer


# -- options -------------------------------------------------------------------------------------------


def source_parser(name: str, source: Source, *, of_all: bool = True) -> argparse.ArgumentParser:
    """Return a parser with an argument or option for each parameter of a source, and the common options."""
    parser = argparse.ArgumentParser(
        f"hvdrecover discover {name}",
        description=(source.function.__doc__ or name).splitlines()[0],
        epilog=options.DURATIONS if of_all else None,
        allow_abbrev=False,
        add_help=of_all,
    )
    for each, (parameter, kind) in source.parameters.items():
        settings: dict[str, Any] = {"help": source.helps.get(each)}
        if kind is bool:
            settings["action"] = "store_true"
        elif kind in (int, str):
            settings["type"] = kind
        else:
            settings["nargs"] = argparse.REMAINDER
        required = parameter.default is parameter.empty
        if required and parameter.kind is not parameter.KEYWORD_ONLY:
            parser.add_argument(each, **settings)
        else:
            default = {"required": True} if required else {"default": parameter.default}
            parser.add_argument(f"--{each.replace('_', '-')}", **default, **settings)
    if of_all:
        _add_options(parser)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    pattern: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATTERN"}
    port: dict[str, Any] = {"type": options.count, "metavar": "PORT"}
    parser.add_argument("--explain", action="store_true", help="write a table of all hosts instead, and why")
    add = parser.add_argument_group("which hosts").add_argument
    add("--slots", **options.COUNT, default=1, help="of hosts whose source tells none (default: 1)")
    add("--include", **pattern, help="only hosts like this: node[0-4]*")
    add("--exclude", **pattern, help="no hosts like this")
    spare = "how many processes the job takes; --explain shows hosts beyond as spare"
    add("--max-np", **options.COUNT, help=spare)
    add = parser.add_argument_group("their health").add_argument
    add("-p", "--ssh-port", **port, default=22, help="must answer (default: 22)")
    add("--no-ssh-check", action="store_true", help="whether it answers does not matter")
    check = 'must succeed on each host, by ssh: --check "nvidia-smi -L"'
    add("--check", metavar="COMMAND", help=check)
    add("-i", "--identity", metavar="FILE", help="ssh's private key, for --check")
    add = parser.add_argument_group("answers").add_argument
    add("--timeout", **options.DURATION, default=5.0, help="within which there is an answer (default: 5s)")
    last_good = "how long an answer stands in for those that fail (default: 60s)"
    add("--last-good", **options.DURATION, default=60.0, help=last_good)
    empty = "answer with no host as long as there was none before; horovodrun then waits for hosts"
    add("--allow-empty", action="store_true", help=empty)
    add("--cache", type=Path, metavar="FOLDER", help="where answers are remembered")
