"""The guard: are the ranks in step? Here are the user's settings of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hvdrecover.data.version import DataVersion
from hvdrecover.errors import ConfigError

Divergence = Literal["raise", "warn", "heal"]
Numerics = Literal["raise", "skip", "rollback"]
DataChanged = Literal["raise", "warn", "restart_epoch"]

_CHOICES = {
    "on_divergence": get_args(Divergence),
    "numerics": (*get_args(Numerics), None),
    "data_changed": get_args(DataChanged),
}


@dataclass(frozen=True)
class Guard:
    """The comparisons of the ranks, and the reaction to a difference. All ranks must have the same guard.

    Args:
        parameters_every_commits: compare the ranks' parameters and optimizer slots at every so many commits;
            None never does.
        on_divergence: when they differ: ``"raise"`` a `DivergedError` on all ranks, ``"warn"`` and continue,
            or ``"heal"``: the ranks in the minority take the tensors of the majority.
        numerics: when gradients or parameters are not finite: ``"raise"`` a `NumericsError` on all ranks,
            ``"skip"`` the step on all ranks, or ``"rollback"`` to the last commit and continue without that
            batch. None does not look.
        numerics_budget: so many bad steps within the last 1,000 steps are skipped or rolled back; one more
            raises.
        data: version of the training data. Each durable commit holds it.
        data_changed: when a job resumes from a durable commit of other data: ``"raise"`` a
            `DataChangedError`, ``"warn"`` to continue at the same position of the new data, or
            ``"restart_epoch"`` to begin the epoch again with the weights of the commit.

    Raises:
        ConfigError: a setting has an invalid value.

    Examples:
        >>> data = recover.DataVersion("digits-v1")
        >>> guard = recover.Guard(numerics="skip", data=data)  # for the state: TorchState(guard=guard)
    """

    parameters_every_commits: int | None = 10
    on_divergence: Divergence = "raise"
    numerics: Numerics | None = "raise"
    numerics_budget: int = 10
    data: DataVersion | None = field(default=None, repr=False)  # left out, as it may be long
    data_changed: DataChanged = "raise"

    def __post_init__(self) -> None:
        every = self.parameters_every_commits
        if every is not None and not _is_count(every, 1):
            raise ConfigError("parameters_every_commits", f"must be an integer ≥ 1 or None, got {every!r}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(name, f"{value!r} is not one of {', '.join(map(repr, choices))}")
        if not _is_count(self.numerics_budget, 0):
            raise ConfigError("numerics_budget", f"must be an integer ≥ 0, got {self.numerics_budget!r}")
        if self.data is not None and not isinstance(self.data, DataVersion):
            kind = type(self.data).__name__
            raise ConfigError(
                "data",
                f"must be a DataVersion, got a {kind}; pass recover.DataVersion.of_files(path), or "
                "recover.DataVersion(text) with a text that you change with the data",
            )


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
