"""`TensorBoard` writes the numbers of steps for TensorBoard, by the package "tensorboard"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.errors import NotAvailableError


class TensorBoard:
    """Writes a scalar for each number. Look at them with `tensorboard --logdir FOLDER`.

    Args:
        folder: the folder of the run, made if needed. Each program that writes adds a file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file: Any = None

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        """Write the numbers as one event; see `RunWriter.log`."""
        event_of, file = self._opened()
        file.add_summary(event_of(values), step_number)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        if self._file is not None:
            self._file[1].close()
            self._file = None

    def _opened(self) -> Any:
        """Return a function that makes an event of numbers, and the file; open the file at the first call."""
        if self._file is None:
            try:
                from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found]
                from torch.utils.tensorboard import FileWriter
            except ImportError as error:
                raise NotAvailableError(
                    f"TensorBoard({str(self.folder)!r}) needs the package 'tensorboard': pip install tensorboard."
                ) from error

            def event_of(values: Mapping[str, float]) -> Any:
                return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])

            self._file = event_of, FileWriter(str(self.folder))
        return self._file
