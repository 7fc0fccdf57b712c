"""Launches and bytes of graphs equal counts by hand, and kernels save launches and bytes of a Llama block."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from passes.lowering.count_launches import Traffic, chunk_steps, second_step
from tests.benchmarks.fused_counts import count_both, llama_block
from tests.passes.launches import count_launches


def _graph(*calls: tuple[OpOverload, int]) -> fx.GraphModule:
    """Return a graph of calls of one operand [4, 8] in float32, each with a number of elements in its result."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, device="meta")
    for target, elements in calls:
        node = graph.call_function(target, (x,))
        node.meta["val"] = torch.empty(elements, device="meta")
    graph.output(())
    return fx.GraphModule({}, graph)


def test_views_cost_nothing_and_calls_what_they_touch() -> None:
    """A view launches nothing.

    Another call is one launch that reads its operands and writes its results, 4 bytes each.
    """
    aten = torch.ops.aten
    assert count_launches(_graph((aten.t.default, 32), (aten.alias.default, 32))) == Traffic()
    assert count_launches(_graph((aten.relu.default, 32))) == Traffic(1, 2 * 32 * 4)
    assert count_launches(_graph((aten.relu.default, 32), (aten.sum.default, 1))) == Traffic(2, (3 * 32 + 1) * 4)


def test_communication_is_not_counted() -> None:
    """The wait for a collective counts no launch and no bytes."""
    assert count_launches(_graph((torch.ops._c10d_functional.wait_tensor.default, 32))) == Traffic()


def test_partial_sums_of_norms_count() -> None:
    """The backward of a layer norm counts one more launch for each sum of partial gradients of weight and bias."""
    grad, weight = torch.empty(1000, 4096, device="meta"), torch.empty(4096, device="meta")
    values: tuple[Tensor | None, ...] = (grad, weight, weight)
    each = Traffic(1, (2 * 256 * 4096 + 4096) * 4)
    assert second_step(torch.ops.autoshard.triton_layer_norm_backward.default, values) == each + each
    assert second_step(torch.ops.autoshard.triton_layer_norm_backward.default, (grad, None, None)) == Traffic()
    assert second_step(torch.ops.aten.native_layer_norm_backward.default, values) == Traffic()


def test_chunks_of_a_loss_count() -> None:
    """A linear layer to 8,192 classes with its loss works in two chunks, whose launches and bytes all count."""
    graph, ops = fx.Graph(), torch.ops.autoshard
    shapes = {"hidden": (10, 64), "weight": (8192, 64), "rows": (10,)}
    hidden, weight, rows = (graph.placeholder(name) for name in shapes)
    for node, shape in zip((hidden, weight, rows), shapes.values(), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    forward = graph.call_function(ops.triton_linear_cross_entropy.default, (hidden, weight, rows, -100, 0.0))
    arguments = (rows, hidden, weight, rows, rows, -100, 0.0)
    backward = graph.call_function(ops.triton_linear_cross_entropy_backward.default, arguments)
    floats = {"hidden": 640, "weight": 524_288, "logits": 81_920}
    assert chunk_steps(forward) == Traffic(3, 4 * (2 * floats["logits"] + floats["hidden"]))
    moved = 5 * floats["logits"] + 13 * floats["hidden"] + floats["weight"]
    assert chunk_steps(backward) == Traffic(11, 4 * moved)
    assert chunk_steps(hidden) == Traffic()


def test_a_llama_block_takes_half_the_launches() -> None:
    """A Llama block's forward and backward take at most half the launches and 70 % of the bytes."""
    before, after = count_both(llama_block(hidden=512, length=256))
    assert after.launches <= 0.5 * before.launches
    assert after.memory_bytes <= 0.7 * before.memory_bytes
