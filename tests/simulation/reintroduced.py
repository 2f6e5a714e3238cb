"""Faults of the product that were mended, put back by changing the text of one function each.

`Mistake.made` has the function as it was, for the time of a ``with`` block. If the text to change is not
there, the product has changed: put the mistake into the present code, or choose another one.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.store import BackgroundWriter
from hvdrecover.launch import ends
from hvdrecover.launch.training import Training
from hvdrecover.state import commit as commits
from hvdrecover.state.memory import Arenas


@dataclass(frozen=True)
class Mistake:
    name: str  # what the changelog says about it
    owner: Any  # the class or module with the function
    function: str  # its name
    right: str  # the text that is changed
    wrong: str  # what it is changed to
    seed: int  # the first that showed it, when it was written: a search begins here

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the mistake for a while."""
        original: Callable[..., Any] = getattr(self.owner, self.function)
        text = textwrap.dedent(inspect.getsource(original))
        assert self.right in text, f"{self.function} has changed: '{self.right}' is not in it"
        module = sys.modules[original.__module__]
        space: dict[str, Any] = {}
        code = compile(text.replace(self.right, self.wrong), f"<{self.function}, with a mistake>", "exec")
        exec(code, vars(module), space)
        setattr(self.owner, self.function, space[self.function])
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)


MISTAKES = [
    Mistake(
        "After a commit that failed on one rank, that rank no longer keeps the others waiting",
        commits,
        "_commit",
        'verdict = (hear or send_vote(session, Moment("commit")))()',
        "verdict = None if hear is None else hear()",
        96,
    ),
    Mistake(
        "A script's SIGTERM handler that ends its loop no longer marks the run as finished",
        commits,
        "leave_if_told",
        "if isinstance(verdict, Departure):",
        "if False:",
        138,
    ),
    Mistake(
        "A guard that heals changes no commit that is being written: its memory is not used again before",
        Arenas,
        "choose",
        "read = [in_flight, *(each() for each in self._abandoned)]",
        "read = [None]",
        6,
    ),
    Mistake(
        "Claims are read back, so answers that are lost no longer confuse two jobs or one",
        Claims,
        "_place",
        "write(_path(generation), claim.text(acknowledged=False))\n"
        "    # Read it back: the answer may get lost, and some stores let two processes create "
        "the same file.\n"
        "    is_placed = self.read(generation).maker == self._maker",
        "is_placed = write(_path(generation), claim.text(acknowledged=False)) is not False",
        34,
    ),
    Mistake(
        "Only the root in use must hold the job's claim: a root that vanished is not made anew",
        Claims,
        "take_after",
        "if again and not has_claimed:",
        "if False:",
        550,
    ),
    Mistake(
        "Fencing: a process of an earlier start of the same job stays behind",
        Claims,
        "_judge",
        "if newest is not None and newest.start != self._start:",
        "if newest is not None and newest.job != self._job:",
        114,
    ),
    Mistake(
        "Exit code 0 of a process that did not finish no longer ends a job as finished",
        ends,
        "end_of",
        "if returncode == 0 and phase == Phase.FINISHED:",
        "if returncode == 0:",
        138,
    ),
    Mistake(
        "Every wait for a killed process has a limit",
        Training,
        "kill",
        "self.process.ends()",
        'self.process.ends(float("inf"))',
        4,
    ),
    Mistake(
        "A handler of log lines that raises an error no longer ends the writing of commits without a word",
        BackgroundWriter,
        "_failed",
        "except Exception as unhandled:",
        "except ZeroDivisionError as unhandled:",
        216,
    ),
]
