"""The random streams of a job.

With ``"reseed"``, each rank seeds its generators at every commit with numbers derived from the run's seed,
the stream's number and the rank. So a commit stores two numbers, a rank that lost its memory continues with
the very stream it had, and a rank that joins has one of its own. A stream's number rises at every commit, but
for one at which nothing has changed since the last: a script that commits before it trains commits once more
when it is resumed, and must continue with the same stream. With ``"store"``, the user's own streams continue
through commits; each rank's states are part of a commit, and a rank whose states are not is seeded as above.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Literal

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.errors import ConfigError, CorruptCheckpointError

Randomness = Literal["reseed", "store"]


def stream(run_seed: int, number: int | str, rank: int) -> Callable[[str], int]:
    """The seeds of one rank's generators after one commit.

    Returns:
        A function from a generator's name to a number below 2**63; other processes can be sent it.
    """
    return functools.partial(_derive, f"{run_seed}/{number}/{rank}")


def _derive(stream: str, generator: str) -> int:
    digest = hashlib.blake2b(f"{stream}/{generator}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generators:
    """The global generators of one rank, and the run's seed.

    Args:
        framework: knows the generators.
        mode: see the module.

    Raises:
        ConfigError: there is no such mode.

    Attributes:
        seed: the run's seed.
        number: the number of the present stream.
        stored: whether each rank's states are part of a commit.
    """

    def __init__(self, framework: Framework, mode: Randomness) -> None:
        if mode not in ("reseed", "store"):
            raise ConfigError(
                "rng", f"'{mode}' is not a way to treat random generators; use 'reseed' or 'store'"
            )
        self._framework = framework
        self.stored = mode == "store"
        self.seed = 0
        self.number = 0

    def draw_seed(self) -> None:
        """Take the run's seed from the global generator of this rank."""
        self.seed = self._framework.draw_seed()

    def states(self) -> Json:
        """The states of this rank's generators."""
        return values.encode(self._framework.generators(), "rng")

    def put(self, states: Json) -> None:
        """Set what `states` gave."""
        self._framework.set_generators(values.decode(states))

    def capture(self, states: Mapping[str, Json]) -> dict[str, Json]:
        """Return what a commit keeps: the run's seed, and the states by rank."""
        return {"seed": self.seed, "stream": self.number, "states": states}

    def committed(self, kept: Mapping[str, Json], commit: int, rank: int) -> None:
        """After a commit: begin its stream."""
        if not self.stored:
            self.resume(kept, commit, rank)

    def resume(self, kept: Mapping[str, Json], commit: int, rank: int) -> None:
        """Go to the stream that began at a commit.

        Raises:
            CorruptCheckpointError: what the commit keeps is not what a generator can be set to.
        """
        try:
            self.seed, self.number = int(kept["seed"]), int(kept.get("stream", commit))
            state = kept["states"].get(str(rank)) if self.stored else None
            if state is None:
                self._framework.seed(stream(self.seed, self.number, rank))
            else:
                self.put(state)
        except Exception as error:  # each framework has its own
            raise CorruptCheckpointError(
                f"commit {commit}", f"its random streams can't be set: {error!r}"
            ) from error
