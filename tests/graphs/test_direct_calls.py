"""Torch functions and methods that replace calls of operators give the same results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import fx

from autoshard.graphs.direct_calls import FUNCTIONS, METHODS, call_directly
from autoshard.rules.local import stride_free
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.tracing import trace
from tests.tracing.running import run_program

aten = torch.ops.aten
x, y = torch.linspace(0.5, 3, 24).view(4, 6), torch.linspace(-1, 2, 24).view(4, 6)
square, batch = torch.linspace(-1, 1, 36).view(6, 6), torch.linspace(-1, 1, 48).view(2, 4, 6)

CALLS: Mapping[Any, tuple[Any, ...]] = {
    aten.add.Tensor: (x, y),
    aten.add.out: (x, y),
    aten.addmm.default: (y, x, square),
    aten.amax.default: (x, [1], True),
    aten.bmm.default: (batch, batch.transpose(1, 2)),
    aten.cat.default: ([x, y], 1),
    aten.clone.default: (x.t(),),
    aten.contiguous.default: (x.t(),),
    aten.copy_.default: (x, y),
    aten.cos.default: (x,),
    aten.div.Scalar: (x, 3),
    aten.div.Tensor: (x, y),
    aten.exp.default: (x,),
    aten.expand.default: (x, [2, 4, 6]),
    aten.mean.dim: (x, [-1], True),
    aten.mm.default: (x, square),
    aten.mm.out: (x, square),
    aten.mul.Scalar: (x, -0.5),
    aten.mul.Tensor: (x, 2),
    aten.native_layer_norm.default: (x, [6], y[0], y[1], 1e-5),
    aten.neg.default: (x,),
    aten.new_empty.default: (x, [0, 3]),
    aten.permute.default: (batch, [2, 0, 1]),
    aten.pow.Tensor_Scalar: (x, 2),
    aten.reshape.default: (x.t(), [3, 8]),
    aten.rsqrt.default: (x,),
    aten.sin.default: (x,),
    aten.split_with_sizes.default: (x, [1, 5], 1),
    aten.sub.Tensor: (x, y),
    aten.sum.IntList_out: (batch, [0, 1], True),
    aten.sum.dim_IntList: (x, [0]),
    aten.t.default: (x,),
    aten.tanh.default: (x,),
    aten.transpose.int: (batch, 0, 2),
    aten.unsqueeze.default: (x, 1),
    aten.view.default: (x, [2, 12]),
}

OUT: Mapping[Any, tuple[int, ...]] = {aten.add.out: (4, 6), aten.mm.out: (4, 6), aten.sum.IntList_out: (1, 1, 6)}


def calling(operator: Any) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph of one call, whose tensors are inputs, and copies of the tensors."""
    graph, tensors = fx.Graph(), []

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value.clone())
        return graph.placeholder(f"input_{len(tensors)}")

    args = tuple(given(value) for value in CALLS[operator])
    out = {"out": given(torch.zeros(OUT[operator]))} if operator in OUT else {}
    graph.output(graph.call_function(operator, args, out))
    return fx.GraphModule(torch.nn.Module(), graph), tensors


@pytest.mark.parametrize("operator", [*METHODS, *FUNCTIONS], ids=str)
def test_calls_do_the_same(operator: Any) -> None:
    """Each replacement gives results with equal bits and strides, which alias the same inputs, and changes the
    inputs equally."""
    graph_module, tensors = calling(operator)
    expected = graph_module(*tensors)
    expected_tensors = tensors
    graph_module, tensors = calling(operator)
    call_directly(graph_module)
    assert not graph_module.graph.find_nodes(op="call_function", target=operator)
    found = graph_module(*tensors)
    assert all(map(torch.equal, tensors, expected_tensors))
    single = isinstance(expected, torch.Tensor)
    for one, other in zip([found] if single else found, [expected] if single else expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride(), one.storage_offset()) == (other.dtype, other.stride(), other.storage_offset())
        assert _owners(one, tensors) == _owners(other, expected_tensors)


@given(programs(max_blocks=2))
def test_drawn_programs_keep_their_bits(drawn: DrawnProgram) -> None:
    """Drawn programs give the same bits when their calls are replaced.

    Views in them take operands of any strides, as in every local program, because fake tensors have other strides
    than some kernels' results.
    """
    program = trace(drawn.model, drawn.inputs, {})
    for node in program.graph.nodes:
        node.target = stride_free(node.target)
    program.graph_module.recompile()
    expected = run_program(program, drawn.model, drawn.inputs)
    call_directly(program.graph_module)
    for slot, value in run_program(program, drawn.model, drawn.inputs).items():
        torch.testing.assert_close(value, expected[slot], rtol=0, atol=0, equal_nan=True)


def test_a_number_first_stays() -> None:
    """A multiplication whose first operand is a number works as before, because torch's functions need
    a tensor there."""
    graph = fx.Graph()
    graph.output(graph.call_function(aten.mul.Tensor, (2, graph.placeholder("x"))))
    graph_module = fx.GraphModule(torch.nn.Module(), graph)
    call_directly(graph_module)
    assert torch.equal(graph_module(x), 2 * x)


def _owners(value: torch.Tensor, tensors: list[torch.Tensor]) -> list[bool]:
    return [value.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for tensor in tensors]
