"""Each wait of supervisors, guardians and standbys has a deadline, or a reason to have none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.launch import waits

LAUNCH = Path(waits.__file__).parent
# Calls that may block and take a timeout, with its place among the arguments.
TIMED = {"wait": 0, "wait_for": 1, "join": 0, "select": 0, "result": 0, "communicate": 1, "acquire": 1}
TIMED |= {"poll": 0, "create_connection": 1}
# Calls that may block and take none.
UNTIMED = {"run", "recv", "accept", "sendall", "connect", "Popen", "Child", "readline", "flock", "lockf"}
UNTIMED |= {"waitpid", "getaddrinfo", "gethostbyname", "getfqdn", "urlopen", "open", "write", "write_text"}
UNTIMED |= {"write_bytes", "flush", "fsync", "mkdir", "replace"}

# The calls that may block without a timeout, by the reason for it.
UNBOUNDED = {
    "a standby waits for as long as nothing is lost; it dies with its guardian": ["training.main: readline"],
    "/dev/null or a file in memory": [
        *("training.main: open", "training._silence: open", "training.start_standby: open"),
        "ssh.main: write",
    ],
    "a pipe takes 64 KiB without a reader, and these bytes are all that ever comes": [
        *("training.wake: write", "training.wake: flush"),
    ],
    "the socket has a timeout of waits.MESSAGE, or 0 at the supervisor": [
        *("link.Link.send: sendall", "link.Link.receive: recv", "link.Guardians._accept: accept"),
    ],
    "in a daemon thread of its own, for which nothing waits": [
        *("output.Outlet._pump: wait_for", "output.Outlet._pump: write"),
    ],
    "at the start of the job: nothing runs yet that could be lost, and a person or scheduler waits": [
        *("output.append: open", "output.unblocked: flush"),
        *("ssh.kept_alive: mkdir", "ssh.kept_alive: write_text", "ssh.kept_alive: replace"),
    ],
    "callers bound it by waits.DISK": [
        *("presence.announce: mkdir", "presence.announce: write_text", "presence.announce: replace"),
        *("guardian._append: mkdir", "guardian._append: open", "guardian._append: write"),
        "supervisor.Supervisor._serve: flush",
    ],
    "until the program runs; the supervisor's SIGKILL ends a guardian that waits here": [
        "processes.start: Child",
    ],
    "the last act of a guardian": ["slurm.leave_heir: Popen"],
}


def blocking_calls() -> Iterator[str]:
    """Each call that may block without a timeout, as ``module.function: name``."""
    for path in sorted(LAUNCH.rglob("*.py")):
        for function, node in _calls(ast.parse(path.read_text()), path.stem):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in UNTIMED | TIMED.keys() and not _is_harmless(node, name) and not _is_timed(node, name):
                yield f"{function}: {name}"


def _calls(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        inner = f"{function}.{node.name}" if isinstance(node, ast.ClassDef | ast.FunctionDef) else function
        if isinstance(node, ast.Call):
            yield function, node
        yield from _calls(node, inner)


def _is_timed(node: ast.Call, name: str) -> bool:
    timeout = [word.value for word in node.keywords if word.arg == "timeout"]
    timeout += node.args[TIMED[name] :][:1] if name in TIMED else []
    return any(not (isinstance(each, ast.Constant) and each.value is None) for each in timeout)


def _is_harmless(node: ast.Call, name: str) -> bool:
    """Methods of strings, paths and dataclasses of the same names; `Popen.poll`, which does not block."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    words = ast.unparse(owner) if owner is not None else ""
    return (
        (name == "join" and (isinstance(owner, ast.Constant) or words.startswith("os.pathsep")))
        or (name == "replace" and (words == "" or len(node.args) > 1))
        or (name == "poll" and not node.args and words != "poll")
        or (name == "connect" and words == "link")
        or (name == "run" and words != "subprocess")
        or (name in ("write", "flush") and words in ("sys.stderr", "sys.stdout"))  # an `Outlet`
    )


def test_each_call_that_may_block_has_a_timeout_or_a_reason() -> None:
    assert set(blocking_calls()) == {call for calls in UNBOUNDED.values() for call in calls}


@pytest.mark.parametrize("name", [name for name in vars(waits) if name.isupper() and name[0] != "_"])
def test_each_deadline_is_over_within_a_minute_and_is_what_the_code_reads(name: str) -> None:
    assert 0 < getattr(waits, name) <= 60
    read = "".join(path.read_text() for path in LAUNCH.rglob("*.py"))
    assert f"waits.{name}" in read or name == "HANG_FACTOR"
