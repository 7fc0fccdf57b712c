"""Functions between the two matrix products of an expert: an activation, or a gated activation.

A gated activation splits the first product u into two halves, gate and up. Usually h = act(gate) up (Shazeer, "GLU
variants improve transformer", 2020). GPT-OSS (OpenAI, 2025) has `clamped_silu`. It clamps both halves to a limit, and
h = (up + 1) gate sigmoid(alpha gate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation, and the gradient through it.

    `forward(x)` returns the activation of x. `backward(grad, x, out)` writes the gradient of x into `out`, which may be
    `grad` itself, and returns `out`.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation(F.silu, lambda grad, x, out: aten.silu_backward(grad, x, grad_input=out)),
        "gelu": Activation(F.gelu, lambda grad, x, out: aten.gelu_backward(grad, x, grad_input=out)),
        "gelu_tanh": Activation(
            lambda x: F.gelu(x, approximate="tanh"),
            lambda grad, x, out: aten.gelu_backward(grad, x, approximate="tanh", grad_input=out),
        ),
        "relu": Activation(F.relu, lambda grad, x, out: aten.threshold_backward(grad, x, 0, grad_input=out)),
        "relu2": Activation(lambda x: F.relu(x).square(), lambda grad, x, out: torch.mul(2 * grad, F.relu(x), out=out)),
    }
)

CLAMPED_SILU = "clamped_silu"
NAMES = (*ACTIVATIONS, CLAMPED_SILU)


@dataclass(frozen=True, slots=True)
class Gate:
    """The function from the first product u [R, g I] of an expert to the hidden value h [R, I].

    Args:
        name: one of `NAMES`.
        halves: g, 2 for a gated activation and 1 for a plain activation.
        interleaved: whether the elements of gate and up alternate in u. Otherwise the whole gate comes first.
        alpha, limit: parameters of `clamped_silu`.
    """

    name: str
    halves: int
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0

    def forward(self, u: Tensor) -> Tensor:
        """Return the hidden value h [R, I] for the first product u [R, g I]."""
        if self.halves == 1:
            return ACTIVATIONS[self.name].forward(u)
        gate, up = self._halves(u)
        if self.name == CLAMPED_SILU:
            gate, up = self._clamped(gate, up)
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return ACTIVATIONS[self.name].forward(gate).mul_(up)

    def with_backward(self, u: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the hidden value h [R, I] for u [R, g I], and a function.

        The function maps the gradient of h to the gradient of u.
        """
        if self.halves == 1:
            activation = ACTIVATIONS[self.name]
            return activation.forward(u), lambda grad: activation.backward(grad, u, torch.empty_like(u))
        gate, up = self._halves(u)
        if self.name == CLAMPED_SILU:
            return self.forward(u), lambda grad: self._joined(*self._clamped_backward(grad, gate, up))
        activation = ACTIVATIONS[self.name]
        activated = activation.forward(gate)

        def backward(grad: Tensor) -> Tensor:
            joined = torch.empty_like(u)
            d_gate, d_up = self._halves(joined)
            torch.mul(grad, activated, out=d_up)
            activation.backward(torch.mul(grad, up, out=d_gate), gate, d_gate)
            return joined

        return activated * up, backward

    def _clamped(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)

    def _clamped_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        inner_gate, inner_up = gate <= self.limit, (up >= -self.limit) & (up <= self.limit)
        gate, up = self._clamped(gate, up)
        sigmoid = torch.sigmoid(gate * self.alpha)
        slope = sigmoid * (1 + self.alpha * gate * (1 - sigmoid))
        return torch.where(inner_gate, grad * (up + 1) * slope, 0.0), torch.where(inner_up, grad * gate * sigmoid, 0.0)

    def _halves(self, u: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            gate, up = u.unflatten(1, (-1, 2)).unbind(2)
        else:
            gate, up = u.chunk(2, dim=1)
        return gate, up

    def _joined(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate, up), dim=2).flatten(1) if self.interleaved else torch.cat((gate, up), dim=1)
