"""The ``ssh`` that ``horovodrun`` finds first on its search path.

Horovod gives ssh no options, so a connection to a host that was cut off would stay open for hours. Our
``ssh`` adds keepalive options and keeps the environment off command lines (``launch/hidden_environment.py``).
If ``HVDRECOVER_REMOTE_SHELL`` is set, our ``ssh`` runs that command instead. The command must pass the
environment itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from hvdrecover.config import Config
from hvdrecover.errors import LaunchError
from hvdrecover.launch import hidden_environment, remote_shells

_OTHER = """\
#!/bin/sh
exec {shell} "$@"
"""
_SCRIPT = """\
#!/bin/sh
case "$*" in
*" {mark}=${mark} "*) exec {python} -m {environment} {ssh} {options} "$@" ;;
esac
exec {ssh} {options} "$@"
"""


def kept_alive(config: Config, folder: Path) -> str:
    """Return a search path on which ``ssh`` adds `Config.ssh_options`, or runs `Config.remote_shell`.

    If the host has no ssh and the setting is unset, the search path stays as it is.

    Args:
        config: the process's settings.
        folder: the run's folder. Our ssh stays there, because this process may be killed at any time.

    Raises:
        ConfigError: `Config.remote_shell` is unknown or broken.
        LaunchError: the folder cannot be written to.
    """
    path = os.pathsep.join([config.programs, config.path])
    program = shutil.which("ssh", path=path)
    if config.remote_shell is not None:
        shell = remote_shells.command(config.remote_shell, path)
        text = _OTHER.format(shell=shlex.join(shell))
    elif program is not None:
        text = _SCRIPT.format(
            mark=hidden_environment.MARK,
            python=shlex.quote(sys.executable),
            environment=hidden_environment.__name__,
            ssh=shlex.quote(program),
            options=config.ssh_options,
        )
    else:
        return path
    script = folder.absolute() / "bin" / "ssh"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        fresh = script.with_name(f"ssh.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.replace(script)
    except OSError as error:
        remedy = "name another folder for the run's files: HVDRECOVER_EVENTS=FOLDER"
        raise LaunchError(str(script), f"can't be written: {error.strerror}; {remedy}") from error
    return os.pathsep.join([os.fspath(script.parent), path])
