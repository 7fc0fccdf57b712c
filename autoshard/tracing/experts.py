"""Keeps the experts of transformers' models whole: the operator `autoshard::experts` replaces their implementation.

In transformers each class of experts runs through one function, which looks up an implementation by the model's
configuration. The implementations that all compute the same result are replaced. Implementations for GPUs stay if the
user names them. Experts that compute something else stay too: unknown gates, a norm behind the experts, quantised
weights.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.kernels.gates import CLAMPED_SILU, NAMES, Gate
from autoshard.tracing.replaced import replaced

_MODULE = "transformers.integrations.moe"
_ALIKE = ("eager", "grouped_mm", "batched_mm", None)
"""Names of implementations with equal results. None stands for a layer that is outside transformers' models."""
_NOT_COVERED = ("_is_expert_parallel", "has_post_expert_norm")
"""Attributes that are true if a module of experts has a feature that the operator lacks.

transformers before 5.23 has only some of these attributes.
"""


def keep_experts_whole() -> contextlib.AbstractContextManager[None]:
    """Return a context in which transformers runs its experts by the operator `autoshard::experts`.

    Nothing changes if transformers is not imported.
    """
    interface = getattr(sys.modules.get(_MODULE), "ExpertsInterface", None)
    if interface is None:
        return contextlib.nullcontext()
    own = interface.get_interface

    def get_interface(self: Any, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        found = own(self, name, default)
        return _keeping(found) if name in _ALIKE else found

    return replaced({(interface, "get_interface"): get_interface})


def _keeping(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a module of experts by the operator; if results would differ, by `implementation`."""

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = _gate_of(module) if len(args) == 3 and not kwargs and _is_covered(module, *args) else None
        return implementation(module, *args, **kwargs) if gate is None else _run(module, gate, *args)

    return run


def _is_covered(module: Any, hidden_states: Any, index: Any, weights: Any) -> bool:
    if any(getattr(module, name, False) for name in _NOT_COVERED):
        return False
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if module.has_bias else []
    parameters = [getattr(module, name) for name in names]
    if not all(isinstance(item, Tensor) and item.is_floating_point() and item.itemsize > 1 for item in parameters):
        return False
    first, last = parameters[:2]
    is_one_type = len({item.dtype for item in parameters}) == 1
    return is_one_type and (hidden_states.dim(), index.dim(), first.dim(), last.dim()) == (2, 2, 3, 3)


def _gate_of(module: Any) -> Gate | None:
    """Return the gate of a module's experts, found by its values on samples; None if no known gate matches."""
    halves, interleaved = (2, not module.is_concatenated) if module.has_gate else (1, False)
    constants = [getattr(module, name, None) for name in ("alpha", "limit")]
    numbers = [float(number) for number in constants if isinstance(number, (int, float))]
    with _disable_current_modes(), torch.no_grad():
        probe = _probe(halves)
        try:
            expected = (module._apply_gate if module.has_gate else module.act_fn)(probe)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            return None  # not a function of numbers alone
        for name in NAMES:
            if name == CLAMPED_SILU and (halves == 1 or len(numbers) < 2):
                continue
            gate = Gate(name, halves, interleaved, *(numbers if name == CLAMPED_SILU else (1.0, 0.0)))
            if _is_same(gate.forward(probe), expected):
                return gate
    return None


def _probe(halves: int) -> Tensor:
    """Return random samples [4096, halves * 4] of both signs, with magnitudes from a thousandth to a million."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, 4096, halves * 4, generator=generator, dtype=torch.float64)
    return (10 ** (9 * uniform[0] - 3)) * torch.where(uniform[1] < 0.5, -1.0, 1.0)


def _is_same(found: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-30)


def _run(module: Any, gate: Gate, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    first, last = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
    gate_up, down = getattr(module, first), getattr(module, last)
    bias = getattr(module, f"{first}_bias") if module.has_bias else None
    x = hidden_states.to(gate_up.dtype)
    shape = (-1, gate.halves) if gate.interleaved else (gate.halves, -1)
    dim = 2 if module.is_transposed else 1
    out = torch.ops.autoshard.experts(
        x, index, weights, gate_up.unflatten(dim, shape), None if bias is None else bias.unflatten(1, shape), down,
        down.shape[0], gate.name, module.is_transposed, gate.interleaved, gate.alpha, gate.limit,
    )  # fmt: skip
    if bias is not None:
        out = out + _biases(module.down_proj_bias, index, weights).to(out.dtype)
    return out.to(hidden_states.dtype)


def _biases(bias: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return for each token the sum of its experts' biases [T, H], weighted by `weights` [T, k].

    bias is [E, H], and index [T, k] has the experts of each token.
    """
    experts = torch.arange(bias.shape[0], device=index.device)
    chosen = torch.where(index.unsqueeze(2) == experts, weights.unsqueeze(2), 0.0)  # [T, k, E]
    return chosen.sum(1).to(bias.dtype) @ bias
