"""A taken-over 4-bit layer computes as the layer of bitsandbytes does, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.runtime.four_bit import is_4bit, take_over_4bit_layers

bnb = pytest.importorskip("bitsandbytes")


def layer(
    dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None, *, bias: bool = False, nested: bool = True
) -> Any:
    """Return a quantised layer of bitsandbytes from 128 to 96 features."""
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(
        128, 96, bias=bias, compute_dtype=compute, compress_statistics=nested, quant_type="nf4"
    )  # fmt: skip
    return made.to(dtype).to("cpu")


def taken_over(own: nn.Module) -> Any:
    found = copy.deepcopy(own)
    take_over_4bit_layers(found)
    assert is_4bit(found)
    assert not is_4bit(own)
    return found


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_equal_to_bitsandbytes(dtype: torch.dtype, compute: torch.dtype | None, nested: bool) -> None:
    """Outputs and input gradients equal those of bitsandbytes, for several weight and compute types."""
    own = layer(dtype, compute, nested=nested)
    ours = taken_over(own)
    results = []
    for module in (own, ours):
        x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        out = module(x)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad))
    assert results[0][0].dtype == results[1][0].dtype == dtype
    torch.testing.assert_close(results[1], results[0])


def test_a_bias_has_a_gradient() -> None:
    """The output with a bias, and the bias gradient, equal those of bitsandbytes."""
    own = layer(bias=True)
    ours = taken_over(own)
    for module in (own, ours):
        module(torch.ones(3, 128)).sum().backward()
    torch.testing.assert_close(ours.bias.grad, own.bias.grad)
    torch.testing.assert_close(ours(torch.ones(3, 128)), own(torch.ones(3, 128)))


@pytest.mark.parametrize("nested", [False, True])
def test_a_new_weight_brings_its_scales(nested: bool) -> None:
    """After a new weight is set, as peft does to merge, the layer has this weight's values and scales."""
    ours = taken_over(layer(nested=nested))
    values = 7 * torch.randn(96, 128)
    options = {"quant_type": "nf4", "compress_statistics": nested}
    ours.weight = bnb.nn.Params4bit(values, requires_grad=False, **options).to("cpu")
    expected = bnb.functional.dequantize_4bit(ours.weight.data, ours.weight.quant_state)
    assert torch.equal(ours.dequantize(), expected)


def test_casts_leave_scales_alone() -> None:
    """After `.bfloat16()`, the dequantised weight is the same bit by bit."""
    ours = taken_over(layer())
    before = ours.dequantize()
    assert torch.equal(ours.bfloat16().dequantize(torch.float32), before)


def test_in_full() -> None:
    """`in_full` returns a plain `nn.Linear` with the dequantised weight in its original type, also on meta."""
    ours = taken_over(layer(torch.bfloat16, bias=True))
    full = ours.in_full()
    assert type(full) is nn.Linear
    assert full.weight.dtype is torch.bfloat16
    assert torch.equal(full.weight, ours.dequantize())
    assert full.bias is ours.bias
    with torch.device("meta"):
        on_meta = bnb.nn.Linear4bit(128, 96, bias=False, quant_type="nf4")
    take_over_4bit_layers(on_meta)
    assert on_meta.in_full().weight.shape == (96, 128)


def test_state_dict_has_all_tensors() -> None:
    """A layer that loads another's state dict has the same dequantised weight."""
    ours, other = taken_over(layer()), taken_over(layer().to(torch.float32))
    assert ours.state_dict().keys() == {"weight", "absmax", "nested"}
    with torch.no_grad():
        for item in other.parameters():
            item.zero_()
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.dequantize(), ours.dequantize())
