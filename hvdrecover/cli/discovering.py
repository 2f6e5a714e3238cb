"""The command that finds out which hosts there are; see ``docs/discovery.md``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.cli import options
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.discovery.discover import Settings
    from hvdrecover.discovery.sources.interface import Source


def add_discover(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "discover",
        usage="hvdrecover discover SOURCE [options]",
        help="find out which hosts there are, as horovodrun --host-discovery-script wants it",
        description="Write a line host:slots for each host that can be used, the oldest first. `hvdrecover "
        "discover SOURCE --help` tells what a source takes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="static, file, command, slurm, kubernetes, mpi, tf-config"
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="...", help="what the source takes, and options"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hvdrecover.discovery import sources
    from hvdrecover.discovery.discover import discover

    name = arguments.source
    kind = sources.find(name)
    given = _parser(name, kind).parse_args(arguments.words)
    source = _source(kind, given)
    environ = config.environment()
    answer = discover(name, source, _settings(given), environ, patient=given.explain)
    if answer.warning:
        sys.stderr.write(f"hvdrecover: {answer.warning}\n")
    if given.explain:
        from hvdrecover.cli import tables

        tables.put(tables.hosts(answer, SYSTEM_CLOCK.now()))
    else:
        sys.stdout.writelines(f"{host.name}:{host.slots}\n" for host in answer.hosts)
    return 0


def script(words: str, job: Sequence[str]) -> str:
    """A discovery script for ``horovodrun``.

    Args:
        words: a source and what it takes, as the shell has it.
        job: options that follow from the job's; those in ``words`` go before.

    Raises:
        ConfigError: no source is named, or it does not take this.
    """
    from hvdrecover.discovery import sources

    try:
        name, *rest = shlex.split(words)
    except ValueError as error:
        raise ConfigError("--discover", f"'{words}': {error or 'it names no source'}") from error
    _parser(name, sources.find(name)).parse_args(rest)
    return shlex.join([sys.executable, "-m", "hvdrecover", "discover", name, *job, *rest])


def _parser(name: str, kind: type[Source]) -> argparse.ArgumentParser:
    """The parser of what comes after a source's name."""
    described = (kind.__doc__ or name).splitlines()[0]
    parser = argparse.ArgumentParser(f"hvdrecover discover {name}", description=described, allow_abbrev=False)
    types = typing.get_type_hints(kind)
    for field in _fields(kind):
        _add_field(parser, field, types[field.name])
    _add_options(parser)
    return parser


def _fields(kind: type[Source]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(typing.cast(Any, kind))


def _add_field(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any) -> None:
    described: dict[str, Any] = {
        name: field.metadata[name] for name in ("help", "metavar") if name in field.metadata
    }
    if kind is bool:
        described["action"] = "store_true"
    elif kind is int or kind is str:
        described["type"] = kind
    else:
        described["nargs"] = argparse.REMAINDER
    if field.default is dataclasses.MISSING:
        parser.add_argument(field.name, **described)
    else:
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, default=field.default, dest=field.name, **described)


def _source(kind: type[Source], given: argparse.Namespace) -> Source:
    values = {field.name: getattr(given, field.name) for field in _fields(kind)}
    make = typing.cast(Any, kind)
    return typing.cast("Source", make(**{name: _frozen(value) for name, value in values.items()}))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--explain", action="store_true", help="write a table of all hosts instead, and why")
    hosts = parser.add_argument_group("which hosts")
    hosts.add_argument(
        "--slots",
        type=options.count,
        default=1,
        metavar="N",
        help="of hosts whose source tells none (default: 1)",
    )
    hosts.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="only hosts like this: node[0-4]*"
    )
    hosts.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="no hosts like this")
    hosts.add_argument("--max-hosts", type=options.count, metavar="N", help="no more hosts than these")
    hosts.add_argument(
        "--max-np",
        type=options.count,
        metavar="N",
        help="how many processes the job takes; --explain shows hosts beyond as spare",
    )
    health = parser.add_argument_group("their health")
    health.add_argument(
        "--ssh-port", type=options.count, default=22, metavar="PORT", help="must answer (default: 22)"
    )
    health.add_argument("--no-ssh-check", action="store_true", help="whether it answers does not matter")
    health.add_argument(
        "--check", metavar="COMMAND", help='must succeed on each host, by ssh: --check "nvidia-smi -L"'
    )
    health.add_argument("--identity", metavar="FILE", help="ssh's private key, for --check")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--timeout",
        type=options.seconds,
        default=5.0,
        metavar="SECONDS",
        help="within which there is an answer (default: 5)",
    )
    answers.add_argument(
        "--last-good",
        type=options.seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long an answer stands in for those that fail (default: 60)",
    )
    answers.add_argument(
        "--allow-empty",
        action="store_true",
        help="answer with no host as long as there was none before; horovodrun then waits for hosts",
    )
    answers.add_argument("--cache", type=Path, metavar="FOLDER", help="where answers are remembered")


def _settings(given: argparse.Namespace) -> Settings:
    from hvdrecover.discovery.checks import Checks
    from hvdrecover.discovery.discover import Settings
    from hvdrecover.discovery.selection import Limits

    limits = Limits(
        slots=given.slots,
        include=tuple(given.include),
        exclude=tuple(given.exclude),
        max_hosts=given.max_hosts,
        max_np=given.max_np,
        last_good=given.last_good,
        allow_empty=given.allow_empty,
    )
    port = None if given.no_ssh_check else given.ssh_port
    return Settings(
        cache=given.cache or config.cache(config.environment()) / "hosts",
        limits=limits,
        checks=Checks(port, given.identity, given.check),
        timeout=given.timeout,
        reports=config.read().host_reports,
    )
