"""Derivatives of a call: programs that return gradients, so that gradients have gradients too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Derivative:
    """Gradients as results of a call, in place of the model's outputs.

    The arguments of the call are `(args, kwargs, tangents)`: those of the differentiated call, and a tangent for each
    of `outputs`. The call returns a tuple with the gradient of each of `wanted`.

    Args:
        outputs: indices of the differentiated outputs among the leaves of the differentiated call's result.
        wanted: names of parameters and inputs ("input:0").
    """

    outputs: tuple[int, ...]
    wanted: tuple[str, ...]


Derivatives = tuple[Derivative, ...]
"""Nested derivatives, the innermost first: the second one differentiates the gradients that the first one returns."""
