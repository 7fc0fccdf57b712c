"""Refuse a backward that traces its forward's call again, if the model has changed since the forward."""

from __future__ import annotations

from autoshard.errors import TraceError
from autoshard.ir.python_guards import PythonGuards


def check_state(state: PythonGuards, *, was_training: bool, is_training: bool) -> None:
    """Raise `TraceError` if the model changed since the forward, before a backward traces the forward's call again.

    Args:
        state: guards of the model's attributes in the forward.
        was_training: whether the model was in training mode in the forward.
        is_training: whether it is now.
    """
    changes = [*state.changes(), *(["training"] if was_training != is_training else [])]
    if changes:
        raise TraceError(
            f"The model changed between forward and backward ({', '.join(changes[:4])}), and this backward reaches "
            "another output than the loss, or gradients of gradients. Such a backward is traced from the model, which "
            "must still be as it was in the forward. Change the model after the backward."
        )
