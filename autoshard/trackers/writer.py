"""`RunWriter`: the protocol of objects that write the numbers of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class RunWriter(Protocol):
    """Writes the numbers of steps. Only the first rank's writers are called, so a writer opens files at the first step.

    Example:
        >>> class Losses:
        ...     def log(self, step_number, values):
        ...         print(step_number, values["loss"])
        ...
        ...     def close(self):
        ...         print("done")
        >>> isinstance(Losses(), RunWriter)
        True
    """

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step.

        Args:
            step_number: number of steps done, this step among them.
            values: numbers by name, as listed in docs/how_to/watch_a_run.md. A number that is unknown is left out.
        """
        ...

    def close(self) -> None:
        """Write everything that is left, and close files. No call follows."""
        ...
