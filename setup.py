"""What setup.cfg can't say: one file of C. Without a C compiler the package is installed all the same."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "hvdrecover.checkpoint._streaming",
            ["hvdrecover/checkpoint/_streaming.c"],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
