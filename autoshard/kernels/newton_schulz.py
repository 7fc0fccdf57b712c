"""Operators of Muon (Jordan et al., 2024) before its update: the momentum's direction, and its orthogonalisation.

`torch.optim.Muon` updates a matrix in three steps. Each step is an operator here, so that each has a layout of its own:

1. `muon_direction` averages the gradients. It is elementwise, so momentum and gradient may be split.
2. `orthogonalise` makes the singular values of whole matrices about 1. Ranks may share the matrices of a batch.
3. `muon_update` (`autoshard.kernels.optimizers`) moves the parameter. It is elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.kernels.library import define

MUON_HYPER = ("lr", "weight_decay", "momentum")


def muon_direction_reference(
    grad: Tensor, momentum_buffer: Tensor, scale: Tensor | None, hyper: Tensor, nesterov: bool
) -> Tensor:
    """Return the direction that Muon orthogonalises, in bfloat16 as `torch.optim.Muon` does.

    Args:
        grad, momentum_buffer: gradient and average of earlier gradients of one parameter, of equal shape. Both are only
            read.
        scale: scalar that multiplies the gradient, or None.
        hyper: float64 [3], the values named in `MUON_HYPER`.
        nesterov: whether to look ahead by Nesterov's momentum.
    """
    momentum = hyper.tolist()[MUON_HYPER.index("momentum")]
    grad = grad if scale is None else (grad * scale).to(grad.dtype)
    average = momentum_buffer.lerp(grad, 1 - momentum)
    return (grad.lerp(average, momentum) if nesterov else average).to(torch.bfloat16, copy=True)


def orthogonalise_reference(xs: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return about U V^T for each matrix U S V^T of a batch, by the quintic Newton-Schulz iteration.

    With X of Frobenius norm 1, a step is X <- a X + (b A + c A A) X, where A = X X^T (Jordan et al., "Muon", 2024).

    Args:
        xs: bfloat16 [..., m, n].
        coefficients: a, b and c.
        steps: the number of iterations.
        eps: the least norm by which a matrix is divided.
    """
    found = [_orthogonalised(x, coefficients, steps, eps) for x in xs.reshape(-1, *xs.shape[-2:]).unbind()]
    return torch.stack(found).reshape(xs.shape) if found else xs.clone()


def _orthogonalised(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return the orthogonalised matrix, made with the same calls as in `torch.optim.Muon`.

    The matrix is computed alone, so its bits do not depend on the other matrices of the batch.
    """
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


muon_direction = define(
    "muon_direction",
    "(Tensor grad, Tensor momentum_buffer, Tensor? scale, Tensor hyper, bool nesterov) -> Tensor",
    muon_direction_reference,
    lambda grad, *_: grad.new_empty(grad.shape, dtype=torch.bfloat16),
)

orthogonalise = define(
    "orthogonalise",
    "(Tensor xs, float[] coefficients, int steps, float eps) -> Tensor",
    orthogonalise_reference,
    lambda xs, *_: xs.new_empty(xs.shape),
)
