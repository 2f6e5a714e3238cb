"""The command that finds out which hosts there are; see ``docs/discovery.md``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.cli import options
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.discovery.discover import Settings
    from hvdrecover.discovery.selection import Answer, Entry
    from hvdrecover.discovery.sources import Source


def add_discover(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "discover",
        usage="hvdrecover discover SOURCE [options]",
        help="find hosts, as horovodrun --host-discovery-script does",
        description="Write a line host:slots for each host that can be used, the oldest first. `hvdrecover "
        "discover SOURCE --help` tells what a source takes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="static, file, command, slurm, kubernetes, mpi, tf-config, or an installed one",
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="...", help="what the source takes, and options"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    request = Request(arguments.source, arguments.words)
    given = request.parsed()
    answer = _answer(request, given, patient=given.explain)
    if given.explain:
        from hvdrecover.cli import printer, results

        table = printer.grid("host", "slots>", "state", "since>", "why")
        for host in answer.entries:
            table.add_row(
                host.name, str(host.slots), results.state(host.state), results.ago(host.since), host.why
            )
        printer.put(table)
    else:
        sys.stdout.writelines(f"{host.name}:{host.slots}\n" for host in answer.hosts)
    return 0


@dataclass(frozen=True)
class Request:
    """The request.

    Attributes:
        source: the source's name.
        words: what comes after it on the command line.
    """

    source: str
    words: Sequence[str]

    @property
    def kind(self) -> type[Source]:
        """The source's class."""
        from hvdrecover.discovery import sources

        return sources.find(self.source)

    def parsed(self) -> argparse.Namespace:
        """Return what the words say; wrong ones end the process, as those of a command line."""
        return parser(self.source).parse_args(self.words)


def request(words: str, job: Sequence[str]) -> Request:
    """Return what ``hvdrecover run --discover`` asks for.

    Args:
        words: a source and what it takes, as the shell has it.
        job: options that follow from the job's; those in ``words`` go before.

    Raises:
        ConfigError: no source is named.
    """
    try:
        split = shlex.split(words)
    except ValueError as error:
        raise ConfigError("--discover", f"'{words}' can't be taken apart: {error}") from error
    if not split:
        raise ConfigError("--discover", "it names no source")
    return Request(split[0], [*job, *split[1:]])


def script(request: Request) -> str:
    """A discovery script for ``horovodrun``."""
    return shlex.join([sys.executable, "-m", "hvdrecover", "discover", request.source, *request.words])


def find(request: Request) -> tuple[Entry, ...]:
    """The hosts now.

    Raises:
        DiscoveryError: they can't be found out.
    """
    return _answer(request, request.parsed(), patient=False).hosts


def _answer(request: Request, given: argparse.Namespace, *, patient: bool) -> Answer:
    from hvdrecover.discovery.discover import discover

    source = _source(request.kind, given)
    answer = discover(request.source, source, _settings(given), config.environment(), patient=patient)
    if answer.warning:
        sys.stderr.write(f"hvdrecover: {answer.warning}\n")
    return answer


def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of what comes after a source's name."""
    made = _parser(name, epilog=options.DURATIONS)
    _add_options(made)
    return made


def own_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of what a source has of its own, without the options of all."""
    return _parser(name, add_help=False)


def _parser(name: str, **settings: Any) -> argparse.ArgumentParser:
    kind = Request(name, ()).kind
    described = (kind.__doc__ or name).splitlines()[0]
    made = argparse.ArgumentParser(
        f"hvdrecover discover {name}", description=described, allow_abbrev=False, **settings
    )
    types = typing.get_type_hints(kind)
    for field in _fields(kind):
        _add_field(made, field, types[field.name])
    return made


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
        "-p", "--ssh-port", type=options.count, default=22, metavar="PORT", help="must answer (default: 22)"
    )
    health.add_argument("--no-ssh-check", action="store_true", help="whether it answers does not matter")
    health.add_argument(
        "--check", metavar="COMMAND", help='must succeed on each host, by ssh: --check "nvidia-smi -L"'
    )
    health.add_argument("-i", "--identity", metavar="FILE", help="ssh's private key, for --check")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--timeout",
        type=options.duration,
        default=5.0,
        metavar="DURATION",
        help="within which there is an answer (default: 5s)",
    )
    answers.add_argument(
        "--last-good",
        type=options.duration,
        default=60.0,
        metavar="DURATION",
        help="how long an answer stands in for those that fail (default: 60s)",
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
