"""Run by Python as each process of a test's job starts: leaves out what small networks never use.

Of what importing torch takes, two thirds are its compiler, its exporter and its kernels for shapes only. Of
TensorFlow's, a third is what Keras imports if it happens to be installed. Standbys are processes, too.

Of the rest, a quarter is looking for garbage among modules, where there is none. At the end of a process,
taking modules apart is a third of all that it has computed.
"""

import atexit
import gc
import os
import sys
import types

KERNELS = "torch._meta_registrations"


class Finder:
    """Finds our module in the place of torch's kernels."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == KERNELS:
            from importlib.util import spec_from_file_location  # which most processes have no use for

            return spec_from_file_location(name, __file__.replace("sitecustomize.py", "kernels.py"))
        return None


gc.set_threshold(300_000, 10, 10)
atexit.register(gc.freeze)
sys.meta_path.insert(0, Finder)
for module in {"matplotlib", "sklearn"} - {os.environ.get("LIGHT_KEEPS")}:  # as if they were not installed
    sys.modules[module] = None
for module in ("torch._dynamo", "torch.export", "tensorboard.compat.notf"):
    sys.modules[module] = types.ModuleType(module)
# By the last, TensorBoard's writer for torch does without TensorFlow.
# All that an optimizer asks of the compiler is to keep away from its methods.
sys.modules["torch._dynamo"].disable = lambda function, *arguments, **keywords: function
sys.modules["torch._dynamo"].graph_break = lambda: None
