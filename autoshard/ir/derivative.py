"""Derivatives of a call: what a program computes that returns gradients, so that they have gradients too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Derivative:
    """Gradients as results of a call.

    The call's arguments are `(args, kwargs, tangents)`: those of the call that is differentiated, and a tangent for
    each of `outputs`. It returns a tuple of gradients, one for each of `wanted`.

    Args:
        outputs: leaf indices of the outputs that are differentiated.
        wanted: qualified names of parameters, and inputs ("input:0"), that they are differentiated by.
    """

    outputs: tuple[int, ...]
    wanted: tuple[str, ...]


Derivatives = tuple[Derivative, ...]
"""Gradients of gradients, the innermost first."""
