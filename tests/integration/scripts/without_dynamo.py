"""Imported before an optimizer is made, keeps torch from importing its compiler, half of a worker's start.

An optimizer asks the compiler only to keep away from its methods. For jobs that are about processes and not
about torch. A guardian passes the stand-in over: it has no ``__spec__``, so a standby does not import it.
"""

import sys
import types

import torch

assert "torch._dynamo" not in sys.modules, "it has been imported already"
dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
dynamo.disable = lambda function, *arguments, **keywords: function
dynamo.graph_break = lambda: None
torch._dynamo = dynamo
