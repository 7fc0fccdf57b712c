"""Names of communicators, made of the mesh axes and the purpose of a collective.

Waiting for a collective also waits for earlier collectives on the same communicator. So each purpose has a communicator
of its own: `"data"` (values of the forward and the backward), `"data/gradients"`, `"data/parameters"`. Commas join
several axes, major to minor: `"data,model/gradients"`.
"""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """Purpose of a collective on a communicator of its own. The value is the suffix of the communicator's name."""

    GRADIENTS = "gradients"
    NARROW_GRADIENTS = "narrow_gradients"
    """Gradients that are sent in 16 bits and added up in float32."""
    PARAMETERS = "parameters"


def group_axes(group: str) -> tuple[str, ...]:
    """Return the mesh axes in a communicator's name, major to minor.

    Example:
        >>> group_axes("data,model/gradients")
        ('data', 'model')
    """
    return tuple(without_purpose(group).split(","))


def without_purpose(group: str) -> str:
    """Return the name of the communicator over the same axes that carries values of the forward and the backward.

    Example:
        >>> without_purpose("data/gradients")
        'data'
    """
    return group.partition("/")[0]


def for_purpose(group: str, purpose: Purpose) -> str:
    """Return the name of the communicator over the same axes that carries values for `purpose`.

    Example:
        >>> for_purpose("data", Purpose.GRADIENTS)
        'data/gradients'
    """
    return f"{without_purpose(group)}/{purpose}"


def is_for(group: str, purpose: Purpose) -> bool:
    """Whether the communicator named `group` is for `purpose`.

    Example:
        >>> is_for("data/gradients", Purpose.GRADIENTS), is_for("data", Purpose.GRADIENTS)
        (True, False)
    """
    return group == for_purpose(group, purpose)
