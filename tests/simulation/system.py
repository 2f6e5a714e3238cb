"""The operating system under the code of `hvdrecover.launch`: processes, signals, descriptors and sockets.

Supervisors, guardians, standbys and training processes are simulated processes in a tree. This module does
the kernel's part:

1. When a process ends, its descriptors and sockets are closed, its parent gets SIGCHLD, and each child gets
   the signal that it has asked for (`hvdrecover.launch.processes.die_with_parent`).
2. A signal wakes a process that handles it, and ends one that does not.
3. A socket's other end sees at once that a process has ended. If a host was cut off, it sees that later.

The memory of pages and notes is real: both ends of it are threads of one process.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from hvdrecover import machine
from hvdrecover.config import STACKS_SIGNAL
from hvdrecover.launch import processes, waits
from hvdrecover.launch.processes import Waking
from tests.simulation.scheduler import Process, Scheduler

Program = Callable[["Running"], int]
T = TypeVar("T")

_STACKS = b'Current thread\n  File "train.py", line 1 in train\n'
_BUFFER = 1 << 18  # bytes that a socket holds


class Running(Process):
    """A process in the tree."""

    def __init__(self, scheduler: Scheduler, name: str, host: str, parent: Running | None = None) -> None:
        super().__init__(scheduler, name, host)
        self.command: Sequence[str] = ()  # its words
        self.environ: Mapping[str, str] = {}  # its environment
        self.parent = parent  # the process that has started it; None if that is out of reach, as behind ssh
        self.death_signal = 0  # what it gets when its parent dies; 0 for nothing
        self.returncode: int | None = None  # None while it runs; negative if a signal has ended it
        self.inherited: dict[int, int] = {}  # its descriptors, by those of the parent
        self.stdin: Input | None = None  # what its parent writes to it
        self.hangs = False  # whether it waits for a disk, so that SIGKILL ends it only afterwards
        self.is_doomed = False  # whether it hangs, and has got SIGKILL
        self.killed_at = math.inf  # when its parent has sent it a signal; infinite before
        self.at_exit: list[Callable[[], object]] = []  # called before it ends by itself
        self.at_end: list[Callable[[], object]] = []  # called when it ends
        self.signals: list[int] = []  # that have come, and are handled
        self.handled: set[int] = set()
        self.descriptors: set[int] = set()
        self.sockets: list[Socket] = []


class System:
    """All simulated processes, and the network between their hosts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.program: Program = lambda process: 0  # what a process that another one starts does
        # Called with the name of each call that a process makes: start, signal, connect or send.
        self.at_call: Callable[[str], None] = lambda name: None
        self._living: dict[int, Running] = {}
        self._listeners: dict[int, Listener] = {}
        self._numbers = 0
        self._cut: set[str] = set()
        self.around = Process(scheduler, "", "")  # never dies

    # -- processes -----------------------------------------------------------------------------------------

    @property
    def process(self) -> Running:
        """The process that runs."""
        process = self.scheduler.process
        assert isinstance(process, Running)
        return process

    @property
    def living(self) -> list[Running]:
        return list(self._living.values())

    def children(self, parent: Running) -> list[Running]:
        return [each for each in self._living.values() if each.parent is parent]

    def spawn(self, process: Running, program: Program) -> None:
        """Start a process."""

        def live() -> None:
            self.end(process, program(process))

        self._living[process.pid] = process
        self.scheduler.start(process, "main", live)

    def kill(self, process: Running) -> None:
        self.send(process, signal.SIGKILL)

    def send(self, process: Running, number: int) -> None:
        """Send a signal."""
        if process.dead:
            return
        if number == signal.SIGKILL and process.hangs:
            process.is_doomed = True
        elif process.hangs:
            pass
        elif number == signal.SIGKILL:
            self.end(process, -number)
        elif number in (signal.SIGSTOP, signal.SIGCONT):
            process.stopped = number == signal.SIGSTOP
        elif number in process.handled:
            process.signals.append(number)
        elif number == STACKS_SIGNAL and process.inherited and not process.stopped:
            os.write([*process.inherited.values()][1], _STACKS)
        elif number not in (signal.SIGCHLD, STACKS_SIGNAL):
            self.end(process, -number)

    def end(self, process: Running, returncode: int) -> None:
        """End a process."""
        if process.dead:
            return
        process.returncode = returncode
        del self._living[process.pid]
        self.scheduler.kill(process)
        for each in list(process.sockets):
            each.vanish()
        for child in self.children(process):
            child.parent = None
            if child.death_signal:
                self.send(child, child.death_signal)
        for action in process.at_end:
            action()
        for descriptor in process.descriptors:
            os.close(descriptor)
        if process.parent is not None:
            self.send(process.parent, signal.SIGCHLD)

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        hand_down: Sequence[int] = (),
        new_session: bool = False,
        **streams: Any,
    ) -> Child:
        """Stands for `processes.start`."""
        parent = self.process
        self._call("start")
        process = Running(self.scheduler, parent.name, parent.host, parent)
        process.skew = parent.skew
        process.command, process.environ = command, environ
        process.death_signal = signal.SIGKILL
        process.inherited = {each: os.dup(each) for each in hand_down}
        process.descriptors.update(process.inherited.values())
        if streams.get("stdin") == subprocess.PIPE:
            process.stdin = Input(self.scheduler)
        self.spawn(process, self.program)
        return Child(self, process)

    def kill_marked(
        self,
        mark: str,
        patience: float = 0.0,
        *,
        pause: Callable[[float], object],
        hurries: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Stands for `processes.kill_marked`."""
        name, _, value = mark.partition("=")
        marked = [
            each for each in self.living if each.host == self.process.host and each.environ.get(name) == value
        ]
        for process in marked:
            self.send(process, signal.SIGKILL)
        pause(0.0)
        return [each.pid for each in marked if not each.dead]

    def _call(self, name: str) -> None:
        """Let other processes run, and faults strike, before a call."""
        self.scheduler.pause()
        self.at_call(name)
        self.scheduler.check()

    def _kill(self, pid: int, number: int) -> None:
        self._call("signal")
        if (process := self._living.get(pid)) is not None:  # else a zombie
            self.send(process, number)

    def _die_with_parent(self, number: int = signal.SIGKILL) -> None:
        self.process.death_signal = number

    def _at_exit(self, function: Callable[..., object], *args: object) -> None:
        self.process.at_exit.append(lambda: function(*args))

    def _is_stopped(self, pid: int) -> bool:
        return pid in self._living and self._living[pid].stopped

    # -- descriptors ---------------------------------------------------------------------------------------

    def _made(self, *descriptors: int) -> None:
        self.process.descriptors.update(descriptors)

    def _memory(self, name: str, flags: int = os.MFD_CLOEXEC) -> int:
        self.scheduler.check()
        descriptor = os.memfd_create(name, flags)
        self._made(descriptor)
        return descriptor

    def _pipe(self, flags: int) -> tuple[int, int]:
        self.scheduler.check()
        reader, writer = os.pipe2(flags)
        self._made(reader, writer)
        return reader, writer

    def _write(self, descriptor: int, data: bytes) -> int:
        self.scheduler.check()
        return os.write(descriptor, data)

    def _close(self, descriptor: int) -> None:
        process = self.scheduler.process
        if isinstance(process, Running) and descriptor in process.descriptors:
            if process.dead:
                return  # closed when it died
            process.descriptors.remove(descriptor)
        os.close(descriptor)

    # -- the network ---------------------------------------------------------------------------------------

    def _listen(self, address: tuple[str, int], backlog: int = 0) -> Listener:
        self._numbers += 1
        listener = self._listeners[self._numbers] = Listener(self, self._numbers, self.process)
        return listener

    def _connect(self, address: tuple[str, int], timeout: float) -> Socket:
        self._call("connect")
        process, listener = self.process, self._listeners.get(address[1])
        if listener is None or listener.process.dead:
            raise ConnectionRefusedError(address)
        if self._is_cut(process, listener.process):
            self.scheduler.sleep(timeout)
            raise TimeoutError(address)
        ends = [Socket(self, each) for each in (process, listener.process)]
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        listener.pending.append(ends[1])
        return ends[0]

    def _is_cut(self, one: Running, other: Running) -> bool:
        return one.host != other.host and not self._cut.isdisjoint((one.host, other.host))

    def cut(self, host: str, notice: Callable[[], float]) -> None:
        """Cut a host off. Ends of its connections notice that after some time, unless it is joined before."""
        self._cut.add(host)
        for process in self.living:
            for end in process.sockets:
                if self._is_cut(process, end.peer.process) and host in (process.host, end.peer.process.host):
                    end.lose(notice())

    def join(self, host: str) -> None:
        """Let a host that was cut off be reached again."""
        self._cut.discard(host)
        for process in self.living:
            for end in process.sockets:
                if not self._is_cut(process, end.peer.process):
                    end.find()

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something after a while, in no process."""

        def wait_and_do() -> None:
            self.scheduler.sleep(seconds)
            action()

        self.scheduler.start(self.around, "around", wait_and_do)

    # -- replacements ---------------------------------------------------------------------------------------

    def modules(self) -> dict[ModuleType, dict[str, Any]]:
        """Return what replaces names of modules in the package."""
        return {
            os: {
                "kill": self._kill,
                "memfd_create": self._memory,
                "pipe2": self._pipe,
                "write": self._write,
                "close": self._close,
            },
            socket: {
                "create_server": self._listen,
                "create_connection": self._connect,
                "gethostname": lambda: self.process.host,
            },
            select: {"poll": lambda: _Poll(self)},
            atexit: {"register": self._at_exit},
            secrets: {"token_hex": lambda size: f"{self.scheduler.dice.getrandbits(8 * size):0{2 * size}x}"},
        }

    def functions(self) -> dict[Any, Any]:
        """Return what replaces functions and classes of the package."""
        return {
            processes.start: self.start,
            processes.kill_marked: self.kill_marked,
            processes.die_with_parent: self._die_with_parent,
            processes.allow_open_files: lambda: None,
            processes.is_stopped: self._is_stopped,
            processes.memory_kills: lambda: 0,
            processes.named: lambda numbers: ", ".join(f"process {each} (python)" for each in numbers),
            machine.versions: dict,
            Waking: lambda signals: SimulatedWaking(self, signals),
            machine.Bounded: lambda seconds: _at_once,
        }


def _at_once(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Stands for `machine.Bounded`: no disk hangs here."""
    return function(*args, **options)


class Child:
    """Stands for `processes.Child`."""

    def __init__(self, system: System, process: Running) -> None:
        self._system = system
        self._process = process
        self.pid = process.pid
        self.stdin = process.stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._system.scheduler.check()
        return self._process.returncode

    def ends(self, patience: float = waits.KILLED) -> bool:
        self._system.scheduler.wait(lambda: self._process.returncode is not None, patience)
        self.returncode = self._process.returncode
        return self.returncode is not None

    def kill_group(self) -> None:
        self._send(signal.SIGKILL)

    kill = kill_group

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        self._system._call("signal")
        self._process.killed_at = min(self._process.killed_at, self._system.scheduler.now)
        self._system.send(self._process, number)


class Input:
    """The standard input of a process, as its parent sees it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._data = b""
        self._closed = False

    def write(self, data: bytes) -> None:
        self._scheduler.check()
        self._data += data

    def flush(self) -> None:
        self._scheduler.pause()

    def close(self) -> None:
        self._closed = True

    def line(self) -> bytes:
        """Wait for a line, in the process that reads it."""
        self._scheduler.wait(lambda: b"\n" in self._data or self._closed)
        return self._data


class SimulatedWaking:
    """Stands for `hvdrecover.launch.processes.Waking`."""

    def __init__(self, system: System, signals: Iterable[int]) -> None:
        self._system = system
        self._signals = set(signals)
        self.selector = Selector()

    def __enter__(self) -> SimulatedWaking:
        self._process = self._system.process
        self._process.handled |= self._signals
        return self

    def __exit__(self, *error: object) -> None:
        self._process.handled -= self._signals

    def wait(self, seconds: float) -> list[int]:
        process, ready = self._process, self.selector.ready
        self._system.scheduler.wait(lambda: bool(process.signals) or bool(ready()), seconds)
        for call in ready():
            call()
        noted = process.signals.copy()
        del process.signals[: len(noted)]
        return noted


class Selector:
    """Stands for a selector of sockets."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Listener | Socket, Callable[[], object]]] = {}

    def register(self, source: Any, events: int, call: Callable[[], object]) -> None:
        self._calls[source] = source.fileno(), call

    def unregister(self, source: Any) -> None:
        del self._calls[source]

    def ready(self) -> list[Callable[[], object]]:
        return [call for end, call in self._calls.values() if end.is_readable]


class Listener:
    """A socket that takes connections."""

    def __init__(self, system: System, port: int, process: Running) -> None:
        self._system = system
        self._port = port
        self.process = process
        self.pending: list[Socket] = []
        self._open = True

    @property
    def is_readable(self) -> bool:
        return self._open and bool(self.pending)

    def fileno(self) -> Listener:
        return self

    def setblocking(self, blocking: bool) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def accept(self) -> tuple[Socket, str]:
        self._system.scheduler.check()
        if not self.pending:
            raise BlockingIOError
        return self.pending.pop(0), ""

    def close(self) -> None:
        self._open = False
        self._system._listeners.pop(self._port, None)
        for end in self.pending:
            end.vanish()


class Socket:
    """One end of a connection."""

    peer: Socket  # the other end

    def __init__(self, system: System, process: Running) -> None:
        self._system = system
        self.process = process  # whose it is
        self._received = b""
        self._held = b""  # was sent while the hosts were cut off from each other
        self._ended = False  # the other end has closed it, or is taken for lost
        self._open = True
        self._is_lost = False  # whether the other end cannot be reached
        self._losses = 0
        process.sockets.append(self)

    @property
    def is_readable(self) -> bool:
        return self._open and (bool(self._received) or self._ended)

    @property
    def has_room(self) -> bool:
        return len(self.peer._received) < _BUFFER

    def fileno(self) -> Socket:
        return self

    def settimeout(self, seconds: float) -> None:
        pass

    def setsockopt(self, *option: int) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        self._system._call("send")
        if self._ended or not self._open:
            raise BrokenPipeError
        if self._is_lost:
            self.peer._held += data
        else:
            self.peer._received += data

    def recv(self, size: int) -> bytes:
        self._system.scheduler.check()
        if not self._open:
            raise OSError("closed")
        if not self._received and not self._ended:
            raise BlockingIOError
        data, self._received = self._received[:size], self._received[size:]
        return data

    def shutdown(self, how: int) -> None:
        self._system.scheduler.check()

    def close(self) -> None:
        self._system.scheduler.check()
        self.vanish()

    def vanish(self) -> None:
        """Close it: the other end learns of that, unless it cannot be reached."""
        self._open = False
        if self in self.process.sockets:
            self.process.sockets.remove(self)
        if not self._is_lost:
            self.peer._ended = True

    def break_off(self) -> None:
        """Lose the connection: both ends notice at once."""
        self._ended = self.peer._ended = True

    def lose(self, seconds: float) -> None:
        """The other end cannot be reached; this one notices it so many seconds later."""
        self._is_lost = True
        self._losses += 1
        losses = self._losses

        def notice() -> None:
            if self._is_lost and self._losses == losses:
                self._ended = True

        self._system.later(seconds, notice)

    def find(self) -> None:
        """The other end can be reached again."""
        if self._is_lost:
            self._is_lost = False
            self._received, self._held = self._received + self._held, b""
            self._ended = self._ended or not self.peer._open


class _Poll:
    """Stands for ``select.poll``: whether a socket has room."""

    def __init__(self, system: System) -> None:
        self._ends: list[Socket] = []

    def register(self, end: Socket, events: int) -> None:
        self._ends.append(end)

    def poll(self, timeout: float) -> list[Socket]:
        return [end for end in self._ends if end.has_room]
