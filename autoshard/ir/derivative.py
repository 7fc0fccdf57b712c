"""Derivatives of a call: programs that return gradients, so that gradients have gradients too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Derivative:
    """Gradients as results of a call.

    The call's arguments are `(args, kwargs, tangents)`: the arguments of the differentiated call, and a tangent for
    each of `outputs`. It returns a tuple of gradients, one for each of `wanted`.

    Args:
        outputs: indices of the differentiated outputs among the leaves of the call's result.
        wanted: names of parameters and inputs ("input:0") whose gradients the call returns.
    """

    outputs: tuple[int, ...]
    wanted: tuple[str, ...]


Derivatives = tuple[Derivative, ...]
"""Nested derivatives, the innermost first: the second one differentiates the gradients that the first one returns."""
