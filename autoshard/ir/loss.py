"""The loss of a training step: the first floating scalar among a model's outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError


class Output(NamedTuple):
    """One output of a model, with its global shape. The name is "output:0" for leaf 0 of the model's result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_scalar(self) -> bool:
        """Whether the output is a floating scalar, and so may be the loss."""
        return self.shape == () and self.dtype.is_floating_point

    @property
    def tangent(self) -> str:
        """Name of the backward's input that is the gradient of this output: "tangent:0"."""
        return self.name.replace("output:", "tangent:")


def loss_among(outputs: Sequence[Output], tangents: Collection[str]) -> Output:
    """Return the loss of a training step: the first floating scalar among `outputs`, which may be in any order.

    `tangents` has the names of the backward's inputs that are gradients of outputs ("tangent:0"). Raises `TraceError`
    if there is no floating scalar, or if the first floating scalar depends on no parameter.
    """
    scalars = [output for output in outputs if output.is_scalar]
    if not scalars:
        raise no_loss([output.shape for output in outputs])
    loss = min(scalars, key=lambda output: int(output.name.removeprefix("output:")))
    if loss.tangent not in tangents:
        raise TraceError(
            "The first floating scalar that the model returns does not depend on any parameter, so there is nothing to "
            "train. Return the loss first, or pass loss_fn=."
        )
    return loss


def find_loss(outputs: Any) -> torch.Tensor:
    """Return the first floating scalar tensor in a model's result. Raises `TraceError` if there is none."""
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if tensor.dim() == 0 and tensor.is_floating_point():
            return tensor
    raise no_loss([tuple(tensor.shape) for tensor in tensors])


def no_loss(shapes: Sequence[tuple[int, ...]]) -> TraceError:
    """Return the error for a training step whose model returns tensors of these shapes, none of which is a loss."""
    return TraceError(
        f"A training step, or outputs='loss', needs a loss, but the model returns no floating scalar; it returns "
        f"tensors of shapes={shapes}. Return the loss (pass labels), pass loss_fn=, or leave out the optimizer "
        "(--optimizer none) and outputs=."
    )
