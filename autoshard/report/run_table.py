"""Table of the length and cost of a whole run, `plan.run`."""

from __future__ import annotations

import math

from autoshard.ir.run_estimate import RunEstimate
from autoshard.ir.show import text_of
from autoshard.ir.text import as_text, format_bytes, format_duration, table


@text_of.register
def run_text(run: RunEstimate) -> str:
    """Return the text of `plan.run`: a heading, and a table of times, checkpoints and failures."""
    heading = f"A run on {run.devices} devices, priced for {run.hardware}."
    return as_text(heading, table(("expected", "value"), run_rows(run)))


def run_rows(run: RunEstimate) -> list[tuple[str, str]]:
    """Return rows (name, value) of a run."""
    rows = [("steps", f"{run.steps:,} of {format_duration(run.step_time_s)}")]
    if run.tokens is not None:
        rows.insert(0, ("tokens", f"{run.tokens:.4g}"))
    step_s, day_s = run.checkpoint_every * run.step_time_s, 86400.0
    of_steps = format_duration(run.days_of_steps * day_s)
    rows += [
        ("time", f"{format_duration(run.days * day_s)}; the steps alone take {of_steps}"),
        ("device-hours", f"{run.device_hours:,.0f}"),
        ("checkpoint", f"{format_bytes(run.checkpoint_bytes)} in {format_duration(run.save_s)}"),
        ("distance of checkpoints", f"{run.checkpoint_every:,} steps, {format_duration(step_s)}"),
        ("lost to checkpoints", f"{run.lost_to_checkpoints:.2%}"),
    ]
    if math.isinf(run.mtbf_hours):
        return rows
    return [
        *rows,
        ("failures", f"{run.failures:,.0f}, one every {run.mtbf_hours:,.4g} h"),
        ("lost to failures", f"{run.lost_to_failures:.2%}"),
    ]
