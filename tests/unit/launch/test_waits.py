"""Each wait of supervisors, guardians and standbys has a deadline, or a reason to have none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.launch import waits

LAUNCH = Path(waits.__file__).parent
# Calls that may block, with the place of the timeout among their arguments; None: they take no timeout.
TIMED = {
    "wait": 0,
    "wait_for": 1,
    "join": 0,
    "select": 0,
    "result": 0,
    "communicate": 1,
    "create_connection": 1,
    "run": None,
    "acquire": 1,
    "poll": 0,
    "recv": None,
    "accept": None,
    "sendall": None,
    "connect": None,
    "Popen": None,
    "Child": None,
    "readline": None,
    "flock": None,
    "lockf": None,
    "waitpid": None,
    "getaddrinfo": None,
    "gethostbyname": None,
    "getfqdn": None,
    "urlopen": None,
    "open": None,
    "write": None,
    "write_text": None,
    "write_bytes": None,
    "flush": None,
    "fsync": None,
    "mkdir": None,
    "replace": None,
}
_START = "at the start of the job: nothing runs yet that could be lost, and a person or scheduler waits"
_BOUNDED = "callers bound it by waits.DISK"
_RECORD = "the record bounds it by waits.DISK"
_OWN_THREAD = "in a daemon thread of its own, for which nothing waits"
_PIPE_HAS_ROOM = "a pipe takes 64 KiB without a reader, and these bytes are all that ever comes"
_SOCKET = "the socket has a timeout of waits.MESSAGE, or 0 at the supervisor"

UNBOUNDED = {
    "standby.main: readline": "a standby waits for as long as nothing is lost; it dies with its guardian",
    "standby.main: open": "/dev/null",
    "standby.start: open": "a file in memory",
    "standby.wake: write": _PIPE_HAS_ROOM,
    "standby.wake: flush": _PIPE_HAS_ROOM,
    "standby._silence: open": "/dev/null",
    "link.Link.send: sendall": _SOCKET,
    "link.Link.receive: recv": _SOCKET,
    "guardians.Guardians._accept: accept": "the listener does not block",
    "output.Outlet._pump: wait_for": _OWN_THREAD,
    "output.Outlet._pump: write": _OWN_THREAD,
    "output.append: open": "in horovodrun as it starts workers; a person sees that none comes",
    "output.unblocked: flush": _START,
    "presence.announce: mkdir": _BOUNDED + "; the first: " + _START,
    "presence.announce: write_text": _BOUNDED + "; the first: " + _START,
    "presence.announce: replace": _BOUNDED + "; the first: " + _START,
    "ssh.kept_alive: mkdir": _START,
    "ssh.kept_alive: write_text": _START,
    "ssh.kept_alive: replace": _START,
    "ssh.main: write": "a file in memory",
    "processes.start: Child": "until the program runs; from a disk that hangs, nothing could be trained. "
    "The supervisor's SIGKILL ends a guardian that waits here",
    "slurm.leave_heir: Popen": "the last act of a guardian",
    "supervisor.Supervisor._serve: flush": _RECORD,
    "reports._append: mkdir": _BOUNDED,
    "reports._append: open": _BOUNDED,
    "reports._append: write": _BOUNDED,
}
"""The calls that may block without a timeout, as ``module.function: name``, each with its reason."""

CONSTANTS = {name: value for name, value in vars(waits).items() if isinstance(value, float)}


def blocking_calls() -> Iterator[tuple[str, str]]:
    """Each call that may block without a timeout, and the line in which it stands."""
    for path in sorted(LAUNCH.rglob("*.py")):
        module = path.relative_to(LAUNCH).with_suffix("").as_posix()
        for function, node in _calls(ast.parse(path.read_text()), ""):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in TIMED and not _is_harmless(node, name) and not _is_timed(node, name):
                yield f"{module}.{function}: {name}", f"{path.name}:{node.lineno}"


def _calls(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        inner = function
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inner = f"{function}.{node.name}".lstrip(".")
        elif isinstance(node, ast.Call):
            yield function, node
        yield from _calls(node, inner)


def _is_timed(node: ast.Call, name: str) -> bool:
    place = TIMED[name]
    timeout = [word.value for word in node.keywords if word.arg == "timeout"]
    timeout += node.args[place : place + 1] if place is not None else []
    return any(not (isinstance(each, ast.Constant) and each.value is None) for each in timeout)


def _is_harmless(node: ast.Call, name: str) -> bool:
    """Methods of strings, paths and dataclasses of the same names; `Popen.poll`, which does not block."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    words = ast.unparse(owner) if owner is not None else ""
    return (
        (name == "join" and (isinstance(owner, ast.Constant) or words.startswith("os.pathsep")))
        or (name == "replace" and (words in ("dataclasses", "") or len(node.args) > 1))
        or (name == "poll" and not node.args and words != "poll")
        or (name == "connect" and words in ("self._reports", "link"))  # each calls `link.connect` in the end
        or (name == "run" and words != "subprocess")
        or (name in ("write", "flush") and words in ("sys.stderr", "sys.stdout"))  # an `Outlet`; see below
    )


def test_each_call_that_may_block_has_a_timeout_or_a_reason() -> None:
    unlisted = [f"{where} ({call})" for call, where in blocking_calls() if call not in UNBOUNDED]
    assert unlisted == []


def test_no_reason_stands_for_a_call_that_is_gone() -> None:
    assert set(UNBOUNDED) - {call for call, _ in blocking_calls()} == set()


@pytest.mark.parametrize("name", CONSTANTS)
def test_each_deadline_is_finite_and_is_what_the_code_reads(name: str) -> None:
    assert 0 < CONSTANTS[name] <= 60
    assert any(f"waits.{name}" in path.read_text() for path in LAUNCH.rglob("*.py"))
