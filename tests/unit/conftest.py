"""The examples of hypothesis: the same everywhere, without time limits that a busy machine would break."""

from hypothesis import settings

settings.register_profile("hvdrecover", derandomize=True, deadline=None, database=None)
settings.load_profile("hvdrecover")
