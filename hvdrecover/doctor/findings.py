"""The result of one check: an outcome, a sentence, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hvdrecover.errors import HvdrecoverError, LaunchError

Outcome = Literal["ok", "warning", "failure", "skipped"]
RUN_AGAIN = "Repair this host, then run `hvdrecover doctor` again."


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        outcome: ``failure`` if a job cannot run like this; ``warning`` if it can, with a disadvantage;
            ``skipped`` if the check was not possible.
        what: the observation, or the reason for skipping.
        remedy: what to do; empty unless the outcome is a warning or a failure.
        at_fault: hosts without which the failure would be gone; empty if the failure concerns all hosts.
    """

    check: str
    outcome: Outcome
    what: str
    remedy: str = ""
    at_fault: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.check}: {self.what}. {self.remedy}".rstrip()


def ok(check: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, "ok", what)


def skipped(check: str, why: str) -> Finding:
    """Return the finding of a check that was not possible."""
    return Finding(check, "skipped", why)


def warning(check: str, what: str, remedy: str) -> Finding:
    """Return a problem that a job can live with."""
    return Finding(check, "warning", what, remedy)


def failure(check: str, what: str, remedy: str, at_fault: Iterable[str] = ()) -> Finding:
    """Return a problem with which a job cannot run."""
    return Finding(check, "failure", what, remedy, tuple(at_fault))


def host_failure(check: str, error: LaunchError, remedy: str = RUN_AGAIN) -> Finding:
    """Return a host's error as a finding.

    Our error messages end with a sentence that says what to do. It replaces ``remedy`` if it is there.
    """
    what, _, last = error.problem.rpartition(". ")
    if not what or not last[:1].isupper():
        what, last = error.problem, remedy
    return failure(check, f"{error.program}: {what}", last, [error.program])


def checked(check: str, look: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings. If the check raises, its error is the last finding."""
    try:
        found = look()
        yield from [found] if isinstance(found, Finding) else found
    except LaunchError as error:
        yield host_failure(check, error)
    except HvdrecoverError as error:
        yield failure(check, str(error), "Follow the message, then run `hvdrecover doctor` again.")
    except Exception as error:  # the other checks still have to be made
        what = f"the check itself failed: {type(error).__name__}: {error}"
        yield failure(check, what, "This is a bug in hvdrecover; report it with this line.")
