"""Names of communicators: the mesh axes that a collective goes along, and what it is for.

A wait also waits for what was issued before on the same communicator. So collectives of other purposes have
communicators of their own: `"data"` (values of the forward and the backward), `"data/gradients"`, `"data/parameters"`.
Axes of a group of several are joined by commas, major to minor: `"data,model/gradients"`.
"""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """What collectives are for that do not go by the name of their axes alone."""

    GRADIENTS = "gradients"
    NARROW_GRADIENTS = "narrow_gradients"
    """Gradients that are rounded to 16 bits for their way, and added up in float32."""
    PARAMETERS = "parameters"


def group_axes(group: str) -> tuple[str, ...]:
    """The mesh axes along which a communicator goes.

    Example:
        >>> group_axes("data,model/gradients")
        ('data', 'model')
    """
    return tuple(without_purpose(group).split(","))


def without_purpose(group: str) -> str:
    """The name of the communicator along the same axes for values of the forward and the backward.

    Example:
        >>> without_purpose("data/gradients")
        'data'
    """
    return group.partition("/")[0]


def for_purpose(group: str, purpose: Purpose) -> str:
    """The name of the communicator along the same axes for another purpose.

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
