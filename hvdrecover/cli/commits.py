"""The commands that look at a checkpoint root: each prints a dataclass, as JSON or as text for people."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from hvdrecover import config
from hvdrecover.checkpoint import Best, Keep, inspection, near_tier
from hvdrecover.checkpoint.inspection import Contents, Entry, Pruning, to_safetensors
from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.cli import options, printer
from hvdrecover.errors import ConfigError
from hvdrecover.machine import SYSTEM_CLOCK
from hvdrecover.reporting.text import counted, duration

_COMMIT = re.compile(r"[0-9]+|g[0-9]+-c[0-9]+")


def _add_root(parser: argparse.ArgumentParser) -> None:
    what = "the root: a path or an fsspec URL (default: HVDRECOVER_CHECKPOINT)"
    parser.add_argument("url", metavar="URL", nargs="?", help=what)
    options.add_json(parser)


def _add_commit(parser: argparse.ArgumentParser) -> None:
    what = "a name such as g0003-c00000120, or its number, 120; by default the newest complete one"
    parser.add_argument("commit", metavar="COMMIT", nargs="?", help=what)


def _open_root(arguments: argparse.Namespace) -> Storage:
    """Return the root of the command line, or else of the environment."""
    default, given = config.read().checkpoint, arguments.url
    # With a root of the environment, the first argument may be a commit already.
    if given is not None and default is not None and _COMMIT.fullmatch(given) and not Path(given).exists():
        if "commits" in arguments:
            arguments.url, arguments.commits = None, [given, *arguments.commits]
        elif "commit" in arguments and arguments.commit is None:
            arguments.url, arguments.commit = None, given
    url: str = arguments.url or default or ""
    if not url:
        arguments.refuse("no checkpoint root was given: name its URL, or set HVDRECOVER_CHECKPOINT to it")
    return open_storage(url)


# -- from documents to text ----------------------------------------------------------------------------


def _age(time: float | None) -> str:
    return "" if time is None else duration(max(SYSTEM_CLOCK.now() - time, 0.0))  # clocks of hosts differ


def _versions(versions: Mapping[str, Any] | None, *left_out: str) -> str:
    named = {name: version for name, version in (versions or {}).items() if name not in left_out}
    return ", ".join(f"{name} {version}" for name, version in named.items())


# Field of a document: the title of its column, and the function that makes its value a text.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "commit": ("commit", str),
    "time": ("age>", _age),
    "world_size": ("ranks>", lambda size: str(size or "")),
    "versions": ("framework", lambda versions: _versions(versions, "horovod", "hvdrecover")),
    "state": ("state", str),
    "intact": ("digests", {None: "unchecked", True: "ok", False: "broken"}.__getitem__),
    "name": ("name", str),
    "dtype": ("dtype", str),
    "shape": ("shape", lambda shape: str(list(shape))),
    "bytes": ("size>", near_tier.size),
    "change": ("change", str),
    "largest": ("largest difference>", lambda largest: "" if largest is None else f"{largest:.3g}"),
}
_OF_A_COMMIT = ("commit", "time", "bytes", "world_size", "versions", "state")


def _cells(item: Any, *fields: str) -> dict[str, str]:
    found = item if isinstance(item, dict) else vars(item)
    return {title: show(found[field]) for field in fields for title, show in [_COLUMNS[field]]}


def _table(items: Sequence[Any], *fields: str) -> list[RenderableType]:
    """Return a table with a row for each item and a column for each field; nothing without items."""
    rows = [_cells(item, *fields) for item in items]
    return [printer.table(list(rows[0]), [row.values() for row in rows])] if rows else []


def _with_notes(commits: Sequence[Entry], notes: Sequence[str]) -> list[RenderableType]:
    below = []
    for each in commits:
        below += [f"{each.commit} is {each.state}: {each.reason}"] if each.reason else []
        below += [f"{each.commit} is broken: {file}: {what}" for file, what in (each.problems or {}).items()]
    below += notes
    table = _table(commits, *_OF_A_COMMIT, "intact")
    return [*table, *([""] if table and below else []), *below]


# -- ls and verify -------------------------------------------------------------------------------------


def add_ls(parser: argparse.ArgumentParser) -> None:
    """Without --verify, only manifests are read."""
    _add_root(parser)
    parser.add_argument("--verify", action="store_true", help="read every byte, and check it")


def run_ls(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    found = inspection.look(storage)
    if arguments.verify:
        readable = [each for each in found.commits if each.time is not None]
        verified = {each.commit: each for each in _verified(storage, readable)}
        found = replace(found, commits=[verified.get(each.commit, each) for each in found.commits])
    notes = [] if found.commits else [f"{storage.url} holds no commits yet"]
    nbytes = sum(each.bytes for each in found.commits if each.commit in found.leftovers)
    nbytes += sum(each.bytes for each in found.aside if each.left_over)
    if nbytes:
        notes.append(f"left by ended processes: {near_tier.size(nbytes)}; the next job or prune deletes them")
    printer.put(found, _with_notes(found.commits, notes), as_json=arguments.json)
    return 0


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Exits with 1 if one is broken."""
    _add_root(parser)
    parser.add_argument("commits", metavar="COMMIT", nargs="*", help="by default all that are complete")


def run_verify(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    if arguments.commits:
        named = dict.fromkeys(inspection.find(storage, name) for name in arguments.commits)
        wanted = [each for commit in named if (each := inspection.entry(storage, commit)) is not None]
    else:
        wanted = [each for each in inspection.entries(storage) if each.state != "incomplete"]
    commits = _verified(storage, wanted)
    broken = sum(not each.intact for each in commits)
    summary = f"{storage.url}: {counted(len(commits), 'commit')} read, {broken or 'none'} broken"
    document = {"root": storage.url, "intact": not broken, "commits": commits}
    printer.put(document, _with_notes(commits, [summary]), as_json=arguments.json)
    return 1 if broken else 0


def _verified(storage: Storage, commits: Sequence[Entry]) -> list[Entry]:
    with printer.progress("verifying", sum(each.bytes for each in commits)) as advance:
        return inspection.verify_all(storage, commits, advance)


# -- show and diff -------------------------------------------------------------------------------------


def add_show(parser: argparse.ArgumentParser) -> None:
    """The command runs no code of the commit."""
    _add_root(parser)
    _add_commit(parser)


def run_show(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    found = inspection.look_into(storage, inspection.find(storage, arguments.commit))
    printer.put(found, _content(found), as_json=arguments.json)
    return 0


def _content(found: Contents) -> Iterator[RenderableType]:
    facts = {title.rstrip(">"): text for title, text in _cells(found, *_OF_A_COMMIT).items()}
    facts |= {"root": found.root, "written": found.written, "writer": _versions(found.writer)}
    if found.dataset is not None:
        facts["dataset"] = inspection.text(found.dataset)
    yield printer.pairs(facts)
    for file in found.files:
        title = f"{file['name']}, {near_tier.size(file['size'])}"
        yield printer.section(title, *_table(file["tensors"], "name", "dtype", "shape", "bytes"))
    for title, values in (("objects", found.attributes), ("sample cursors", found.samplers)):
        # The tables of files show the tensors.
        shown = {name: value for name, value in values.items() if not inspection.only_tensors(value)}
        if shown:
            lines = (f"{name} = {inspection.text(value)}" for name, value in shown.items())
            yield printer.section(title, printer.plain("\n".join(lines)))
    if found.random is not None:
        yield printer.section("random streams", printer.plain(inspection.text(found.random)))


def add_diff(parser: argparse.ArgumentParser) -> None:
    """For tensors whose elements differ, the largest difference is max|b - a| over the elements that are
    finite in both.
    """
    _add_root(parser)
    parser.add_argument("a", metavar="A", help="the commit to compare with")
    parser.add_argument("b", metavar="B", help="the commit that is compared with it")


def run_diff(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    a, b = (inspection.find(storage, name) for name in (arguments.a, arguments.b))
    entries = (inspection.entry(storage, commit) for commit in (a, b))
    with printer.progress("comparing", sum(each.bytes for each in entries if each is not None)) as advance:
        found = inspection.compare(storage, a, b, advance)
    text = [f"{a.name} → {b.name}", *_table(found.differences, "name", "change", "largest")]
    printer.put(found, [*text, "", f"{counted(found.unchanged, 'tensor')} unchanged"], as_json=arguments.json)
    return 0


# -- prune ---------------------------------------------------------------------------------------------


def add_prune(parser: argparse.ArgumentParser) -> None:
    """A commit that any of the rules asks for is kept. Files of killed processes are deleted, too, if no
    process can be writing them. Broken commits are left alone. No commit is deleted unless an intact commit
    remains. The command lists the commits to delete, and asks. With --near, it deletes the memory that
    crashed jobs have left on this host instead: of URL, or of all roots.
    """
    _add_root(parser)
    near = "delete this user's near roots that no process keeps, on this host"
    period = "keep the first commit of each run of K commit numbers"
    best = "keep the best N (1) by an attribute of the state that is a number, such as val_loss:min"
    rule = parser.add_mutually_exclusive_group(required=True)
    rule.add_argument("--keep-last", **options.COUNT, help="keep the newest N commits")
    rule.add_argument("--near", action="store_true", help=near)
    parser.add_argument("--keep-period", type=options.count, metavar="K", help=period)
    parser.add_argument("--keep-within", **options.DURATION, help="keep commits younger than this")
    parser.add_argument("--keep-best", type=options.checked(_best), metavar="METRIC:min|max[:N]", help=best)
    sure = parser.add_mutually_exclusive_group()
    sure.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    sure.add_argument("-y", "--yes", action="store_true", help="delete without asking, for scripts")


def _best(text: str) -> Best:
    """``METRIC:min`` or ``METRIC:max``, and after another colon how many: ``val_loss:min:2``."""
    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    return Best(metric, mode, config.number(count or "1", least=1))  # type: ignore[arg-type]


def run_prune(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or arguments.dry_run or sys.stdin.isatty()):
        arguments.refuse("there is no terminal to ask at; add --yes to delete, or --dry-run to only look")
    if arguments.near:
        return _prune_near(arguments)
    storage = _open_root(arguments)
    keep = Keep(arguments.keep_last, arguments.keep_period, arguments.keep_within, arguments.keep_best)
    with printer.progress("verifying the newest commit", None) as advance:
        plan = inspection.plan_pruning(storage, keep, SYSTEM_CLOCK)
        inspection.check_one_is_intact(storage, plan, advance)
    if (plan.deleted or plan.aside) and not _agreed(arguments, _pruned(plan)):
        return 1
    if not arguments.dry_run:
        plan = inspection.prune(storage, plan)
    printer.put(plan, _pruned(plan), as_json=arguments.json)
    return 0


def _pruned(plan: Pruning) -> Iterator[str]:
    verb = "would delete" if plan.dry_run else "deleted"
    for each in plan.deleted:
        never_completed = ", which was never completed" if each.commit in plan.leftovers else ""
        yield f"{verb} {each.commit}, {near_tier.size(each.bytes)}{never_completed}"
    for each in plan.untouched:
        reason = f": {each.reason}" if each.reason else ""
        yield f"left {each.commit}, which is {each.state}{reason}"
    for file in plan.aside:
        yield f"{verb} {file.path}, {near_tier.size(file.bytes)}"
    yield f"kept: {', '.join(plan.kept) or 'none'}"
    yield f"{verb} {counted(len(plan.deleted), 'commit')}, {near_tier.size(plan.bytes_freed)}"


def _prune_near(arguments: argparse.Namespace) -> int:
    setting = config.read().near
    near = "auto" if setting == "off" else setting
    only = None if arguments.url is None else near_tier.folder(near, near_tier.named(arguments.url))
    roots = [each for each in near_tier.roots(near) if only is None or each.path == only]
    deleted = [each for each in roots if not each.in_use]

    def text(verb: str) -> Iterator[str]:
        for root in roots:
            what = verb if root in deleted else "left, since a process uses it:"
            of = f"{near_tier.size(root.nbytes)} of {root.url or 'an unknown root'}"
            yield f"{what} {root.path}: {of}, last used {_age(root.used)} ago"
        freed = near_tier.size(sum(each.nbytes for each in deleted))
        yield f"{verb} {counted(len(deleted), 'near root')}, {freed}"

    if deleted and not _agreed(arguments, text("would delete")):
        return 1
    if not arguments.dry_run:
        deleted = [each for each in deleted if near_tier.remove(each.path)]
    document = {
        "dry_run": arguments.dry_run,
        "deleted": deleted,
        "in_use": [each for each in roots if each not in deleted],
        "bytes_freed": sum(each.nbytes for each in deleted),
    }
    verb = "would delete" if arguments.dry_run else "deleted"
    printer.put(document, text(verb), as_json=arguments.json)
    return 0


def _agreed(arguments: argparse.Namespace, plan: Iterable[str]) -> bool:
    """Return whether to go ahead: nothing is deleted, ``--yes`` is given, or the user agrees."""
    if arguments.dry_run or arguments.yes:
        return True
    printer.put_text(plan, sys.stderr)
    sys.stderr.write("delete these? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("hvdrecover: nothing was deleted\n")
    return False


# -- export --------------------------------------------------------------------------------------------


def add_export(parser: argparse.ArgumentParser) -> None:
    """A .pt file holds a dict, attribute to state_dict, for torch.load(weights_only=True); writing it takes
    torch and Horovod. A .keras file holds a model, for keras.models.load_model; writing it takes TensorFlow
    and Horovod. A .safetensors file holds tensors alone, under their own names, or with the attribute's
    before them if several attributes are exported.
    """
    _add_root(parser)
    _add_commit(parser)
    formats = "FILE.pt, FILE.keras or FILE.safetensors"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=formats)
    attribute = "export this attribute of the state, such as model; can be given several times"
    parser.add_argument("--only", action="append", default=[], metavar="ATTRIBUTE", help=attribute)
    model_config = "for a .keras file: what model.to_json() gives, or another .keras file of the model"
    parser.add_argument("--model-config", type=Path, metavar="FILE", help=model_config)
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def run_export(arguments: argparse.Namespace) -> int:
    file = arguments.output
    if file.suffix not in (".pt", ".keras", ".safetensors"):
        arguments.refuse(f"--output: '{file}' ends in none of .pt, .keras and .safetensors")
    if file.suffix == ".keras" and arguments.model_config is None:
        arguments.refuse("a commit holds no model config, so a .keras file takes --model-config FILE, too")
    if file.suffix != ".keras" and arguments.model_config is not None:
        arguments.refuse("--model-config is for a .keras file only")
    storage = _open_root(arguments)
    commit = inspection.find(storage, arguments.commit)
    write = _exporter(file.suffix, model_config=arguments.model_config)
    names = write(storage, commit, arguments.only, file, force=arguments.force)
    size = file.stat().st_size
    document = {"root": storage.url, "commit": commit.name, "attributes": names, "file": file, "bytes": size}
    text = f"{', '.join(names)} of {commit.name}: {file}, {near_tier.size(size)}"
    printer.put(document, [text], as_json=arguments.json)
    return 0


def _exporter(suffix: str, **of_keras: Any) -> Callable[..., list[str]]:
    """Return the function that writes a file of the wanted format; it may import a framework."""
    if suffix == ".safetensors":
        return to_safetensors
    try:
        if suffix == ".pt":
            from hvdrecover.torch.state import to_torch

            return to_torch
        from hvdrecover.tensorflow.state import to_keras

        return functools.partial(to_keras, **of_keras)
    except ImportError as error:
        framework = "PyTorch" if suffix == ".pt" else "TensorFlow"
        problem = f"writing a {suffix} file takes {framework} and Horovod, and one cannot be imported"
        remedy = "install it, or export to a .safetensors file"
        raise ConfigError("--output", f"{problem} ({error}); {remedy}") from error
