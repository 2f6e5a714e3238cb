"""The ``ssh`` that ``horovodrun`` finds first on its search path."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from hvdrecover import config
from hvdrecover.config import Config
from hvdrecover.errors import ConfigError

# For `HVDRECOVER_REMOTE_SHELL`, a command that must pass the environment itself.
_OTHER = """\
#!/bin/sh
exec {shell} "$@"
"""
# Horovod gives ssh no options, so a connection to a host that was cut off would stay open for hours.
# Every user of a host can read command lines, and Horovod writes the whole environment into those that start
# workers, with storage credentials and the supervisor's token. Workers on this host inherit it anyway, and
# workers on other hosts read it from ssh's input.
_SCRIPT = """\
#!/bin/sh
case "$*" in
*" {mark}=${mark} "*) exec {python} -m {module} {ssh} {options} "$@" ;;
esac
exec {ssh} {options} "$@"
"""
GROUP = "hvdrecover.remote_shells"
_SETTING = "HVDRECOVER_REMOTE_SHELL"
MARK = "HVDRECOVER_START"  # in the commands that start workers, to distinguish them from others
# Horovod's options and NCCL's are changed on the way, so they have to stay; a shell keeps some for itself.
_KEPT = re.compile(
    rf"{MARK}|HOROVOD_.*|NCCL_.*|PYTHONUNBUFFERED|_|PWD|SHLVL|UID|EUID|PPID|BASHOPTS|SHELLOPTS|BASH_VERSINFO"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that Horovod does not send either: they have no meaning on another host.
_NOT_HANDED_ON = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")


def kept_alive(config: Config, folder: Path) -> str:
    """Return a search path on which ``ssh`` adds `Config.ssh_options`, or runs `Config.remote_shell`."""
    path = os.pathsep.join([config.programs, config.path])
    program = shutil.which("ssh", path=path)
    if config.remote_shell is not None:
        shell = remote_shell(config.remote_shell, path)
        text = _OTHER.format(shell=shlex.join(shell))
    elif program is not None:
        python, ssh = shlex.quote(sys.executable), shlex.quote(program)
        text = _SCRIPT.format(mark=MARK, python=python, module=__name__, ssh=ssh, options=config.ssh_options)
    else:
        return path
    # Not in a temporary folder: this process may be killed at any time.
    script = folder.absolute() / "bin" / "ssh"
    script.parent.mkdir(parents=True, exist_ok=True)  # no deadline: at the start of the job
    fresh = script.with_name(f"ssh.{os.getpid()}")
    fresh.write_text(text)  # no deadline: at the start of the job
    fresh.chmod(0o755)
    fresh.replace(script)  # no deadline: at the start of the job
    return os.pathsep.join([os.fspath(script.parent), path])


def remote_shell(setting: str, path: str) -> list[str]:
    """Return the command of ``HVDRECOVER_REMOTE_SHELL``, split like words in a shell, but not expanded."""
    try:
        words = shlex.split(setting)
    except ValueError as error:
        raise ConfigError(_SETTING, f"cannot split '{setting}' into words: {error}") from error
    if not words:
        raise ConfigError(_SETTING, "is blank; unset it to use ssh")
    name = words[0]
    installed = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name in installed:
        return [sys.executable, "-m", installed[name].module, *words[1:]]
    if shutil.which(name, path=path) is None:
        names = ", ".join(sorted(installed)) or "none"
        problem = f"'{name}' is neither a program nor an installed remote shell (installed: {names})"
        raise ConfigError(_SETTING, problem)
    return words


def hidden(names: Iterable[str]) -> list[str]:
    return [name for name in names if _NAME.fullmatch(name) and not _KEPT.fullmatch(name)]


def script(command: str, environ: Mapping[str, str]) -> str:
    """Return the input of the remote shell: it sets the hidden variables, and executes the command."""
    names = [name for name in hidden(environ) if not _NOT_HANDED_ON.match(name)]
    lines = [f"export {name}={shlex.quote(environ[name])}" for name in sorted(names)]
    return "\n".join([*lines, f"exec /bin/sh -c {shlex.quote(command)} </dev/null", ""])


def main(arguments: Sequence[str]) -> None:
    """Execute ssh (the first arguments) with the environment and the command (the last one) as its input."""
    *words, command = arguments
    given = os.memfd_create("hvdrecover-environment")
    with os.fdopen(os.dup(given), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(script(command, config.environment()))  # no deadline: a file in memory
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.execv(words[0], [*words, "exec /bin/sh -s"])


if __name__ == "__main__":
    main(sys.argv[1:])
