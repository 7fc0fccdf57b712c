"""Calls that return gradients of another call. Derivatives of such calls are second and higher derivatives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Derivative:
    """A call that returns gradients of another call, the base call, in place of the base call's outputs.

    The arguments are `(args, kwargs, tangents)`: the arguments of the base call, and a tangent for each of `outputs`. A
    tangent is a given gradient of an output. The result is a tuple with one gradient for each name in `wanted`.

    Args:
        outputs: the outputs to differentiate, as indices among the leaves of the base call's result.
        wanted: names of the parameters and inputs ("input:0") whose gradients are returned.
    """

    outputs: tuple[int, ...]
    wanted: tuple[str, ...]


Derivatives = tuple[Derivative, ...]
"""Nested derivatives, the innermost first: each differentiates the gradients that the derivative before it returns."""
