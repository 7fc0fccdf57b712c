"""`Progress` shows the last step on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from autoshard.ir.text import format_bytes, format_time

_REFRESHES_PER_S = 2
"""Most refreshes of the line in a second. A refresh takes half a millisecond."""


class Progress:
    """Shows the numbers of the last step on one line of standard error. Elsewhere than on a terminal, the line is
    written once, at the end.

    Args:
        total: number of steps of the whole run, for a bar; None: no bar.
        console: the terminal of the line; default: standard error.
    """

    def __init__(self, total: int | None = None, *, console: Console | None = None) -> None:
        self._total = total
        self._console = console or Console(stderr=True)
        self._bar: RichProgress | None = None
        self._shown_s = 0.0
        self._last: tuple[int, Mapping[str, float]] | None = None

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step; see `RunWriter.log`. The line changes at most twice a second."""
        self._last = step_number, values
        now = time.monotonic()
        if now - self._shown_s > 1 / _REFRESHES_PER_S:
            self._shown_s = now
            self._show()

    def close(self) -> None:
        """Show the last step, and leave the line on the terminal."""
        if self._last is not None:
            self._show()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        assert self._last is not None, "a step was logged"
        number, values = self._last
        if self._bar is None:
            self._bar = RichProgress(
                *self._columns(),
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),  # `python train.py > file`: prints belong to the file
            )
            self._bar.add_task("", total=self._total)
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=number, description=text_of(values))
        if self._console.is_terminal:
            self._bar.refresh()

    def _columns(self) -> list[ProgressColumn]:
        count = TextColumn("step {task.completed}") if self._total is None else MofNCompleteColumn()
        bar = [] if self._total is None else [BarColumn(bar_width=20)]
        return [count, *bar, TextColumn("{task.description}", markup=False), TimeElapsedColumn()]


def text_of(values: Mapping[str, float]) -> str:
    """Return the numbers of a step in words.

    Example:
        >>> text_of({"loss": 2.5, "lr": 3e-4, "mfu": 0.31, "step_time_s": 0.1, "predicted_step_time_s": 0.09})
        'loss 2.5, lr 0.0003, MFU 31.0%, 100 ms (predicted 90 ms)'
    """
    parts = [f"{word} {values[name]:.4g}" for name, word in _PLAIN.items() if name in values]
    if values.get("skipped_steps"):
        parts.append(f"{values['skipped_steps']:.0f} steps skipped")
    if "tokens_per_s" in values:
        parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    if "step_time_s" in values:
        predicted = values.get("predicted_step_time_s")
        beside = "" if predicted is None else f" (predicted {format_time(predicted)})"
        parts.append(f"{format_time(values['step_time_s'])}{beside}")
    if "peak_memory_bytes" in values:
        parts.append(format_bytes(values["peak_memory_bytes"]))
    return ", ".join(parts)


_PLAIN = {"loss": "loss", "grad_norm": "norm", "lr": "lr"}
