"""Rules of pointwise operators that have several results, or an operand with other dims than the result."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.rules.carries import maxima
from autoshard.rules.dims import all_blocked, elementwise
from autoshard.rules.notation import OperandCondition, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten


@sharding_rule(aten._prelu_kernel_backward.default)
def prelu_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Rule:
    return Rule(elementwise([grad.shape, x.shape, weight.shape], results=2), linear=[(0,)])


@sharding_rule(aten.frexp.Tensor)
def frexp(x: torch.Tensor) -> Rule:
    return Rule(elementwise([x.shape], results=2))


@sharding_rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> Rule | None:
    """Return the rule of the backward of log-sigmoid.

    The forward's `buffer` has the shape of `x` on a CPU, and is empty on a GPU.
    """
    (x_dims,), results = elementwise([x.shape])
    buffer_dims = x_dims if buffer.shape == x.shape else all_blocked(buffer.dim())
    beside: dict[int, OperandCondition] = {1: OperandCondition.ANYTHING, 2: OperandCondition.ANYTHING}
    return Rule(((x_dims, x_dims, buffer_dims), results), linear=[(0,)], beside=beside)


@sharding_rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(x: torch.Tensor) -> Rule | None:
    (dims,), _ = elementwise([x.shape])
    buffer_dims = all_blocked(1) if x.device.type == "cuda" else dims
    return Rule(((dims,), (dims, buffer_dims)))


@sharding_rule(aten.bucketize.Tensor)
def bucketize(x: torch.Tensor, boundaries: torch.Tensor, **kwargs: Any) -> Rule:
    """Return the rule of `bucketize`. NaN is in the last bucket, which a minimum would hide."""
    (dims,), results = elementwise([x.shape])
    return Rule(((dims, (("_",),)), results), carries=maxima((0,)))
