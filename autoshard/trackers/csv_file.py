"""`CSV` writes the numbers of steps into a file of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from autoshard.errors import NotAvailableError
from autoshard.ir.files import write_text

_STEP = "step"


class CSV:
    """Writes one line per step under a header of names. The field of a number that a step lacks is empty.

    An existing file is continued. Lines of the first step that is logged now, and of later steps, are replaced.

    Args:
        path: the file. Its folder is made if needed.

    Raises:
        NotAvailableError: at the first step, if the file exists and has no column of steps.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._columns: list[str] = [_STEP]

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        """Write a line; see `RunWriter.log`."""
        if self._file is None or not values.keys() <= set(self._columns):
            self._open(step_number, values)
        assert self._file is not None, "it was opened"
        row = {_STEP: step_number, **values}
        csv.writer(self._file, lineterminator="\n").writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step_number: int, values: Mapping[str, float]) -> None:
        """Open the file to append lines from step `step_number` on, with a column for each of `values`.

        The file is written anew: its lines of earlier steps stay, and later lines are dropped.
        """
        self.close()
        rows = self._rows()
        known = list(rows[0]) if rows else [_STEP]
        self._columns = list(dict.fromkeys([*known, *self._columns, *values]))
        kept = [row for row in rows if int(row[_STEP]) < step_number]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        lines = csv.DictWriter(text, self._columns, extrasaction="ignore", lineterminator="\n")
        lines.writeheader()
        lines.writerows(kept)
        target = self.path.resolve()
        beside = target.with_name(f"{target.name}.new")
        write_text(beside, text.getvalue())
        beside.replace(target)  # a full disk or a crash leaves the old lines
        self._file = self.path.open("a", newline="", encoding="utf-8")

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                lines = csv.DictReader(file)
                rows, names = list(lines), lines.fieldnames
        except (UnicodeDecodeError, csv.Error):
            rows, names = [], ()
        has_steps = names is None or _STEP in names  # an empty file has no names
        if not (has_steps and all((row.get(_STEP) or "").isdecimal() for row in rows)):
            raise NotAvailableError(
                f"CSV({str(self.path)!r}): the file is there, but was not written by CSV, because it has no whole "
                f"numbers in a column {_STEP!r}. Pass another path."
            )
        return rows
