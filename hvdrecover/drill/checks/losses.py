"""Is the loss at the end no worse than that of an undisturbed run, where weights can't be compared any more?

With another number of ranks, batches and sums of gradients are others, and no bit stays what it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.testimony import Testimony

_LAST = 0.2  # the part of a run's commits, from its end, whose losses are compared
_NEAR = 0.1  # of the undisturbed loss
_ERRORS = 3.0  # standard errors
_FEWEST = 2  # losses that have a spread


def compare(clean: Testimony, drilled: Testimony) -> list[Finding]:
    """The mean of the last losses is at most a tenth more, or three standard errors if that is more.

    Losses of the undisturbed run alone say how far they scatter, ``s * sqrt(1 / n1 + 1 / n2)``: those of a
    run that diverges scatter so widely that any mean would be within their own errors. Less is allowed, as
    fewer ranks take more steps of smaller batches.

    Args:
        clean: the undisturbed run, which came to its end.
        drilled: a run with faults that came to its end.
    """
    expected, found = _last(clean), _last(drilled)
    if clean.virtual or _size(clean) == _size(drilled) or min(len(expected), len(found)) < _FEWEST:
        return []
    means = statistics.fmean(expected), statistics.fmean(found)
    error = statistics.stdev(expected) * math.sqrt(1 / len(expected) + 1 / len(found))
    allowed = means[0] + max(_NEAR * abs(means[0]), _ERRORS * error)
    if math.isfinite(means[1]) and means[1] <= allowed:
        return []
    message = (
        f"{_size(drilled)} of {_size(clean)} ranks came to the end, with a mean loss of {means[1]:.4g} in "
        f"the last {_LAST:.0%} of commits; it was {means[0]:.4g} undisturbed, and may be {allowed:.4g} "
        "at most"
    )
    return [Finding(rules.LOSS, message)]


def unproven(clean: Testimony, drilled: Testimony, *, ended: bool) -> str:
    """Return why the end of a run is compared with nothing; empty if it is.

    Args:
        clean: the undisturbed run.
        drilled: a run with faults.
        ended: whether both came to their end.
    """
    if clean.virtual or not drilled.commits or _size(clean) == _size(drilled):
        return ""
    if not ended:
        why = "a drill that ends at a time can't compare losses; leave out --duration"
    elif min(len(_last(clean)), len(_last(drilled))) < _FEWEST:
        why = "no losses were told; call state.log_metrics(loss=loss) after each step"
    else:
        return ""
    return f"the end of a run to which {_size(drilled)} of {_size(clean)} ranks came: {why}"


def _size(told: Testimony) -> int:
    """The number of ranks at the end."""
    return told.commits[-1].size


def _last(told: Testimony) -> Sequence[float]:
    """Losses of the last commits, on all ranks."""
    first = (1 - _LAST) * told.newest
    kept = told.kept(told.commits)
    return [line.loss for line in kept if line.made > first and line.loss is not None]
