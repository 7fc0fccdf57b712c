"""`WandB` writes the numbers of steps to Weights & Biases, by the package "wandb"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.errors import NotAvailableError


class WandB:
    """Logs the numbers of each step to a run of Weights & Biases, which begins at the first step.

    Args:
        settings: keyword arguments of `wandb.init`: `project="gpt"`, `mode="offline"`, `config={...}`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._run: Any = None

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        """Log the numbers; see `RunWriter.log`."""
        if self._run is None:
            self._run = self._begin()
        self._run.log(dict(values), step=step_number)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _begin(self) -> Any:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise NotAvailableError("WandB() needs the package 'wandb': pip install wandb.") from error
        return wandb.init(**self.settings)
