"""Calls that return gradients of another call. Derivatives of such calls are second and higher derivatives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Derivative:
    """A call that returns gradients of another call, in place of the other call's outputs.

    The arguments are `(args, kwargs, tangents)`: those of the differentiated call, and a tangent for each of `outputs`.
    The result is a tuple with the gradient of each tensor in `wanted`.

    Args:
        outputs: indices of the differentiated outputs among the leaves of the differentiated call's result.
        wanted: names of parameters and inputs ("input:0").
    """

    outputs: tuple[int, ...]
    wanted: tuple[str, ...]


Derivatives = tuple[Derivative, ...]
"""Nested derivatives, the innermost first: each differentiates the gradients that the derivative before it returns."""
