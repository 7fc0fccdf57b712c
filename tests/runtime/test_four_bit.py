"""Layers of bitsandbytes with NF4 weights are taken over, and all other quantised layers are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.errors import NotAvailableError
from autoshard.runtime.four_bit import is_4bit, take_over_4bit_layers

bnb = pytest.importorskip("bitsandbytes")


def linear(**options: Any) -> Any:
    return bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, **{"quant_type": "nf4", **options})


def packed_for_inference() -> Any:
    layer = linear().to("cpu")
    layer.weight.quant_state.packing_format_for_cpu = True
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "FP4": (lambda: linear(quant_type="fp4").to("cpu"), r"'0' has quant_type='fp4', not 'nf4'.*quant_type='nf4'"),
    "8 bits": (lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False), r"'0' is a Linear8bitLt.*load_in_4bit"),
    "an embedding": (lambda: bnb.nn.EmbeddingNF4(64, 64), r"'0' is a EmbeddingNF4.*only Linear4bit"),
    "not quantised": (linear, r"'0' is not quantised yet.*model\.to\('cuda'\)"),
    "stored in bfloat16": (
        lambda: linear(quant_storage=torch.bfloat16).to("cpu"),
        r"'0' is stored in torch\.bfloat16\. Leave bnb_4bit_quant_storage out",
    ),
    "packed for inference": (packed_for_inference, r"'0' was packed for inference.*Compile the model before"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_weights_are_refused(name: str) -> None:
    """`compile` of a layer with other quantised weights raises an error that names the layer and an alternative."""
    make, message = REFUSED[name]
    model = nn.Sequential(make())
    with pytest.raises(NotAvailableError, match=message):
        autoshard.compile(model, Mesh({"data": 2}), example_inputs=(torch.ones(2, 64),))


def test_a_layer_is_taken_over_once() -> None:
    """Taking a layer over twice leaves the same layer with the same three frozen parameters."""
    model = nn.Sequential(linear().to("cpu"))
    layer = model[0]
    take_over_4bit_layers(model)
    before = dict(layer.named_parameters())
    take_over_4bit_layers(model)
    assert model[0] is layer
    assert is_4bit(layer)
    after = dict(layer.named_parameters())
    assert {name: id(item) for name, item in after.items()} == {name: id(item) for name, item in before.items()}
    assert before.keys() == {"weight", "absmax", "nested"}
    assert not any(item.requires_grad for item in before.values())


def test_a_weight_on_meta_gets_its_packed_shape() -> None:
    """On meta, a taken-over weight has half a byte for each number, and its scales one byte each."""
    with torch.device("meta"):
        model = nn.Sequential(linear())
    take_over_4bit_layers(model)
    assert model[0].weight.shape == (64 * 64 // 2, 1)
    assert model[0].absmax.shape == (64,)
    assert all(item.is_meta and item.dtype is torch.uint8 for item in model.parameters())
