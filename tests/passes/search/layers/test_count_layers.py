"""Layer classes count their operations, messages and kept values."""

from __future__ import annotations

import math

import pytest
import torch

from passes.search.layers.count_layers import LayerClass
from passes.search.layers.price_model import PricedModel, RecipeKind
from tests.benchmarks.decoder import Decoder as RunDecoder
from tests.benchmarks.decoder import DecoderShape
from tests.passes.decoders import HIDDEN, SEQUENCE, VOCAB, folded, priced_dense

SIZES = {"tensor": 2, "context": 1, "expert": 1}


def _layers(*, tensor: bool = False, fused: bool = True, sequence_parallel: bool = False) -> dict[str, LayerClass]:
    kind = RecipeKind(tensor, sequence_parallel, context=False, expert=False, expert_tensor=False, fused=fused)
    return dict(priced_dense().layers(kind))


def _flops(layer: LayerClass, phase: str, batch: int) -> float:
    kernels = getattr(layer, phase).kernels
    products = [item for item in kernels if item.operator == "aten.mm.default"]
    shapes = [(item.inputs[0].shape(batch, SIZES), item.inputs[1].shape(batch, SIZES)) for item in products]
    return sum(2 * left[0] * left[1] * right[1] for left, right in shapes)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_products_of_a_block_count_as_by_hand(batch: int) -> None:
    """A block has twelve hidden-by-hidden weights with two FLOPs per token each, and twice as many in the backward."""
    block = _layers()["layers:0"]
    forward = 2 * 12 * HIDDEN**2 * SEQUENCE * batch
    assert _flops(block, "forward", batch) == forward
    assert _flops(block, "backward", batch) == 2 * forward


def test_tensor_parallelism_halves_products_and_parameters() -> None:
    """All weights of a block are split, norms and the biases behind reductions are not."""
    whole, half = (_layers(tensor=flag)["layers:0"] for flag in (False, True))
    assert 2 * _flops(half, "forward", 2) == _flops(whole, "forward", 2)
    assert half.parameters["layers.1.narrow.weight"].shape(1, SIZES) == (HIDDEN, 2 * HIDDEN)
    assert half.parameters["layers.1.one.weight"].shape(1, SIZES) == (HIDDEN,)


def test_a_bias_is_added_by_its_product() -> None:
    """A product adds its bias without a kernel, and the gradient of the bias is a sum."""
    block = _layers()["layers:0"]
    names = [kernel.operator for kernel in block.forward.kernels]
    assert names.count("aten.add.Tensor") == 2  # the residuals
    assert [kernel.operator for kernel in block.backward.kernels].count("aten.sum.dim_IntList") == 4


def test_a_block_keeps_what_its_backward_reads() -> None:
    """A block keeps the operands of norms and products, attention's operands and result, and activations."""
    block = _layers()["layers:0"]
    kept = sum(item.value.local_bytes(1, SIZES) for item in block.saved)
    token = 2 * HIDDEN * SEQUENCE
    assert kept == pytest.approx((2 + 3 + 1 + 2 + 4 + 4) * token, rel=0.1)
    (entering,) = block.entering
    assert entering.local_bytes(3, SIZES) == 3 * token


def test_operands_are_what_only_gradients_of_weights_read() -> None:
    """Only weight gradients read the results of norms and activations; attention's backward reads its result too."""
    block = _layers()["layers:0"]
    operands = sum(item.value.local_bytes(1, SIZES) for item in block.saved if item.is_operand)
    assert operands == 2 * HIDDEN * SEQUENCE * (1 + 1 + 4)


@pytest.mark.parametrize(("wide", "bytes_each"), [(False, 2), (True, 4 + 2)])
def test_logits_that_are_kept_have_no_more_than_their_gradient_beside_them(wide: bool, bytes_each: int) -> None:
    """Kept logits have one gradient beside them, in the head's type, or cast from float32."""
    shape = DecoderShape(
        layers=2, hidden=HIDDEN, heads=4, kv_heads=4, head_size=16, ffn=HIDDEN, gated=True, vocab=VOCAB,
        sequence=SEQUENCE, tied=False, learned_positions=False, norm_bias=False, bias=False, dropout=0.0,
        fused_attention=True, wide_logits=wide,
    )  # fmt: skip
    with torch.device("meta"):
        model = PricedModel(folded(RunDecoder(shape).bfloat16()))
    after = model.layers(RecipeKind(False, False, False, False, False, fused=True))["after"]
    logits = [
        [item.local_bytes(1, SIZES) for item in workspace if math.prod(item.shape(1, SIZES)) == SEQUENCE * VOCAB]
        for workspace in after.workspaces
    ]
    assert max(map(sum, logits)) == bytes_each * SEQUENCE * VOCAB


def test_gradients_of_a_tied_table_are_added_where_they_lie() -> None:
    """Gradients of a tied table are added in place, so no kernel holds both."""
    held = [
        sum(item.shape(1, SIZES) == (VOCAB, HIDDEN) for item in workspace)
        for layer in _layers().values()
        for workspace in layer.workspaces
    ]
    assert max(held) == 1


def test_sequence_parallelism_keeps_less() -> None:
    """Sequence parallelism splits along the sequence the values that tensor parallelism alone keeps whole."""
    plain, split = (_layers(tensor=True, sequence_parallel=flag)["layers:0"] for flag in (False, True))
    kept = [sum(item.value.local_bytes(1, SIZES) for item in block.saved) for block in (plain, split)]
    assert kept[1] < kept[0]


def test_parameters_lie_in_one_layer_each() -> None:
    """The tied table is before the blocks; the last norm after."""
    layers = _layers()
    names = [name for layer in layers.values() for name in layer.parameters]
    assert len(names) == len(set(names))
    assert layers["before"].parameters["words.weight"].shape(1, SIZES) == (VOCAB, HIDDEN)
    assert "last.weight" in layers["after"].parameters
