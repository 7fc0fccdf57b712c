"""The reference for `most_in_flight`: counts the micro-batches that a rank holds, action by action."""

from __future__ import annotations

from collections.abc import Iterable

from cost_models.schedule_orders import ActionKind, Slot


def peak_in_flight(order: Iterable[Slot]) -> int:
    """The most micro-batches that a rank holds at once. One is held from its forward to its backward, or to W if
    the backward is split."""
    held = peak = 0
    for action in (action for slot in order for action in slot):
        if action.kind is ActionKind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind is not ActionKind.BACKWARD_INPUT:
            held -= 1
    return peak
