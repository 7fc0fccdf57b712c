"""Experts of several ranks equal those of one rank, with rows saved or sent twice, and a formula bounds a call's
memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import autoshard.kernels as kernels
from autoshard.kernels.exchange import EXCHANGING, run_together
from cost_models.exchanges import WORKSPACE_BYTES
from cost_models.work import TensorInfo
from tests.benchmarks.live_memory import LiveMemory
from tests.kernels.experts import Layer, layers
from tests.kernels.test_ring_attention import alone


@given(layers(), st.sampled_from([2, 4]))
def test_ranks_together_compute_what_one_does(layer: Layer, ranks: int) -> None:
    """Outputs and gradients of ranks that share the experts equal one rank's, whether the backward has saved rows or
    sends rows again."""
    ranks = ranks if layer.count % ranks == 0 else 1
    x, index, weights, gate_up, bias, down, *constants = layer.arguments
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=x.dtype)
    pieces = [[None] * ranks if item is None else item.tensor_split(ranks) for item in (gate_up, bias, down)]
    tokens = [item.tensor_split(ranks) for item in (grad, x, index, weights)]

    def on_ranks(operator: Any, *operands: Any) -> list[Any]:
        return run_together([EXCHANGING[operator](*each, *constants) for each in zip(*operands, strict=True)])

    expected = kernels.experts_backward(grad, *layer.arguments)
    sent_again = on_ranks(kernels.exchanged_experts_backward, *tokens, *pieces)
    results = on_ranks(kernels.exchanged_experts_keeping, *tokens[1:], *pieces)
    out, *kept = map(list, zip(*results, strict=True))
    found = on_ranks(kernels.exchanged_experts_kept_backward, tokens[0], *tokens[2:], *pieces, *kept)
    torch.testing.assert_close(torch.cat(out), kernels.experts(*layer.arguments))
    assert_equal(out, on_ranks(kernels.exchanged_experts, *tokens[1:], *pieces))
    for mine, again, whole in zip(zip(*found, strict=True), zip(*sent_again, strict=True), expected, strict=True):
        if whole is None:
            assert {*mine, *again} == {None}
        else:
            assert_equal(mine, again)
            torch.testing.assert_close(torch.cat(mine), whole)


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Each tensor equals the expected one bit for bit."""
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("activation", ["silu", "clamped_silu"])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 128), (128, 32), (64, 64)])
def test_the_count_of_memory_is_a_bound(activation: str, hidden: int, inner: int) -> None:
    """The formula is at least the memory that a rank with half of the experts takes beside operands and results,
    and at most half more."""
    layer = Layer.drawn(
        torch.Generator().manual_seed(0), tokens=512, hidden=hidden, inner=inner, count=8, activation=activation,
        dtype=torch.float32,
    )  # fmt: skip
    x, index, weights, gate_up, _, down, *constants = layer.arguments
    operands = (x, index, weights, gate_up[:4].clone(), None, down[:4].clone())
    _check(kernels.exchanged_experts, operands, constants)
    _check(kernels.exchanged_experts_backward, (torch.ones_like(x), *operands), constants)
    _check(kernels.exchanged_experts_keeping, operands, constants)
    _, *kept = alone(EXCHANGING[kernels.exchanged_experts_keeping](*operands, *constants))
    _check(kernels.exchanged_experts_kept_backward, (torch.ones_like(x), *operands[1:], *kept), constants)


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
