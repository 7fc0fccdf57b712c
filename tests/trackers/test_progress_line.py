"""The progress line shows the last step, with the measured time beside the predicted one."""

from __future__ import annotations

import io
import sys

from rich.console import Console

from autoshard.trackers import Progress
from autoshard.trackers.progress_line import text_of

VALUES = {
    "loss": 2.34567,
    "grad_norm": 0.5,
    "lr": 3e-4,
    "tokens_per_s": 12345.6,
    "mfu": 0.31,
    "step_time_s": 0.102,
    "predicted_step_time_s": 0.098,
    "peak_memory_bytes": 3 * 2.0**30,
    "skipped_steps": 2.0,
}


def shown(*, total: int | None = None, terminal: bool = False) -> str:
    written = io.StringIO()
    line = Progress(total, console=Console(file=written, force_terminal=terminal, width=160))
    for number in (7, 8):
        line.log(number, VALUES)
    line.close()
    line.close()
    return written.getvalue()


def test_the_numbers_in_words() -> None:
    """Each number has its word or unit in the text, and unknown numbers are left out."""
    assert text_of(VALUES) == (
        "loss 2.346, norm 0.5, lr 0.0003, 2 steps skipped, 12,346 tokens/s, MFU 31.0%, 102 ms (predicted 98 ms), "
        "3.00 GiB"
    )
    assert text_of({"loss": 1.0, "skipped_steps": 0.0, "step_time_s": 2.0}) == "loss 1, 2 s"
    assert text_of({}) == ""


def test_the_last_step_stays() -> None:
    """The last step stays visible, and without a terminal it is the only one that is written."""
    assert "step 8 loss 2.346" in shown()
    assert "7" not in shown().split("loss")[0]
    assert "8/20" in shown(total=20)
    assert "8/20" in shown(total=20, terminal=True)


def test_prints_go_to_the_file_of_standard_output() -> None:
    """A progress line on a terminal does not replace a standard output that is no terminal."""
    before, line = sys.stdout, Progress(console=Console(file=io.StringIO(), force_terminal=True))
    line.log(1, VALUES)
    assert sys.stdout is before
    line.close()


def test_a_run_without_a_step_shows_nothing() -> None:
    """A progress line that is closed without a step writes nothing."""
    written = io.StringIO()
    Progress(console=Console(file=written)).close()
    assert not written.getvalue()
