"""The findings of the commands, as tables for people."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import readable
from hvdrecover.checkpoint.inspection.catalog import Entry
from hvdrecover.checkpoint.inspection.compare import Change, Difference
from hvdrecover.checkpoint.inspection.contents import Contents
from hvdrecover.checkpoint.inspection.prune import Plan
from hvdrecover.checkpoint.inspection.verify import Verdict
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.leftovers import Leftovers
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.near.place import NearRoot
from hvdrecover.checkpoint.storage import Temporary
from hvdrecover.discovery.selection import Answer
from hvdrecover.redaction import printable
from hvdrecover.reporting import words
from hvdrecover.reporting.summary import Fault

_UNLIMITED = 100_000  # characters: without a terminal, lines are as long as they are
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_NEVER = ", which was never completed"
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_STYLES = {
    "quarantined": "red",
    "suspect": "yellow",
    "broken": "red",
    "newer format": "red",
    "incomplete": "yellow",
    "unhealthy": "red",
    "cooldown": "yellow",
}


@dataclass(frozen=True)
class Harmless:
    """Output whose control characters are escaped, as other users may have written it."""

    output: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for each in console.render(self.output, options):
            yield each if each.control else Segment(printable(each.text, "\n"), each.style)


def console_for(stream: TextIO) -> Console:
    """Return the console of stdout or stderr, which takes texts as they are."""
    width = None if stream.isatty() else _UNLIMITED
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def put(output: RenderableType) -> None:
    """Write to stdout; as wide as the terminal, if that is one."""
    console = console_for(sys.stdout)
    if sys.stdout.isatty():
        console.print(Harmless(output))
        return
    with console.capture() as capture:
        console.print(Harmless(output))
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def listing(
    url: str, entries: Sequence[Entry], left: Leftovers, verdicts: Mapping[CommitId, Verdict], now: float
) -> RenderableType:
    """Return what ``ls`` has found."""
    if not entries:
        return Group(Text(f"{url} holds no commits yet"), *_left(entries, left))
    table = grid("commit", "age>", "size>", "ranks>", "framework", "state", "digests")
    for entry in entries:
        manifest = entry.manifest
        table.add_row(
            entry.id.name,
            age(now - manifest.time) if manifest else "",
            size(entry.nbytes),
            str(manifest.world_size) if manifest else "",
            _framework(manifest),
            Text(entry.state, _STYLES.get(entry.state, "")),
            _digests(verdicts.get(entry.id)),
        )
    reasons = [plain(f"{entry.id} is {entry.state}: {entry.reason}") for entry in entries if entry.reason]
    reasons += [plain(f"{id} is broken: {verdict.text}") for id, verdict in verdicts.items() if verdict.text]
    reasons += _left(entries, left)
    return Group(table, *([Text()] if reasons else []), *reasons)


def _left(entries: Sequence[Entry], left: Leftovers) -> list[Text]:
    """Return what lies at a root without being a commit."""
    begun = [entry for entry in entries if entry.id in left.commits]
    lines = []
    if begun:
        count, total = words.counted(len(begun), "commit"), size(sum(entry.nbytes for entry in begun))
        lines.append(f"never completed, and nobody is writing it any more: {count}, {total}")
    if left.aside:
        lines.append(f"left aside by processes that have ended: {_files(left.aside)}")
    if lines:
        lines.append("a job deletes what is left over before its first commit, and so does prune")
    if left.in_use:
        lines.append(f"being written: {_files(left.in_use)}")
    return [plain(line) for line in lines]


def _files(files: Sequence[Temporary]) -> str:
    return f"{words.counted(len(files), 'file')}, {size(sum(file.nbytes for file in files))}"


def hosts(answer: Answer, now: float) -> RenderableType:
    """Return what ``discover`` has found."""
    table = grid("host", "slots>", "state", "since>", "why")
    for entry in answer.entries:
        state = Text(entry.state, _STYLES.get(entry.state, ""))
        table.add_row(entry.name, str(entry.slots), state, f"{age(now - entry.since)} ago", entry.why)
    return table


def contents(url: str, found: Contents, now: float) -> RenderableType:
    """Return what ``show`` has found."""
    manifest, entry = found.manifest, found.entry
    written = datetime.datetime.fromtimestamp(manifest.time).astimezone().isoformat(" ", "seconds")
    writer = ", ".join(f"{key} {value}" for key, value in manifest.writer.items())
    facts: dict[str, str | Text] = {
        "root": url,
        "written": f"{written} ({age(now - manifest.time)} ago) by {writer}",
        "state": _state(entry),
        "ranks": str(manifest.world_size),
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "size": size(entry.nbytes),
    }
    if manifest.dataset is not None:
        facts["dataset"] = readable.text(manifest.dataset)
    table = pairs(facts)
    files = [
        section(f"{file.name}, {size(file.size)}", _tensors((spec.name, spec) for spec in specs))
        for file in manifest.files
        if (specs := found.layouts[file.name].specs) is not None
    ]
    return Group(_heading(str(entry.id)), Padding.indent(table, 2), *files, *_objects(found))


def verdicts(url: str, found: Mapping[CommitId, Verdict]) -> RenderableType:
    """Return what ``verify`` has found."""
    lines = []
    for id, verdict in found.items():
        lines.append(plain(f"{id}: ", ("ok", "green") if verdict.intact else ("broken", "red")))
        lines += [plain(f"  {file}: {problem}") for file, problem in verdict.problems.items()]
    broken = sum(not verdict.intact for verdict in found.values())
    read = size(sum(verdict.nbytes for verdict in found.values()))
    lines.append(
        plain(f"{url}: {words.counted(len(found), 'commit')} read, {read}; {broken or 'none'} broken")
    )
    return Group(*lines)


def difference(url: str, a: CommitId, b: CommitId, found: Difference) -> RenderableType:
    """Return what ``diff`` has found."""
    parts: list[RenderableType] = [_heading(f"{a} → {b}")]
    if found.added:
        parts.append(section("added tensors", _tensors(found.added.items())))
    if found.removed:
        parts.append(section("removed tensors", _tensors(found.removed.items())))
    if found.reshaped:
        table = grid("tensor", "in A", "in B")
        for name, (before, after) in found.reshaped.items():
            table.add_row(plain(name), str(before), str(after))
        parts.append(section("tensors of another dtype or shape", table))
    if found.changes:
        parts.append(section("changed tensors: max|b - a| / max|a|", _changes(found.changes)))
    if found.objects:
        table = grid("object", "in A", "in B")
        for path, texts in found.objects.items():
            table.add_row(plain(path), *(plain("(none)" if text is None else text) for text in texts))
        parts.append(section("changed objects", table))
    parts += [Text(), plain(f"{words.counted(len(found.unchanged), 'tensor')} unchanged")]
    return Group(*parts)


def pruned(url: str, plan: Plan, deleted: Sequence[Entry] | None) -> RenderableType:
    """Return what ``prune`` has done, or would do if ``deleted`` is None."""
    gone = [*plan.delete, *plan.leftovers] if deleted is None else deleted
    verb = "would delete" if deleted is None else "deleted"
    lines = [
        plain(f"{verb} {entry.id}, {size(entry.nbytes)}{_NEVER if entry in plan.leftovers else ''}")
        for entry in gone
    ]
    for entry in plan.untouched:
        lines.append(plain(f"left {entry.id}, which is ", _state(entry)))
    if plan.aside:
        lines.append(plain(f"{verb} what processes have left aside that have ended: {_files(plan.aside)}"))
    freed = sum(entry.nbytes for entry in gone) + sum(file.nbytes for file in plan.aside)
    kept = ", ".join(entry.id.name for entry in plan.keep) or "none"
    count = words.counted(len(gone), "commit")
    lines += [plain(f"kept: {kept}"), plain(f"{verb} {count}, {size(freed)}")]
    return Group(*lines)


def pruned_near(gone: Sequence[tuple[NearRoot, bool]], now: float, *, dry_run: bool) -> RenderableType:
    """Return what ``prune --near`` has done, or would do."""
    verb = "would delete" if dry_run else "deleted"
    lines = [
        plain(
            f"{verb if done else 'left, as a process keeps it,'} {root.path}: {size(root.nbytes)} of "
            f"{root.url or 'an unknown root'}, last used {age(now - root.used)} ago"
        )
        for root, done in gone
    ]
    freed = sum(root.nbytes for root, done in gone if done)
    return Group(
        *lines, plain(f"{verb} {words.counted(sum(done for _, done in gone), 'near root')}, {size(freed)}")
    )


def exported(url: str, id: CommitId, attributes: Sequence[str], file: Path) -> RenderableType:
    """Return what ``export`` has done."""
    return plain(f"{', '.join(attributes)} of {id}: {file}, {size(file.stat().st_size)}")


def size(nbytes: int) -> str:
    """A number of bytes in decimal units: ``1.3 GB``."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 99.95 else f"{value:.1f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """A duration by its largest unit: ``5 min``; of another host's clock, so it may be below 0."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "0 s"


def pairs(facts: Mapping[str, str | Text]) -> Table:
    """A table of names and what is to be said of them, without headings."""
    table = grid("", "")
    table.show_header = False
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, Text) else plain(value))
    return table


def grid(*columns: str) -> Table:
    """A table without lines; ``>`` at a column's end aligns it to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.endswith(">") else "left"
        table.add_column(column.rstrip(">"), justify=justify, overflow="fold")
    return table


def section(title: str, body: RenderableType) -> RenderableType:
    """A part of what a command shows, below a title."""
    return Group(Text(), _heading(title), Padding.indent(body, 2))


def plain(*parts: str | Text | tuple[str, str]) -> Text:
    """A text of the commit's or the user's, which rich and the terminal take as it is."""
    return Text.assemble(*(printable(part) if isinstance(part, str) else part for part in parts))


def _objects(found: Contents) -> list[RenderableType]:
    width = Console().width - 2 if sys.stdout.isatty() else None
    sections: list[RenderableType] = []
    for title, values in (
        ("objects", found.attributes),
        ("sample cursors", found.samplers),
        ("random streams", {"": found.manifest.state.get("random")}),
    ):
        shown = {name: value for name, value in values.items() if not readable.only_tensors(value)}
        lines = [readable.text(value, f"{name} = " if name else "", width) for name, value in shown.items()]
        if lines:
            sections.append(section(title, Text("\n".join(lines))))
    return sections


def _tensors(named: Iterable[tuple[str, TensorSpec]]) -> Table:
    table = grid("tensor", "dtype", "shape", "size>")
    for name, spec in named:
        table.add_row(plain(name), spec.dtype, str(list(spec.shape)), size(spec.nbytes))
    return table


def _changes(changes: Sequence[Change]) -> Table:
    table = grid("tensor", "type", "change>", "elements>", "not finite>")
    for change in changes:
        table.add_row(
            plain(change.tensor),
            str(change.spec),
            "from 0" if change.scale == 0 < change.largest else f"{change.relative:.2g}",
            f"{change.changed}",
            str(change.non_finite) if change.non_finite else "",
        )
    return table


def _heading(title: str) -> Text:
    return Text(printable(title), "bold")


def _state(entry: Entry) -> Text:
    reason = f": {entry.reason}" if entry.reason else ""
    return Text(printable(f"{entry.state}{reason}"), _STYLES.get(entry.state, ""))


def _digests(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("unchecked", "dim")
    return Text("ok", "green") if verdict.intact else Text("broken", "red")


def _framework(manifest: Manifest | None) -> Text:
    versions = {} if manifest is None else manifest.versions
    ours = ("horovod", "hvdrecover")
    return plain(", ".join(f"{name} {version}" for name, version in versions.items() if name not in ours))


def faults(faults: Sequence[Fault], phases: Sequence[str] = ()) -> Table:
    """Return a line for each fault.

    Args:
        faults: what has happened.
        phases: the parts of a recovery whose seconds are to be shown.
    """
    headings = [f"{phase.replace('_', ' ')}>" for phase in phases]
    lines = grid("time", "fault", "host", "rank>", "to recover>", *headings, "detail")
    for fault in faults:
        spent = fault.recovery.phases if fault.recovery else {}
        lines.add_row(
            words.clock_time(fault.time),
            plain(fault.kind),
            plain(fault.host),
            words.rank(fault.rank),
            words.to_recover(fault),
            *(f"{spent[phase]:.2f}" if phase in spent else "" for phase in phases),
            plain(words.one_line(fault.detail)),
        )
    return lines
