"""Rules of optimizer updates. Elements of a parameter are independent, so any dim may be split.

The exception is Muon's orthogonalisation, which needs whole matrices. Ranks may share the matrices of a batch.

Each rank has the whole vector of hyper-parameters and the factor of gradient clipping. An update is not linear in its
gradient, so gradients are reduced before it.
"""

from __future__ import annotations

import torch

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.rules.dims import BLOCKED, elementwise, named, names, with_blocked
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule

autoshard_ops = torch.ops.autoshard


@sharding_rule(
    autoshard_ops.sgd_update.default,
    autoshard_ops.momentum_update.default,
    autoshard_ops.adam_update.default,
    autoshard_ops.amsgrad_update.default,
)
def update(param: torch.Tensor, grad: torch.Tensor, *rest: object) -> Rule:
    """Return a rule in which parameter, gradient, state, new parameter and new state share their dims."""
    tensors = [index for index, item in enumerate(rest) if isinstance(item, torch.Tensor)]
    scale = tensors[-1] - 1  # hyper-parameters come last, after the optional scale
    count = 2 + len([index for index in tensors if index < scale])
    operands, results = elementwise([tuple(param.shape)] * count, count - 1)
    return Rule(((*operands, *[()] * (scale in tensors), (BLOCKED,)), results))


@sharding_rule(autoshard_ops.muon_update.default)
def muon_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor,
    orthogonal: torch.Tensor,
    scale: torch.Tensor | None,
    *rest: object,
) -> Rule:
    operands, results = elementwise([tuple(param.shape)] * 4, 2)
    return Rule(((*operands, *[()] * (scale is not None), (BLOCKED,)), results))


@sharding_rule(autoshard_ops.muon_direction.default)
def muon_direction(grad: torch.Tensor, buffer: torch.Tensor, scale: torch.Tensor | None, *rest: object) -> Rule:
    operands, results = elementwise([tuple(grad.shape)] * 2)
    return Rule(((*operands, *[()] * (scale is not None), (BLOCKED,)), results))


@sharding_rule(autoshard_ops.orthogonalise.default)
def orthogonalise(xs: torch.Tensor, *rest: object) -> Rule:
    """Return a rule that may split the batch of matrices."""
    dims = with_blocked(named(xs.dim()), [xs.dim() - 2, xs.dim() - 1])
    return Rule(((dims,), (dims,)))


@sharding_rule(autoshard_ops.sum_of_squares.default)
def sum_of_squares(x: torch.Tensor) -> Rule:
    """Return a rule that may split any dim. The result is then a partial sum. Padding is filled with zeros."""
    dims = named(x.dim())
    return Rule(((dims,), ((),)), reduce=dict.fromkeys(names(dims), "sum"), padding=dict.fromkeys(names(dims), 0))
