"""Edits of Horovod's TensorFlow operations: they are run each time, and not taken for constants.

If all inputs of an operation are constants, TensorFlow runs it once, while it makes a graph, and keeps the
result, unless the operation is declared stateful. Horovod does not declare its collectives so. A new process,
which makes its graphs again, then waits for ranks that have theirs already. And ``hvd.join()``, which has no
inputs, waits in its first call only.

Allreduces stay as they are. Horovod's own tape puts each into a condition of its own. TensorFlow would run
such conditions one after the other, so that Horovod could fuse nothing.
"""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit

_COLLECTIVES = (
    "Allgather",
    "GroupedAllgather",
    "Broadcast",
    "Reducescatter",
    "GroupedReducescatter",
    "Alltoall",
)

TENSORFLOW_OPS: tuple[Edit, ...] = (
    *(
        # TensorFlow runs a collective of constants once, and a new process waits for it in vain.
        Edit(
            f"stateful-{name}",
            "horovod/tensorflow/mpi_ops.cc",
            f'REGISTER_OP("Horovod{name}")\n',
            f'REGISTER_OP("Horovod{name}")\n    .SetIsStateful()\n',
        )
        for name in (*_COLLECTIVES, "Join")
    ),
    # TensorFlow runs stateful operations one after the other, and Horovod could fuse none of them.
    Edit(
        "stateful-in-any-order",
        "horovod/tensorflow/mpi_ops.py",
        "    check_installed_version('tensorflow', tf.__version__)\n\n",
        (
            "    check_installed_version('tensorflow', tf.__version__)\n"
            "\n"
            "# As TensorFlow's own collectives: in any order, and not if nobody uses the result.\n"
            "auto_control_deps.ASYNC_STATEFUL_OPS |= {\n"
            f"    'Horovod' + name for name in {_COLLECTIVES!r}\n"
            "}\n"
            "\n"
        ),
    ),
    Edit(
        "stateful-in-any-order-import",
        "horovod/tensorflow/mpi_ops.py",
        "from tensorflow.python.framework import load_library\n",
        "from tensorflow.python.framework import auto_control_deps, load_library\n",
    ),
)
