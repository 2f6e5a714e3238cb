"""The command that starts processes on other hosts instead of ssh: ``HVDRECOVER_REMOTE_SHELL``.

The first word of the setting is a program, or the name of an entry point in the group
``hvdrecover.remote_shells``. The entry point names a module, which runs as ``python -m MODULE``. The other
words of the setting come next, then the arguments that ``horovodrun`` gives ssh.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from importlib import metadata

from hvdrecover.errors import ConfigError

GROUP = "hvdrecover.remote_shells"
_SETTING = "HVDRECOVER_REMOTE_SHELL"


def command(setting: str, path: str) -> list[str]:
    """Return the words of the command.

    Args:
        setting: value of ``HVDRECOVER_REMOTE_SHELL``, split like words in a shell, but not expanded.
        path: search path for programs.

    Raises:
        ConfigError: the first word is unknown, or its entry point is broken.
    """
    try:
        words = shlex.split(setting)
    except ValueError as error:
        raise ConfigError(_SETTING, f"cannot split '{setting}' into words: {error}") from error
    if not words:
        raise ConfigError(_SETTING, "is blank; unset it to use ssh")
    name = words[0]
    installed = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name in installed:
        return [sys.executable, "-m", _module(installed[name]), *words[1:]]
    if shutil.which(name, path=path) is None:
        names = ", ".join(sorted(installed)) or "none"
        problem = f"'{name}' is neither a program nor an installed remote shell (installed: {names})"
        raise ConfigError(_SETTING, problem)
    return words


def _module(point: metadata.EntryPoint) -> str:
    """Return the module that an entry point names. This does not run it: it may act on import."""
    package = f" of package {point.dist.name}" if point.dist else ""
    broken = f"entry point '{point.name} = {point.value}'{package}"
    if point.attr:
        raise ConfigError(_SETTING, f"{broken} must name a module, without ':{point.attr}'")
    try:
        found = importlib.util.find_spec(point.module)
    except ImportError as error:  # from a package that contains the module
        raise ConfigError(_SETTING, f"{broken} cannot be imported: {error}") from error
    if found is None:
        raise ConfigError(_SETTING, f"{broken} names a module that does not exist")
    return point.module
