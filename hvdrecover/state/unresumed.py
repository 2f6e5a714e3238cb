"""Warnings of values that a recovery or a restart does not restore; each is given once, in advance."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hvdrecover.checkpoint.values import Json
from hvdrecover.state.hooks import Agreement, Context, Hook


class Unresumed(Hook):
    """Warns of components whose tensors commits lack, and of settings that a resumed run ignores.

    Each commit holds the settings that the run was started with. The script's settings are compared with
    them, and not with the optimizer's present ones, which training changes.
    """

    key = "settings"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._of_script = _settings(context)
        self._of_run: dict[str, Json] = dict(self._of_script)
        self._said: set[str] = set()

    def agreed(self, agreement: Agreement) -> None:
        """Warn of tensors that commits lack; let all ranks count backward passes from 0 again."""
        for name, component in self._context.contents.components().items():
            self._context.framework.forget_passes(component)
            if name not in self._said and (lost := self._context.framework.unkept(component)):
                self._said.add(name)
                kind = type(component).__name__
                message = (
                    f"state.{name}: commits do not hold {', '.join(lost)}, as the state_dict() of this {kind}"
                    " leaves that out. After a recovery, it has the values of a new object or of an "
                    "interrupted step. Make it persistent (with torchmetrics: metric.persistent(True)), or "
                    "keep it in the state, as a tensor or a plain value"
                )
                self._context.announce("not_kept", message, level=logging.WARNING, attribute=name)

    def capture(self) -> Json:
        return dict(self._of_run)

    def load(self, value: Json | None) -> None:
        """Take the settings from a commit; commits of earlier releases have none."""
        self._of_run = dict(value) if isinstance(value, dict) else dict(self._of_script)

    def resumed(self, value: Json | None) -> Json | None:
        of_run: Mapping[str, Json] = value if isinstance(value, dict) else {}
        lines = [
            f"{name} to {mine}, but the run was started with {of_run[name]}"
            for name, mine in self._of_script.items()
            if of_run.get(name, mine) != mine
        ]
        if lines:
            message = (
                f"the script sets {'; '.join(lines)}. The commit's values are used. To change a value in a "
                "resumed run, set it inside the training function"
            )
            self._context.announce("settings_ignored", message, level=logging.WARNING, differences=lines)
        return value


def _settings(context: Context) -> dict[str, str]:
    """Return the settings of components that a commit brings along, such as ``optimizer.lr``, as text.

    The values of all groups of an optimizer are joined into one text.
    """
    found: dict[str, list[str]] = {}
    for name, component in context.contents.components().items():
        for entry in context.framework.describe(component):
            if entry.stored:
                found.setdefault(f"{name}.{entry.name.rpartition('.')[2]}", []).append(entry.value)
    return {name: ", ".join(values if len(set(values)) > 1 else values[:1]) for name, values in found.items()}
