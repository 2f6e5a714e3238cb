"""The C files, which pyproject.toml cannot name.

Without a C compiler the package is installed without them, and works. Release builds set
HVDRECOVER_REQUIRE_C=1: then a failure to compile is an error, so that no published wheel lacks them.
"""

import os

from setuptools import Extension, setup

REQUIRED = os.environ.get("HVDRECOVER_REQUIRE_C") == "1"


def compiled(name: str) -> Extension:
    """Return an extension module of one file that any later Python loads, too."""
    return Extension(
        name,
        [f"{name.replace('.', '/')}.c"],
        extra_compile_args=["-O3"],
        # The files call nothing of the C library, so the linker would leave it out. Then auditwheel cannot
        # find out the C library that the wheel needs.
        extra_link_args=["-Wl,--no-as-needed", "-lc"],
        py_limited_api=True,
        optional=not REQUIRED,
    )


NAMES = ("hvdrecover.checkpoint._memcpy", "hvdrecover.torch._finite")
setup(ext_modules=[compiled(name) for name in NAMES])
