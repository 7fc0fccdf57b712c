"""Names of communicators: the mesh axes of a collective, and its purpose.

Waiting for a collective also waits for earlier collectives on the same communicator. So each purpose has a communicator
of its own: `"data"` (values of the forward and the backward), `"data/gradients"`, `"data/parameters"`. Commas join
several axes, major to minor: `"data,model/gradients"`.
"""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """Purposes of collectives with a communicator of their own."""

    GRADIENTS = "gradients"
    NARROW_GRADIENTS = "narrow_gradients"
    """Gradients that are sent in 16 bits and added up in float32."""
    PARAMETERS = "parameters"


def group_axes(group: str) -> tuple[str, ...]:
    """Return the mesh axes in a communicator's name.

    Example:
        >>> group_axes("data,model/gradients")
        ('data', 'model')
    """
    return tuple(without_purpose(group).split(","))


def without_purpose(group: str) -> str:
    """Return the name of the communicator along the same axes for values of the forward and the backward.

    Example:
        >>> without_purpose("data/gradients")
        'data'
    """
    return group.partition("/")[0]


def for_purpose(group: str, purpose: Purpose) -> str:
    """Return the name of the communicator along the same axes for `purpose`.

    Example:
        >>> for_purpose("data", Purpose.GRADIENTS)
        'data/gradients'
    """
    return f"{without_purpose(group)}/{purpose}"


def is_for(group: str, purpose: Purpose) -> bool:
    """Whether a communicator is for a purpose.

    Example:
        >>> is_for("data/gradients", Purpose.GRADIENTS), is_for("data", Purpose.GRADIENTS)
        (True, False)
    """
    return group == for_purpose(group, purpose)
