"""Having Horovod's ssh connections notice when a host is gone, and keep the environment to themselves.

Horovod calls ``ssh`` without a way to give it options, and a connection to a host that is cut off would stay
open for hours. So an ``ssh`` of ours comes first on its path. It also hands over what is not to stand on
command lines (``launch/hidden_environment.py``). Or it is another command altogether, to which that is left.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from hvdrecover.config import Config
from hvdrecover.errors import LaunchError
from hvdrecover.launch import hidden_environment

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
    """A search path on which ``ssh`` has the options of `Config.ssh_options`, or is `Config.remote_shell`.

    Without either, it is the path as it was.

    Args:
        config: the process's settings.
        folder: the run's, where that ssh is put; it stays there, as this process may be killed at any time.

    Raises:
        LaunchError: the folder can't be written to.
    """
    path = os.pathsep.join([config.programs, config.path])
    program = shutil.which("ssh", path=path)
    if config.remote_shell is not None:
        text = _OTHER.format(shell=config.remote_shell)
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
