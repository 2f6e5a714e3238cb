"""The examples of hypothesis: the same everywhere, without time limits that a busy machine would break."""

from hypothesis import settings


def use_the_same_examples_everywhere() -> None:
    settings.register_profile("hvdrecover", derandomize=True, deadline=None, database=None)
    settings.load_profile("hvdrecover")
