"""Comparison of the tensors in a commit with those of a component."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover.elastic.interfaces import Framework


def fit_tensors(
    framework: Framework,
    name: str,
    what: str,
    mine: Mapping[str, Any],
    stored: Mapping[str, Any],
    fits_anyway: Callable[[str], bool] = lambda key: False,
) -> tuple[dict[str, Any], list[str]]:
    """Compare what a commit holds of a component with what the component holds, name by name.

    Args:
        framework: whose tensors they are.
        name: the component's attribute name.
        what: what it is called in a message, such as ``model``.
        mine: what it holds.
        stored: what the commit holds.
        fits_anyway: tells names whose values may be of different kinds.

    Returns:
        The part of ``stored`` that fits, and a line for each difference.
    """

    def kind(value: Any, key: str) -> str:
        return str(framework.spec(value, key)) if framework.is_tensor(value) else f"a {type(value).__name__}"

    differences = [
        f"{name}.{key}: in the commit, but not in the {what}" for key in stored.keys() - mine.keys()
    ]
    differences += [
        f"{name}.{key}: in the {what}, but not in the commit" for key in mine.keys() - stored.keys()
    ]
    fitting = {}
    for key in stored.keys() & mine.keys():
        theirs, ours = kind(stored[key], key), kind(mine[key], key)
        if theirs == ours or fits_anyway(key):
            fitting[key] = stored[key]
        else:
            differences.append(f"{name}.{key}: {theirs} in the commit, {ours} in the {what}")
    return fitting, differences
