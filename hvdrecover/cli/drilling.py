"""``hvdrecover drill``: see whether a training script recovers, by letting faults strike it."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config, events
from hvdrecover.cli import options
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hvdrecover.drill.lab import Lab
    from hvdrecover.drill.verdict import Outcome

DRILLS = Path("hvdrecover-drills")  # takes the folders of drills by default


def add_drill(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    drill = commands.add_parser(
        "drill",
        usage="hvdrecover drill -np N [options] [options of hvdrecover run] python train.py ...",
        help="see whether a script recovers, by letting faults strike it",
        description="Run a training script undisturbed, then with faults, and tell whether it recovers. The "
        "script and its checkpoint root are left as they are: all commits go to the drill's own folder. "
        "Options that are not listed here are those of `hvdrecover run`.",
        epilog=options.DURATIONS,
        allow_abbrev=False,
    )
    options.add_processes(drill)
    drill.add_argument(
        "--lab",
        type=options.count,
        metavar="N",
        help="run on N hosts of network namespaces on this machine, with a rank on each; those beyond "
        "-np are spare; a host can be cut off then (needs root; default: on this host)",
    )
    drill.add_argument(
        "--resize",
        action="store_true",
        help="change the number of ranks between 1 and -np: hosts leave and come, and ranks are killed; a "
        "script with virtual ranks must end with the same, bit by bit",
    )
    drill.add_argument("--faults", metavar="NAME,...", help="which strike (default: all that can)")
    drill.add_argument(
        "--seed", type=options.number, default=0, metavar="N", help="of all that is random (default: 0)"
    )
    drill.add_argument(
        "--rate",
        type=options.duration,
        metavar="DURATION",
        help="let them strike at random, with this mean time between them (default: each strikes once)",
    )
    drill.add_argument(
        "--repeat",
        type=options.count,
        default=1,
        metavar="N",
        help="how often each strikes, or with --rate the number of runs (default: 1)",
    )
    drill.add_argument(
        "--duration",
        type=options.duration,
        metavar="DURATION",
        help="end the undisturbed run after this time, and the others at the same commit (default: when the "
        "script ends)",
    )
    drill.add_argument("--replay", type=Path, metavar="FILE", help="the schedule.json of an earlier drill")
    drill.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"for all of the drill's files (default: below ./{DRILLS})",
    )
    results.add_argument(
        "--slo",
        type=Path,
        metavar="FILE",
        help="exit with 1 if the drill misses what this TOML file asks for",
    )
    results.add_argument(
        "--workers", type=options.count, metavar="N", help="of the real job, for advice (default: as -np)"
    )
    results.add_argument(
        "--mtbf",
        type=options.duration,
        default=365 * 86400.0,
        metavar="DURATION",
        help="mean time between failures of one worker of the real job (default: 365d)",
    )
    results.add_argument("--json", action="store_true", help="write JSON (docs/drill.md)")
    drill.set_defaults(run=run, refuse=drill.error)


def run(arguments: argparse.Namespace) -> int:
    """Drill a script; 0 if it recovers and nothing that was asked for is missed, else 1.

    Rank-local state that is another rank's after a recovery is not a failure, unless that is asked for.
    """
    from hvdrecover.cli import printer
    from hvdrecover.drill import document, slo
    from hvdrecover.drill.advice import Rates, advise

    command: list[str] = arguments.command
    wanted = slo.load(arguments.slo) if arguments.slo is not None else slo.Numbers()
    folder = (arguments.output or DRILLS / events.new_run(SYSTEM_CLOCK).name).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--output", f"'{folder}' is a file, or a folder that is not empty; name a new one")
    events.show_on_terminal(config.read())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the way out ends the job
    outcome = _drill(arguments, command, folder)
    rates = Rates(arguments.workers or arguments.processes, arguments.mtbf)
    advice = advise(outcome.measured, rates)
    missed = slo.missed(wanted, outcome.numbers)
    found = document.of(outcome, advice, missed)
    (folder / "report.json").write_text(printer.dumps(found))
    _draw(arguments, outcome, advice, rates)
    if arguments.json:
        sys.stdout.write(printer.dumps(found))
    else:
        printer.put(_table(outcome, advice, missed))
    return 0 if outcome.recovers and not missed else 1


def _drill(arguments: argparse.Namespace, folder: Path) -> Outcome:
    from hvdrecover.drill import schedule
    from hvdrecover.drill.drill import Drill
    from hvdrecover.drill.faults import FAULTS, RESIZING, find
    from hvdrecover.drill.script_run import Command

    replayed = schedule.load(arguments.replay) if arguments.replay is not None else None
    usual = RESIZING if arguments.resize else tuple(FAULTS)
    names = arguments.faults.split(",") if arguments.faults is not None else usual
    if replayed is not None:
        names = tuple(dict.fromkeys(strike.fault for run in replayed.runs for strike in run))
    faults = find(names)
    command = Command(
        tuple(arguments.command), arguments.processes, tuple(arguments.others), arguments.resize
    )
    with _lab(arguments) as lab:
        drill = Drill(folder, command, duration=arguments.duration, lab=lab)
        possible, skipped = drill.available(faults)
        if skipped and (replayed is not None or not possible):
            option = "--faults" if replayed is None else "--replay"
            reasons = "; ".join(f"{fault} needs {why}" for fault, why in skipped.items())
            raise ConfigError(option, f"these faults can't strike here: {reasons}")
        events.logger.info("drill: the undisturbed run begins; all files of the drill go to %s", folder)
        commits = drill.rehearse()
        facts: dict[str, Any] = {
            "seed": arguments.seed,
            "processes": arguments.processes,
            "commits": commits,
            "repeat": arguments.repeat,
        }
        chosen = [fault.name for fault in possible]
        if replayed is not None:
            plan = replayed
        elif arguments.rate is None:
            plan = schedule.each_once(chosen, **facts)
        else:
            plan = schedule.at_random(chosen, mean=arguments.rate / drill.seconds_per_commit, **facts)
        return drill.strike(plan, skipped)


def _lab(arguments: argparse.Namespace) -> AbstractContextManager[Lab | None]:
    """Return the hosts that ``--lab`` asks for.

    Raises:
        ConfigError: they would be too few, conflict with other options, or cannot be made here.
        LabError: making them has failed.
    """
    from hvdrecover.drill import lab
    from hvdrecover.drill.script_run import placing

    if (hosts := arguments.lab) is None:
        return nullcontext()
    if hosts <= (ranks := arguments.processes):
        why = f"a rank is on each, and one more must be spare; write --lab {ranks + 1}"
        raise ConfigError("--lab", f"{hosts} hosts are too few for -np {ranks}: {why}")
    if conflicting := placing(arguments.others):
        raise ConfigError("--lab", f"it decides where the script runs; leave out {', '.join(conflicting)}")
    if lacking := lab.lacks():
        raise ConfigError("--lab", lacking)
    return lab.Lab(hosts)


def _replayed(arguments: argparse.Namespace) -> Schedule | None:
    from hvdrecover.drill import schedule

    return schedule.load(arguments.replay) if arguments.replay is not None else None


def _require(drill: Drill, schedule: Schedule) -> None:
    """All faults of a schedule must be able to strike.

    Raises:
        ConfigError: there is one that can't.
    """
    from hvdrecover.drill.faults import find

    names = dict.fromkeys(strike.fault for run in schedule.runs for strike in run)
    if lacking := drill.available(find(names))[1]:
        raise ConfigError("--replay", f"its faults can't all strike here: {_reasons(lacking)}")


def _reasons(lacking: Mapping[str, str]) -> str:
    return "; ".join(f"{fault} needs {why}" for fault, why in lacking.items())


def _schedule(arguments: argparse.Namespace, names: list[str], commits: int, seconds: float) -> Schedule:
    from hvdrecover.drill import schedule

    facts: dict[str, Any] = {
        "seed": arguments.seed,
        "processes": arguments.processes,
        "commits": commits,
        "repeat": arguments.repeat,
    }
    if arguments.rate is None:
        return schedule.each_once(names, **facts)
    return schedule.at_random(names, mean=arguments.rate / seconds, **facts)


def _draw(arguments: argparse.Namespace, outcome: Outcome, advice: list[Advice], rates: Rates) -> None:
    """Write the page, if what it needs is installed."""
    from hvdrecover.drill import page
    from hvdrecover.drill.forecast import forecast
    from hvdrecover.reporting.page import write_html

    try:
        forecasted = forecast(outcome.measured, rates)
        drawn = page.page(shlex.join(arguments.command), outcome, advice, forecasted)
        write_html(drawn, outcome.folder / "report.html")
    except ConfigError as error:
        events.logger.warning("drill: no page is drawn: %s", error)


def _table(outcome: Outcome, advice: list[Advice], missed: Mapping[str, str]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from hvdrecover.cli.printer import pairs, plain, section

    parts: list[RenderableType] = [_facts(outcome), section("time to recover", _times(outcome))]
    if outcome.findings:
        broken = (
            Group(
                plain(f"{each.rule.name}: {each.message}"), Text(f"  What to do: {each.rule.remedy}", "dim")
            )
            for each in outcome.findings
        )
        parts.append(section("broken rules", Group(*broken)))
    if (own := outcome.rank_local) is not None:
        words = plain(own.message), Text(f"  What to do: {own.rule.remedy}", "dim")
        parts.append(section("rank-local state", Group(*words)))
    named: dict[str, Mapping[str, str]] = {
        "missed": missed,
        "what to set": {each.topic: each.text for each in advice},
        "can't strike here": outcome.skipped,
    }
    parts += [section(title, pairs(facts)) for title, facts in named.items() if facts]
    return Group(*parts)


def _facts(outcome: Outcome) -> RenderableType:
    from rich.text import Text

    from hvdrecover.cli.printer import pairs, plain
    from hvdrecover.reporting.words import duration

    numbers = outcome.numbers
    compared = sum(result.compared for result in outcome.results)
    facts = pairs({})
    clean = outcome.rank_local is None
    colour = ("green" if clean else "yellow") if outcome.recovers else "red"
    facts.add_row("verdict", Text(outcome.verdict, f"bold {colour}"))
    facts.add_row("folder", plain(str(outcome.folder)))
    facts.add_row("compared", f"{compared} commits with those of the undisturbed run, bit by bit")
    for unproven in dict.fromkeys(each.unproven for each in outcome.results if each.unproven):
        facts.add_row("not compared", plain(unproven))
    facts.add_row("samples", f"{numbers.samples_lost:g} lost or repeated")
    facts.add_row("steps", f"{numbers.steps_lost:g} repeated")
    if numbers.stall_seconds is not None:
        facts.add_row("stall", f"{duration(numbers.stall_seconds)} at most, of training by a commit")
    return facts


def _times(outcome: Outcome) -> RenderableType:
    from hvdrecover.cli.printer import grid
    from hvdrecover.drill import document

    kinds = grid("fault", "count>", "recovered>", "median>", "worst>")
    for name, kind in document.kinds(outcome.results).items():
        kinds.add_row(name, str(kind["count"]), str(kind["recovered"]), *document.times(kind))
    return kinds
