"""Table of a profile: measured beside predicted seconds of each part of a step, and the largest differences."""

from __future__ import annotations

from rich.table import Table

from autoshard.ir.profile import Difference, Profile
from autoshard.ir.range_names import OVER
from autoshard.ir.show import text_of
from autoshard.ir.text import as_text, format_time

_SHOWN = 10


@text_of.register
def profile_text(profile: Profile) -> str:
    """Return the text of a profile: a table of the parts of a step, and the ten largest differences in words."""
    table = Table("part of a step", "measured", "predicted", "ratio", title_justify="left")
    rows = {**profile.parts, "step": (profile.step_time_s, profile.predicted_step_time_s)}
    for name, (measured_s, predicted_s) in rows.items():
        table.add_row(name, format_time(measured_s), format_time(predicted_s), _ratio(measured_s, predicted_s))
    largest = [f"* {in_words(item)}" for item in profile.differences[:_SHOWN]]
    return as_text(_title(profile), table, "Largest differences in a step, equal blocks together:", *largest)


def in_words(item: Difference) -> str:
    """Return a difference as a phrase.

    Example:
        >>> in_words(Difference("forward: layers.*.mlp mm", 0.003, 0.001))
        'forward: layers.*.mlp mm took 3 ms, 2 ms more than predicted'
    """
    name, difference_s = item.name.removeprefix(OVER), item.measured_s - item.predicted_s
    if not item.predicted_s:
        return f"{name} took {format_time(item.measured_s)}, and was not predicted"
    words = "more" if difference_s > 0 else "less"
    return f"{name} took {format_time(item.measured_s)}, {format_time(abs(difference_s))} {words} than predicted"


def _title(profile: Profile) -> str:
    steps = f"{profile.steps} step{'s' if profile.steps > 1 else ''}"
    priced = f"beside the prediction for {profile.predicted.cluster.name}"
    if profile.is_simulated:
        return f"Profile of {steps} {priced}. One process simulated all ranks, so the measured times are no run's."
    return f"Profile of {steps} on {len(profile.ranks)} ranks, {priced}; means over steps and ranks."


def _ratio(measured_s: float, predicted_s: float) -> str:
    return f"{measured_s / predicted_s:.2f}" if predicted_s > 0 else ""
