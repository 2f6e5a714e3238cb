"""Rendezvous of the ranks, and their agreement on one commit.

After a fault, `rendezvous` leaves the old ranks and meets the present ones. Then, on every rank, `agree`
does:

1. Gather the newest (generation, commit) of every memory. A process that has just started looks for a newer
   near commit on its host.
2. Elect the source rank in one allgather, together with the hooks' votes: the newest commit wins, its lowest
   preferred holder sends. Ranks at different states of the script are refused.
3. Exchange the rank-local states of the ranks that hold the elected commit: they are newer than the commit's.
4. If no memory holds a commit, rank 0 claims the checkpoint root, and decides between near and durable
   commits.
5. The source rank sends its present state under a new generation; or a near or durable commit; or, if there
   is none, the initial state of rank 0. All others receive it into memory of their own.
6. All adopt the commit, take their places in the samplers, and go to its random streams.

A new generation each time: a rank that is left behind may hold, or be writing, another commit of this number.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, get_args

import numpy as np

from hvdrecover import error_kinds, heartbeat
from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Arena, Layout, allocate, digest_numbers, parse
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.errors import RecoveryError, RendezvousError, StoppedError
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.state.commit import Part, Session, load
from hvdrecover.state.durable import Files, Standing
from hvdrecover.state.hooks import Agreement, Election, Hook, Moment, Source
from hvdrecover.state.horovod import limit_waits

RENDEZVOUS = 10
PIECE = 1 << 26  # bytes in one broadcast
_HEADER = "hvdrecover.header"
_DECISION = "hvdrecover.near.decided"
_FACTS = ("state", "world_size", "versions", "finished")  # of a snapshot, as JSON


@dataclasses.dataclass(frozen=True)
class Claimed:
    """The decision of rank 0 for a job that has just started and found near commits; it is sent as JSON."""

    generation: int
    job: str
    root: int | None  # the rank whose host has the near commit; None to resume from a durable one
    commit: str
    where: str  # the host of the near commit, and how many commits newer than the durable one it is
    starts: list[str]  # the starts whose near commits are valid, as no other job has replaced them


def rendezvous(session: Session, reason: str, steps: int = 0) -> None:
    """Leave the old ranks after a fault, by which this rank loses ``steps``, and meet the present ones."""
    for attempt in range(1, RENDEZVOUS + 1):  # other ranks may be lost meanwhile
        session.context.events.emit("reset", reason=reason, steps=steps)
        with session.timed("reset"):
            session.context.world.shutdown()
        session.leaving.hosts_changed.clear()  # the rendezvous covers all changes so far, and none after it
        try:
            with session.timed("rendezvous"):
                return session.context.world.init()
        except RendezvousError as error:
            if attempt == RENDEZVOUS:
                raise
            reason, steps = f"{type(error).__name__}: {error}", 0


def reset(session: Session) -> None:
    """After the ranks have changed, give samplers the new rank and size, and call the user's functions."""
    session.context.contents.place(session.context.world.rank(), session.context.world.size())
    for callback in session.reset_callbacks:
        callback()


def agree(session: Session, *, state_unchanged: bool = False) -> Source:
    """Bring all ranks to one commit; return its source. ``state_unchanged``: memory holds the attributes."""
    context, memory, clock = session.context, session.memory, session.context.clock
    started = clock.monotonic()
    context.place.arrived()
    context.events.rank = context.world.rank()
    heartbeat.page.rank = context.world.rank()
    mine, recalled = memory.last, None
    rows = context.world.allgather([mine.generation, mine.commit], "hvdrecover.memories")
    if not mine.generation:
        recalled = session.durable.near.recall(max(CommitId(*row) for row in rows.tolist()))
    election = _elect(session, recalled)
    carried = context.ranks.carried_by(context.world.rank(), context.world.size())
    session.own.rendezvous(carried, memory.newest, election.newest)
    claimed = _revive(session, recalled) if election.revives else None
    session.root = election.root if claimed is None or claimed.root is None else claimed.root
    try:
        if context.world.rank() == session.root:
            agreement = _lead(session, election, recalled, claimed, state_unchanged)
        else:
            agreement = _follow(session, election, recalled, claimed)
    except BaseException:
        memory.stay()
        raise
    _adopt(session, agreement)
    seconds = clock.monotonic() - started
    near = "" if claimed is None else claimed.where
    line = report(agreement, context.world.size(), session.durable.root, seconds, near)
    facts = {"source": agreement.source, **vars(agreement.snapshot.id), "size": context.world.size()}
    context.announce("sync", line, **facts, seconds=seconds)
    session.seconds["sync"] += seconds - session.seconds["load"]
    _training_begins(session, agreement.snapshot)
    session.hooks.notify(Hook.agreed, agreement)
    return agreement.source


def _training_begins(session: Session, snapshot: Snapshot) -> None:
    context, commit = session.context, snapshot.id
    heartbeat.page.stand_at(commit.generation, commit.commit, snapshot.state["random"]["stream"])
    heartbeat.resume()
    limit_waits(context.world)
    session.agreements += 1
    number, began = session.agreements, context.clock.monotonic()

    def first_step() -> None:
        if number != session.agreements:
            return  # there was another rendezvous since then
        session.seconds["first_step"] = context.clock.monotonic() - began
        parts: dict[str, Any] = {part: round(session.seconds[part], 6) for part in get_args(Part)}
        session.seconds.clear()
        context.events.emit("recovered", **vars(commit), **parts, seconds=round(sum(parts.values()), 6))

    heartbeat.at_progress(first_step)


def _elect(session: Session, recalled: Snapshot | None) -> Election:
    context, hooks = session.context, session.hooks
    moment = Moment("rendezvous", session.memory.newest)
    own, job = session.memory.last, context.place.job
    if recalled is not None:
        own, job = recalled.id, recalled.job
    numbers = [digest_numbers(text.encode())[0] for text in (job, session.durable.root)]
    silence = math.ceil(heartbeat.page.longest * 1000)
    row = [own.generation, own.commit, recalled is not None, *numbers, context.world.past.functions, silence]
    published, *tables = hooks.send(context.world, moment, row)()
    heartbeat.page.has_seen(int(published[:, 6].max()) / 1000)  # so that all ranks judge hangs alike
    if (published[:, 4:6] != published[0, 4:6]).any():
        raise RecoveryError(
            "the ranks are at different states of the script: this one is in call "
            f"{context.world.past.functions} of a training function, at checkpoint root "
            f"{session.durable.root or None!r}. All ranks start again, to reach the same state. Give each "
            "state its own checkpoint root, the same on all ranks: then a finished state is not trained again"
        )
    words = [Published(CommitId(*row[:2]), bool(row[2]), row[3]) for row in published.tolist()]
    election = elect(words, lambda holders: hooks.prefer(holders, tables))
    verdict = hooks.verdict(dataclasses.replace(moment, elected=election), tables)
    if verdict is not None:
        raise verdict
    return election


# -- decisions: pure functions -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Published:
    """The newest commit that one rank holds, or its host (``is_near``), and its start's number."""

    commit: CommitId
    is_near: bool = False
    start: int = 0


def elect(
    published: Sequence[Published], prefer: Callable[[Sequence[int]], Sequence[int]] = lambda holders: holders
) -> Election:
    """Elect the lowest of the preferred ranks among those that hold the newest commit."""
    # While any rank has a memory, near commits of the same start of the job count as much. A rank that holds
    # the commit in its memory goes before one that does not.
    live = [each for each in published if each.commit.generation and not each.is_near]
    if not live:
        return Election(0, None, revives=any(each.commit.generation for each in published))
    start = live[0].start
    counting = {
        rank: each.commit for rank, each in enumerate(published) if not each.is_near or each.start == start
    }
    newest = max(counting.values())
    all_holders = tuple(rank for rank, commit in counting.items() if commit == newest)
    holders = tuple(rank for rank in all_holders if not published[rank].is_near) or all_holders
    return Election(min(prefer(holders)), newest, holders)


def revive(left: Sequence[tuple[CommitId | None, str]], standing: Standing) -> int | None:
    """Return the rank whose host has the commit to resume from; None if that is the durable one."""
    # ``left``: by rank, the commit that an earlier process has left on its host, and the start that made it.
    # Each start of a job counts generations on its own once it trains. So compare commits by the generation
    # of their start's claim, and only then by their own.
    floor = (standing.since, standing.durable or CommitId(0, 0))
    ranked = [
        ((standing.starts[start], commit), -rank)
        for rank, (commit, start) in enumerate(left)
        if commit is not None and start in standing.starts
    ]
    best = max(ranked, default=None)
    return -best[1] if best is not None and best[0] >= floor else None


# -- a job that starts again on hosts that still have commits of its earlier start -------------------------


def _revive(session: Session, recalled: Snapshot | None) -> Claimed:
    """Decide which commit the job resumes from, on all ranks alike."""
    world, start = session.context.world, "" if recalled is None else recalled.job.rpartition("/")[2]
    mine = [session.context.config.host, "" if recalled is None else recalled.id.name, start]
    rows = gather_json(world, mine, "hvdrecover.near")
    if world.rank() == 0:
        with _telling_errors(world, _DECISION):
            claimed = _decide(session, rows)
        gather_json(world, vars(claimed), _DECISION)
    else:
        claimed = Claimed(**_heard(world, 0, _DECISION))
    if recalled is not None and start not in claimed.starts:
        session.durable.near.pass_over(recalled.id, "another job has taken the checkpoint root since")
    return claimed


def _decide(session: Session, rows: Sequence[tuple[str, str, str]]) -> Claimed:
    """Claim the checkpoint root, and choose between the near commits and the durable one; on rank 0."""
    left = [(CommitId.parse(name), start) for _, name, start in rows]
    starts = {start: f"{name} in the memory of {host}" for host, name, start in rows if name}
    with session.timed("load"):
        generation = session.durable.claim(starts)
    standing = session.durable.standing(session.durable.newest())
    chosen = revive(left, standing)
    if chosen is None and revive(left, dataclasses.replace(standing, durable=None, since=0)) is not None:
        # The durable commit is newer, but may be damaged. It is read again later, to be sent.
        with session.timed("load"):
            verified = session.durable.newest_verified(generation)
        standing = session.durable.standing(verified)
        chosen = revive(left, standing)
    near, where = "", ""
    if chosen is not None and (found := left[chosen][0]) is not None:
        near, where = found.name, f"in the memory of {rows[chosen][0]}"
        if standing.durable is not None and (newer := found.commit - standing.durable.commit) > 0:
            where += f", {_count(newer, 'commit')} newer than the durable one"
    return Claimed(generation, session.context.place.job, chosen, near, where, list(standing.starts))


# -- the source rank, and the others ---------------------------------------------------------------------


def _follow(
    session: Session, election: Election, recalled: Snapshot | None, claimed: Claimed | None
) -> Agreement:
    commit = election.newest if claimed is None else CommitId.parse(claimed.commit)
    present = [each for each in (session.memory.newest, recalled) if each is not None and each.id == commit]
    held: Files = ({}, {})
    if present:
        held = present[0].arenas, digests(present[0])
    elif commit is not None:
        held = session.durable.near.held(commit)
    agreement = receive(session.context.world, session.root, *held, session.durable.near.unsealed)
    session.context.place.join(agreement.job)
    # If a rank fails next, its guardian knows from which commit the rank has resumed.
    heartbeat.notify(loaded=agreement.loaded)
    load(session, agreement.snapshot)
    return agreement


def _lead(
    session: Session,
    election: Election,
    recalled: Snapshot | None,
    claimed: Claimed | None,
    state_unchanged: bool,
) -> Agreement:
    """Choose the commit that all resume from, and send it; on the source rank."""
    world = session.context.world
    with _telling_errors(world, _HEADER):
        if election.newest is not None:
            agreement = _from_memory(session, election.newest, recalled, state_unchanged)
        elif recalled is not None and claimed is not None and claimed.root is not None:
            session.context.place.join(claimed.job)
            name = recalled.id.name
            heartbeat.notify(loaded=name)
            with session.timed("load"):
                snapshot = _resumed(session, recalled, claimed.generation, f"near commit {name}")
            agreement = Agreement(snapshot, "near", claimed.job, name)
        else:
            agreement = _from_root(session, claimed)
    send(world, session.root, agreement)
    return agreement


def _from_memory(
    session: Session, elected: CommitId, recalled: Snapshot | None, state_unchanged: bool
) -> Agreement:
    newest = CommitId(elected.generation + 1, elected.commit)
    heartbeat.notify(loaded="")  # no durable commit can be the cause of later faults
    if recalled is not None:
        load(session, recalled)
        return Agreement(dataclasses.replace(recalled, id=newest), "memory", recalled.job)
    unchanged = state_unchanged and not session.context.contents.per_rank
    snapshot = session.memory.capture(newest, finished=session.memory.finished, unchanged=unchanged)
    return Agreement(snapshot, "memory", session.context.place.job)


def _from_root(session: Session, claimed: Claimed | None) -> Agreement:
    context, memory = session.context, session.memory
    with session.timed("load"):
        generation = session.durable.claim({}) if claimed is None else claimed.generation
        stored = session.durable.read_newest(generation)
    if stored is None:
        if memory.newest is None:
            raise RecoveryError(
                "no commit is left: the last one was interrupted on all ranks, and none is durable"
            )
        session.own.seed = context.framework.draw_seed()
        return Agreement(memory.capture(CommitId(generation, 0)), "initial", context.place.job)
    heartbeat.notify(loaded=stored.id.name)
    if stored.finished and context.config.reopen:
        line = f"this run was finished at commit {stored.id.commit}; it is reopened, and continues from there"
        context.events.emit("reopened", line, **vars(stored.id))
        stored = dataclasses.replace(stored, finished=False)
    snapshot = _resumed(session, stored, generation, f"{session.durable.root}/{stored.id}")
    return Agreement(snapshot, "durable", context.place.job, stored.id.name)


def _resumed(session: Session, stored: Snapshot, generation: int, where: str) -> Snapshot:
    """Load a commit of an earlier start under this one's generation; return it as all ranks get it."""
    session.hooks.ask(Hook.resuming, stored, where)
    resumed = {hook.key: hook.resumed(stored.state.get(hook.key)) for hook in session.hooks.kept}
    state = {**stored.state, **{key: value for key, value in resumed.items() if value is not None}}
    stored = dataclasses.replace(stored, id=CommitId(generation, stored.id.commit), state=state)
    if load(session, stored, where):
        return stored
    # It fits in part, and is completed by this rank's values, so that all ranks get the same.
    session.own.keep(stored)
    present = session.memory.capture(stored.id, finished=stored.finished)
    state = {**present.state, "random": stored.state["random"]}
    return dataclasses.replace(present, state=state, world_size=stored.world_size)


def _adopt(session: Session, agreement: Agreement) -> None:
    context, memory, snapshot = session.context, session.memory, agreement.snapshot
    memory.adopt(snapshot)
    context.place.join(agreement.job)
    context.contents.place(context.world.rank(), context.world.size())
    session.durable.ranks_agreed()
    resized = snapshot.world_size != context.world.size()
    if agreement.source in ("near", "durable") and resized and session.reset_callbacks:
        reset(session)
        session.own.keep(snapshot)
        memory.capture(snapshot.id, finished=snapshot.finished)
    # The commit in memory has just been loaded, or sent.
    memory.objection = session.hooks.objection(committing=False)
    memory.resume(snapshot, load=agreement.source != "initial")


def report(agreement: Agreement, size: int, root: str, seconds: float, near: str = "") -> str:
    """Return the line that names the commit; ``near`` is where a near commit was."""
    commit, before = agreement.snapshot.id.commit, agreement.snapshot.world_size
    ranks = _count(size, "rank")
    change = f"it was {before}" if before != size else "as before"
    no_root = "" if root else ", without a checkpoint root: commits are in memory only"
    line = {
        "initial": f"starting from the beginning on {ranks}{no_root}",
        "durable": f"resumed from commit {commit} at {root} on {ranks} ({change})",
        "near": f"resumed from commit {commit} {near}, on {ranks} ({change})",
        "memory": f"resuming from commit {commit} in memory on {ranks}",
    }[agreement.source]
    return f"{line}; {seconds:.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- transfer: the source rank sends its commit ------------------------------------------------------------
# 1. The source rank sends a header: the commit's JSON, the headers of its files, and their digests.
# 2. Ranks that hold the very bytes keep theirs. If all do, nothing more is sent.
# 3. Else the files are broadcast piece by piece, into memory of the receiver's own: its commit stays whole
#    until all has come. Where an earlier process left unsealed files of the same sizes in the near root, they
#    are that memory. If all ranks have such files or the commit, they compare digests of the pieces, and
#    broadcast only those that differ.


def send(world: World, root: int, agreement: Agreement) -> None:
    snapshot = agreement.snapshot
    held = digests(snapshot) if agreement.source in ("memory", "near") and world.size() > 1 else {}
    header = {
        "id": [snapshot.id.generation, snapshot.id.commit],
        "source": agreement.source,
        "job": agreement.job,
        "loaded": agreement.loaded,
        "facts": {name: getattr(snapshot, name) for name in _FACTS},
        "files": {
            name: [arena.layout.nbytes, base64.b64encode(arena.layout.header).decode()]
            for name, arena in snapshot.arenas.items()
        },
        "digests": held,
    }
    gather_json(world, header, _HEADER)
    _broadcast_files(world, root, snapshot.arenas, Has.ALL)


def digests(snapshot: Snapshot) -> dict[str, str]:
    return snapshot.digested().digests or {}


@contextmanager
def _telling_errors(world: World, name: str) -> Iterator[None]:
    """Send an error to the ranks that are in `_heard`."""
    try:
        yield
    except Exception as error:
        kind = error_kinds.kinds(error)[:1] or [type(error).__name__]
        gather_json(world, {"error": f"{type(error).__name__}: {error}", "kind": kind[0]}, name)
        raise


def _heard(world: World, root: int, name: str) -> Any:
    """Return the JSON that a rank sends by `gather_json`, or raise its error."""
    heard = gather_json(world, None, name)[root]
    if "error" in heard:
        raise StoppedError(f"rank {root} has no state to resume from. {heard['error']}", heard["kind"])
    return heard


def receive(
    world: World,
    root: int,
    held: Mapping[str, Arena],
    mine: Mapping[str, str],
    left: Callable[[Mapping[str, Layout]], Mapping[str, Arena]],
) -> Agreement:
    """Receive the source rank's commit. If the files ``held``, with digests ``mine``, equal it, keep them.

    ``left`` returns memory with such files that an earlier process has left, to be overwritten; or nothing.
    """
    header = _heard(world, root, _HEADER)
    arenas, has = held, Has.ALL
    if mine != header["digests"] or not mine:
        layouts = {
            name: parse(base64.b64decode(text), size) for name, (size, text) in header["files"].items()
        }
        arenas, has = left(layouts), Has.PARTS
        if not arenas:
            arenas, has = {name: Arena(layout) for name, layout in layouts.items()}, Has.NOTHING
    arenas = {name: arenas[name] for name in header["files"]}
    _broadcast_files(world, root, arenas, has)
    known = dict(mine) if has is Has.ALL else header["digests"] or None
    snapshot = Snapshot(CommitId(*header["id"]), arenas, digests=known, **header["facts"])
    return Agreement(snapshot, header["source"], header["job"], header["loaded"])


class Has(IntEnum):
    """How much of a commit's files a rank has before the broadcast."""

    NOTHING = 0
    PARTS = 1  # bytes of another commit, or of an unfinished copy of this one
    ALL = 2


def _broadcast_files(world: World, root: int, arenas: Mapping[str, Arena], has: Has) -> None:
    """Broadcast the pieces that any rank lacks."""
    known = world.allgather([has], "hvdrecover.has")[:, 0]
    if (known == Has.ALL).all():
        return
    pieces = [
        arena.buffer[start : start + PIECE]
        for arena in arenas.values()
        for start in range(0, len(arena.buffer), PIECE)
    ]
    sent = np.ones(len(pieces), dtype=bool)
    if Has.NOTHING not in known:
        compares = has is Has.PARTS or world.rank() == root
        mine = [number for each in pieces for number in (digest_numbers(each) if compares else (0, 0))]
        digests = world.allgather(mine, "hvdrecover.pieces").reshape(len(known), len(pieces), 2)
        sent = (digests != digests[root])[known == Has.PARTS].any(axis=(0, 2))
    scratch = None  # received and ignored by a rank that has the bytes already
    for number in np.flatnonzero(sent).tolist():
        piece = pieces[number]
        if has is Has.ALL and world.rank() != root:
            scratch = allocate(PIECE) if scratch is None else scratch
            piece = scratch[: len(piece)]
        world.broadcast(piece, root, f"hvdrecover.snapshot.{number}.{len(piece)}")
