"""Experts of several ranks: the memory that a call takes is counted. Numbers are tested in `tests.end_to_end`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoshard.kernels as kernels
from autoshard.kernels.exchange import EXCHANGING
from cost_models.exchanges import WORKSPACE_BYTES
from cost_models.work import TensorInfo
from tests.benchmarks.live_memory import LiveMemory
from tests.kernels.experts import Layer
from tests.kernels.test_ring_attention import alone


@pytest.mark.parametrize("activation", ["silu", "clamped_silu"])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 128), (128, 32), (64, 64)])
def test_the_count_of_memory_is_a_bound(activation: str, hidden: int, inner: int) -> None:
    """What a rank takes that has half of the experts and half of the rows, beside operands and results."""
    layer = Layer.drawn(
        torch.Generator().manual_seed(0), tokens=512, hidden=hidden, inner=inner, count=8, activation=activation,
        dtype=torch.float32,
    )  # fmt: skip
    x, index, weights, gate_up, _, down, *constants = layer.arguments
    operands = (x, index, weights, gate_up[:4].clone(), None, down[:4].clone())
    _check(kernels.exchanged_experts, operands, constants)
    _check(kernels.exchanged_experts_backward, (torch.ones_like(x), *operands), constants)


def _check(operator: Any, operands: tuple[Tensor | None, ...], constants: list[Any]) -> None:
    tensors = [tensor for tensor in operands if tensor is not None]
    with LiveMemory(apart=tensors) as memory:
        results = alone(EXCHANGING[operator](*operands, *constants))
    results = [results] if isinstance(results, Tensor) else [result for result in results if result is not None]
    infos = [
        TensorInfo(tuple(tensor.shape), tensor.itemsize, "f32" if tensor.is_floating_point() else "i64")
        for tensor in tensors
    ]
    counted = WORKSPACE_BYTES[str(operator)](infos, (*operands, *constants, "expert"))
    taken = memory.peak_bytes - sum(result.nbytes for result in results)
    assert taken <= counted <= 1.5 * taken
