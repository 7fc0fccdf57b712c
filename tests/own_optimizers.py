"""Optimizers that a user may write: one elementwise, one with roots of whole matrices, and one with random steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Own(torch.optim.Optimizer):
    """An optimizer that updates each parameter that has a gradient with `move`."""

    def __init__(self, parameters: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in (item for item in group["params"] if item.grad is not None):
                self.move(parameter, parameter.grad, group["lr"])

    def move(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """Update a parameter in place."""
        raise NotImplementedError


class Lion(_Own):
    """Steps of equal size along the sign of the momentum (Chen et al., 2023)."""

    def move(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        parameter.add_(momentum.lerp(grad, 0.1).sign(), alpha=-lr)
        momentum.lerp_(grad, 0.01)


class Shampoo(_Own):
    """Gradients times inverse fourth roots of their second moments (Gupta et al., 2018); roots of whole matrices."""

    def move(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        matrix = grad.reshape(len(grad), -1)
        state = self.state[parameter]
        rows = state.setdefault("rows", torch.eye(matrix.shape[0]).to(matrix))
        columns = state.setdefault("columns", torch.eye(matrix.shape[1]).to(matrix))
        rows += matrix @ matrix.T
        columns += matrix.T @ matrix
        step = _inverse_root(rows) @ matrix @ _inverse_root(columns)
        parameter.sub_(step.reshape(parameter.shape), alpha=lr)


class Noisy(_Own):
    """Steps in random directions."""

    def move(self, parameter: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        parameter.add_(torch.randn_like(parameter), alpha=lr)


class Failing(_Own):
    """An optimizer whose step fails with a KeyError."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        raise KeyError("layer name")


def _inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
