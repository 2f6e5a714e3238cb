"""Having Horovod's ssh connections notice when a host is gone.

Horovod calls ``ssh`` without a way to give it options, and a connection to a host that is cut off would stay
open for hours. So an ``ssh`` of ours comes first on its path.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdrecover.config import Config


@contextmanager
def kept_alive(config: Config) -> Iterator[str]:
    """A search path on which ``ssh`` has the options of `Config.ssh_options`, if there is an ssh."""
    path = os.pathsep.join([config.programs, config.path])
    program = shutil.which("ssh", path=path)
    if program is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hvdrecover-") as folder:
        script = Path(folder, "ssh")
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(program)} {config.ssh_options} "$@"\n')
        script.chmod(0o755)
        yield os.pathsep.join([folder, path])
