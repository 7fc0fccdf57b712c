"""Layers of experts equal the definition, in which each token goes through its experts one by one, forward and
backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.kernels.experts import ExpertGroups, group_by_expert
from autoshard.kernels.gates import ACTIVATIONS, CLAMPED_SILU
from tests.kernels.experts import Layer, layers

ops = torch.ops.autoshard


def one_by_one(layer: Layer) -> Tensor:
    """The definition: each token goes through each of its known experts, one after another."""
    rows = []
    for token, chosen, shares in zip(layer.x, layer.index.tolist(), layer.weights, strict=True):
        known = [(e, share) for e, share in zip(chosen, shares, strict=True) if 0 <= e < layer.count]
        rows.append(sum((share * _expert(layer, e, token) for e, share in known), torch.zeros_like(token)))
    return torch.stack(rows)


def _expert(layer: Layer, e: int, token: Tensor) -> Tensor:
    inner = layer.gate_up[e].flatten(1) if layer.transposed else layer.gate_up[e].flatten(0, 1).mT
    u = token @ inner
    u = u if layer.bias is None else u + layer.bias[e].flatten()
    halves = u.unflatten(0, (-1, layer.halves)).mT if layer.interleaved else u.unflatten(0, (layer.halves, -1))
    down = layer.down[e] if layer.transposed else layer.down[e].mT
    return _gated(layer, halves) @ down


def _gated(layer: Layer, halves: Tensor) -> Tensor:
    if layer.activation == CLAMPED_SILU:
        gate, up = halves[0].clamp(max=layer.limit), halves[1].clamp(-layer.limit, layer.limit)
        return (up + 1) * gate * torch.sigmoid(layer.alpha * gate)
    done = ACTIVATIONS[layer.activation].forward(halves[0])
    return done if layer.halves == 1 else done * halves[1]


def gradients(layer: Layer, out: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of all floating-point operands, which are zeros if no token has a known expert."""
    anchored = out + sum(0.0 * operand.sum() for operand in layer.trained)
    return list(torch.autograd.grad(anchored, layer.trained, grad))


@given(layers())
def test_it_equals_tokens_one_by_one(layer: Layer) -> None:
    """Output and gradients equal the definition's for all gates and layouts of weights, with experts without tokens
    and indices of no expert."""
    layer = layer.requiring_gradients()
    found, expected = ops.experts(*layer.arguments), one_by_one(layer)
    torch.testing.assert_close(found, expected)
    grad = torch.ones_like(found)
    for ours, theirs in zip(gradients(layer, found, grad), gradients(layer, expected, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


@given(layers())
def test_rows_of_no_expert_add_nothing_where_they_are_not_cut_off(layer: Layer) -> None:
    """Rows without an expert stay on accelerators, and here their products are NaN: output and gradients do not
    change."""
    layer = layer.requiring_gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(group_by_expert.__globals__, "_is_read_at_once", lambda tensor: False)
        patch.setattr(ExpertGroups, "products", _poisoned(ExpertGroups.products))
        found = ops.experts(*layer.arguments)
        grad = torch.ones_like(found)
        ours = [found, *gradients(layer, found, grad)]
    expected = one_by_one(layer)
    torch.testing.assert_close(ours, [expected, *gradients(layer, expected, grad)])


def _poisoned(products: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`products` with NaN in the rows after the last group."""

    def run(groups: ExpertGroups, *operands: Tensor) -> Tensor:
        made = products(groups, *operands)
        made[int(groups.ends[-1]) :] = torch.nan
        return made

    return run


@given(layers(width=8), st.sampled_from([torch.float32, torch.bfloat16]))
def test_products_in_groups_equal_a_loop(layer: Layer, dtype: torch.dtype) -> None:
    """For operands that torch's grouped product takes, output and gradients equal float64's to a few roundings."""
    narrow = layer.to(dtype).requiring_gradients()
    wide = narrow.to(torch.float64).requiring_gradients()
    found, expected = ops.experts(*narrow.arguments), ops.experts(*wide.arguments)
    grad = torch.ones_like(found)
    pairs = zip(gradients(narrow, found, grad), gradients(wide, expected, grad.double()), strict=True)
    pairs = [(found, expected), *pairs]
    largest = max(1.0, *(float(theirs.detach().abs().max()) for _, theirs in pairs))
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= 20 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("operator", ["experts", "experts_backward"])
def test_shapes_and_types_are_those_of_its_fake(operator: str) -> None:
    """The real run and the fake run agree, with a bias and without."""
    for bias in (False, True):
        layer = Layer.drawn(torch.Generator().manual_seed(0), bias=bias)
        before: tuple[Any, ...] = () if operator == "experts" else (torch.randn_like(layer.x),)
        arguments = (*before, *layer.arguments)
        torch.library.opcheck(getattr(ops, operator).default, arguments, test_utils="test_faketensor")


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Weights with one column fewer than the indices are refused, and the error shows the shapes."""
    layer = Layer.drawn(torch.Generator().manual_seed(0))
    x, index, weights, *rest = layer.arguments
    with pytest.raises(ValueError, match=r"experts: pass x \[T, H\], .*Found x="):
        ops.experts(x, index, weights[:, :1], *rest)
