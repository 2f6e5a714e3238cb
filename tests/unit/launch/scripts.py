"""Scripts that join a guardian as those of users do, without a framework."""

from __future__ import annotations

from pathlib import Path

# What a script imports in place of hvdrecover.torch.
ADAPTER = """
from types import SimpleNamespace
from hvdrecover.state import horovod as joining
functions = "broadcast_parameters broadcast_optimizer_state broadcast_object "
functions += "add_process_set remove_process_set"
native = SimpleNamespace(horovod_init=lambda *_: 1, horovod_rank=lambda: 0)
library = SimpleNamespace(mpi_lib=SimpleNamespace(), _basics=SimpleNamespace(MPI_LIB_CTYPES=native))
joining.join(
    SimpleNamespace(is_initialized=lambda: True, mpi_ops=library, **dict.fromkeys(functions.split(), print))
)
"""


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    """A script, with the module ``adapter`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter.py").write_text(ADAPTER)
    script = folder / name
    script.write_text(text)
    return script
