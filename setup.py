"""The files of C, which setup.cfg can't name. Without a C compiler the package is installed all the same."""

from setuptools import Extension, setup


def compiled(name: str) -> Extension:
    """An extension module of one file, for any later Python as well."""
    file = f"{name.replace('.', '/')}.c"
    return Extension(name, [file], extra_compile_args=["-O3"], py_limited_api=True, optional=True)


NAMES = ("hvdrecover.checkpoint._memcpy", "hvdrecover.torch._finite")
setup(ext_modules=[compiled(name) for name in NAMES])
