"""`TensorBoard` writes the numbers of steps for TensorBoard, by the package "tensorboard".

The package writes from a thread of its own, which takes Python's lock from the step. So steps are collected, and are
written every ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.errors import NotAvailableError

_PERIOD_S = 10.0
"""Seconds between two writes."""


class TensorBoard:
    """Writes a scalar for each number. `tensorboard --logdir FOLDER` shows the scalars.

    Args:
        folder: the folder of the run, made if needed. Each program that writes adds a file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file: Any = None
        self._waiting: list[tuple[int, dict[str, float], float]] = []
        self._written_s = -_PERIOD_S

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        """Collect the numbers; see `RunWriter.log`.

        The collected numbers are written if ten seconds have passed since the last write, and by `close`.
        """
        self._waiting.append((step_number, dict(values), time.time()))
        if time.monotonic() - self._written_s >= _PERIOD_S:
            self._write()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._waiting:
            self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        """Write each waiting step as one event."""
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found]
            from torch.utils.tensorboard import FileWriter
        except ImportError as error:
            raise NotAvailableError(
                f"TensorBoard({str(self.folder)!r}) needs the package 'tensorboard': pip install tensorboard."
            ) from error
        if self._file is None:
            self._file = FileWriter(str(self.folder))
        for step_number, values, wall_time_s in self._waiting:
            scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._file.add_summary(Summary(value=scalars), step_number, wall_time_s)
        self._file.flush()
        self._waiting.clear()
        self._written_s = time.monotonic()
