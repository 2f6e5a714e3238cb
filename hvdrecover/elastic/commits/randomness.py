"""The random streams of a job.

With ``"reseed"``, each rank seeds its generators at every commit with numbers derived from the run's seed,
the stream's number and the rank. So a commit stores two numbers, a rank that lost its memory continues with
the very stream it had, and a rank that joins has one of its own. A stream's number rises at every commit, but
for one at which nothing has changed since the last: a script that commits before it trains commits once more
when it is resumed, and must continue with the same stream. With ``"store"``, the user's own streams continue
through commits; each rank's states are part of a commit, and a rank whose states are not is seeded as above.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.interfaces import Framework, World
from hvdrecover.errors import ConfigError, CorruptCheckpointError

Randomness = Literal["reseed", "store"]


def stream(run_seed: int, number: int, rank: int) -> Callable[[str], int]:
    """The seeds of one rank's generators after one commit.

    Returns:
        A function from a generator's name to a number below 2**63.
    """

    def derive(generator: str) -> int:
        key = f"{run_seed}/{number}/{rank}/{generator}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1

    return derive


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
    """

    def __init__(self, framework: Framework, mode: Randomness) -> None:
        if mode not in ("reseed", "store"):
            raise ConfigError(
                "rng", f"'{mode}' is not a way to treat random generators; use 'reseed' or 'store'"
            )
        self._framework = framework
        self._store = mode == "store"
        self._gathered: dict[str, Json] = {}
        self.seed = 0
        self.number = 0

    def draw_seed(self) -> None:
        """Take the run's seed from the global generator of this rank."""
        self.seed = self._framework.draw_seed()

    def gather(self, world: World) -> None:
        """Before a commit that may become durable: learn the states of all ranks."""
        if self._store:
            states = gather_json(world, self._states(), "hvdrecover.generators")
            self._gathered = {str(rank): state for rank, state in enumerate(states)}

    def capture(self, rank: int) -> dict[str, Json]:
        """Return what a commit keeps: the run's seed, and the states by rank as far as they are known."""
        states = {**self._gathered, str(rank): self._states()} if self._store else {}
        self._gathered = {}
        return {"seed": self.seed, "stream": self.number, "states": states}

    def kept(self, sent: Mapping[str, Json], rank: int) -> dict[str, Json]:
        """A commit that another rank has sent, and that this one held itself: it keeps its own streams."""
        states = {**sent["states"], str(rank): self._states()} if self._store else {}
        return {**sent, "states": states}

    def committed(self, kept: Mapping[str, Json], commit: int, rank: int) -> None:
        """After a commit: begin its stream."""
        if not self._store:
            self.resume(kept, commit, rank)

    def resume(self, kept: Mapping[str, Json], commit: int, rank: int) -> None:
        """Go to the stream that began at a commit.

        Raises:
            CorruptCheckpointError: what the commit keeps is not what a generator can be set to.
        """
        try:
            self.seed, self.number = int(kept["seed"]), int(kept.get("stream", commit))
            state = kept["states"].get(str(rank)) if self._store else None
            if state is None:
                self._framework.seed(stream(self.seed, self.number, rank))
            else:
                self._framework.set_generators(values.decode(state))
        except Exception as error:  # each framework has its own
            raise CorruptCheckpointError(
                f"commit {commit}", f"its random streams can't be set: {error!r}"
            ) from error

    def _states(self) -> Json:
        return values.encode(self._framework.generators(), "rng")
