"""Each wait of supervisors, guardians and standbys has a deadline, or a reason to have none."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hvdrecover.config import LEAST_TIMEOUT, Config, read
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import waits
from hvdrecover.launch.horovodrun import settings

LAUNCH = Path(waits.__file__).parent
# Calls that may block and take a timeout, with its place among the arguments.
TIMED = {"wait": 0, "wait_for": 1, "join": 0, "select": 0, "result": 0, "communicate": 1, "acquire": 1}
TIMED |= {"poll": 0, "create_connection": 1}
# Calls that may block and take none.
UNTIMED = {"run", "recv", "accept", "sendall", "connect", "Popen", "Child", "readline", "flock", "lockf"}
UNTIMED |= {"waitpid", "getaddrinfo", "gethostbyname", "getfqdn", "urlopen", "open", "write", "write_text"}
UNTIMED |= {"write_bytes", "flush", "fsync", "mkdir", "replace"}

MARK = "# no deadline: "  # in the line of such a call, before the reason


def test_each_call_that_may_block_has_a_timeout_or_a_reason() -> None:
    for path in sorted(LAUNCH.rglob("*.py")):
        text = path.read_text()
        reasons = {number for number, line in enumerate(text.splitlines(), 1) if MARK in line}
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        assert {call.lineno for call in calls if _may_block(call)} == reasons, path.name


def _may_block(node: ast.Call) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in UNTIMED | TIMED.keys() and not _is_harmless(node, name) and not _is_timed(node, name)


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


def limits(timeout: float | None = None) -> Config:
    return replace(read({}), hang_timeout=timeout, startup_timeout=600.0)


SHORT, LONG, ADAPTIVE = limits(20.0), limits(900.0), limits()


@pytest.mark.parametrize(
    ("reading", "limits", "seconds"),
    [
        (Reading(Phase.TRAINING), SHORT, 20.0),
        (Reading(Phase.TRAINING), LONG, 900.0),
        (Reading(Phase.TRAINING), ADAPTIVE, 300.0),
        (Reading(Phase.TRAINING, longest=60.0), ADAPTIVE, 300.0),
        (Reading(Phase.TRAINING, longest=1000.0), ADAPTIVE, 5000.0),  # a multiple of the longest so far
        (Reading(Phase.STARTING), ADAPTIVE, 600.0),
        (Reading(Phase.RECOVERING), LONG, 900.0),
        (Reading(Phase.UNKNOWN), SHORT, 600.0),
        (Reading(Phase.LEFT), SHORT, 20.0),
        (Reading(Phase.REMOVED), ADAPTIVE, 300.0),
        (Reading(Phase.BEGINNING), SHORT, 600.0),
        (Reading(Phase.BEGINNING, longest=0.1), SHORT, 20.0),
        (Reading(Phase.BEGINNING, longest=500.0), SHORT, 2500.0),  # what is known counts, not what is assumed
        (Reading(Phase.BEGINNING, longest=500.0, waiting=True), SHORT, 600.0),
        (Reading(Phase.BEGINNING, longest=70.0), ADAPTIVE, 350.0),
        (Reading(Phase.PLAIN, steps=3, longest=10.0), SHORT, 20.0),
        (Reading(Phase.PLAIN, steps=3, longest=10.0), ADAPTIVE, 600.0),  # it may evaluate for long
        (Reading(Phase.PLAIN), SHORT, math.inf),  # without steps
        (Reading(Phase.TRAINING, paused=True), SHORT, math.inf),
    ],
)
def test_a_limit_for_each_phase(reading: Reading, limits: Config, seconds: float) -> None:
    assert waits.hang_limit(reading, limits) == seconds


def test_a_script_that_never_imports_hvdrecover_is_not_judged() -> None:
    assert waits.hang_limit(Reading(Phase.UNKNOWN), SHORT, joins=False) == math.inf


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("limits", [SHORT, ADAPTIVE])
def test_every_phase_has_a_deadline(phase: Phase, limits: Config) -> None:
    assert 0 < waits.hang_limit(Reading(phase, steps=1), limits) <= 86400


@pytest.mark.parametrize("timeout", [LEAST_TIMEOUT, 5.5, 6, 7, 7.9, 8, 10, 15, 16, 30, 300, 86400])
def test_waiting_ranks_are_free_before_they_would_count_as_hanging(timeout: float) -> None:
    found = settings(timeout, {}, ours=False)
    stall, check = (int(found[f"HOROVOD_STALL_{name}_TIME_SECONDS"]) for name in ("SHUTDOWN", "CHECK"))
    assert stall >= 1 and check >= 1  # to Horovod, 0 is never
    assert stall + 2 * check < timeout  # a tensor in Horovod's cache takes up to two looks longer
    assert int(found["HOROVOD_GLOO_TIMEOUT_SECONDS"]) < timeout
