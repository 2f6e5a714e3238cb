"""Measure all topics, each in a process of its own, and report."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import curves, report
from benchmarks.rows import Curve, Fact, Found, Row, broken, load
from benchmarks.states import SHAPES, STATES
from hvdrecover.drill.run import Job
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch.processes import kill_marked

TOPICS = {
    "stall": STATES,
    "durable": STATES,
    "slowdown": ("large",),
    "restore": STATES,
    "memory": ("large",),
    "sync": STATES,
    "tensorflow": STATES,
    "guard": ("large", "digits", "digits-tensorflow"),
    "virtual": ("torch",),
    "recovery": ("torch", "tensorflow"),
    "near": ("large",),
    "peers": ("torch",),
    "scale": ("ranks", "guardians", "hosts", "sizes", "tensors", "limits", "jobs"),
    "stores": ("large",),
    "device": STATES,
    "machine": ("large",),
}
_PATIENCE = 1200.0  # seconds for one topic
_MARK = "HVDRECOVER_BENCHMARK"
_PAGE, _SCALE = Path("docs/performance.md"), Path("docs/scale.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit code is 1 if a topic failed, or if commits hold more memory than promised.

    Another missed bar is told by the table. Small states are too small to tell their memory.
    """
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the way out cleans up
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=options.folder.resolve()))
    try:
        found = _measure(options, folder, console)
    except HvdrecoverError as error:
        console.print(str(error), markup=False)
        return 1
    finally:
        shutil.rmtree(folder)
    rows = [each for each in found if isinstance(each, Row)]
    facts = [each for each in found if isinstance(each, Fact) and each.page == _PAGE.stem]
    growing = [each for each in found if isinstance(each, Curve)]
    report.show(rows, facts, console)
    page = options.page or (_PAGE if options.size == "full" and not options.only else None)
    if page is not None and rows:
        from benchmarks import plot

        report.write(rows, facts, page)
        plot.draw(rows, page.with_name(report.PLOT))
        console.print(f"written to {page}")
    if growing:
        told = [each for each in found if isinstance(each, Fact) and each.page == _SCALE.stem]
        _show_growth(growing, told, options, console)
    too_much = broken(rows) if options.size == "full" else []
    for row in too_much:
        console.print(f"more than promised: {row.what}: {report.amount(row, row.value)}")
    return 1 if too_much else 0


def _show_growth(
    growing: Sequence[Curve], facts: Sequence[Fact], options: argparse.Namespace, console: Console
) -> None:
    """Print what grows with a number; at full size, or where a page was named, write its page as well."""
    from benchmarks import plot

    curves.show(growing, console)
    for fact in facts:
        console.print(f"{fact.what}: {fact.value}")
    if options.page is None and options.size != "full":
        return
    page = _SCALE if options.page is None else options.page.with_name(_SCALE.name)
    curves.write(growing, facts, page)
    for chart, drawn in curves.charts(growing).items():
        plot.grow(drawn, page.parent / curves.picture(chart))
    console.print(f"written to {page}")


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> list[Found]:
    asked = [f"{topic}:{state}" for topic in options.only or TOPICS for state in TOPICS[topic]]
    # At full size, each where no other has left memory behind.
    groups = [[each] for each in asked] if options.size == "full" else [asked]
    found: list[Found] = []
    for group in groups:
        with console.status(", ".join(group)):
            found += _in_a_process(group, options.size, folder)
    return found


def _in_a_process(asked: Sequence[str], size: str, parent: Path) -> list[Found]:
    """Measure some topics in a process of their own."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    result, log = parent / "result.json", parent / "log.txt"
    command = [sys.executable, "-m", "benchmarks.topics", size, os.fspath(folder), os.fspath(result)]
    mark = uuid.uuid4().hex
    job = Job([*command, *asked], log, {_MARK: mark})
    try:
        if job.wait(_PATIENCE):
            raise HvdrecoverError(f"measuring {', '.join(asked)} failed; the log ends with\n{job.tail()}")
    finally:
        job.kill()
        kill_marked(f"{_MARK}={mark}")  # jobs that it has started have marks of their own
        shutil.rmtree(folder)
    return load(result)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    parser.add_argument(
        "--size", choices=tuple(SHAPES), default="full", help="small only tests the benchmarks"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(TOPICS),
        metavar="TOPIC",
        help=f"measure only this topic; may be repeated: {', '.join(TOPICS)}",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bench"),
        help="where to write; the disk that is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        help=f"page to put the table into, and a plot beside it (default: {_PAGE}, after a whole full run)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
