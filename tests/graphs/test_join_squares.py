"""Sums of squares that are added together become one call."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, fx

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.graphs.join_squares import join_squares

aten, ops = torch.ops.aten, torch.ops.autoshard
X = [torch.linspace(-1, 2, size) for size in (6, 4, 5, 3)]


def graph_of(
    count: int = len(X), *, other: bool = False, shared: bool = False, doubled: bool = False
) -> fx.GraphModule:
    """The sum of the squares of some inputs, with options for another addend, a sum that is also a result, and a
    doubled sum."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(count)]
    squares = [graph.call_function(ops.sum_of_squares.default, (item,)) for item in inputs]
    if other:
        squares.insert(1, graph.call_function(aten.sum.default, (inputs[0],)))
    total, sums = squares[0], []
    for item in squares[1:]:
        total = graph.call_function(aten.add.Tensor, (total, item))
        sums.append(total)
    if doubled:
        total = graph.call_function(aten.add.Tensor, (total, total))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2) if node.op == "placeholder" else torch.empty(())
    graph.output((total, sums[0], squares[-1]) if shared else (total,))
    return fx.GraphModule({}, graph)


def targets(graph_module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("doubled", [False, True])
def test_the_results_stay(other: bool, shared: bool, doubled: bool) -> None:
    """Joining the sums does not change the graph's results, also when a partial sum is a result itself."""
    before, after = (graph_of(other=other, shared=shared, doubled=doubled) for _ in range(2))
    join_squares(after)
    after.graph.lint()
    torch.testing.assert_close(after(*X), before(*X))


def test_one_call_for_all() -> None:
    """Four sums of squares and three additions become one call, and one addition stays if there is another addend."""
    found = graph_of()
    join_squares(found)
    assert targets(found) == ["autoshard.sum_of_all_squares.default"]
    found = graph_of(other=True)
    join_squares(found)
    assert targets(found).count("aten.add.Tensor") == 1


def test_more_sums_than_pythons_limit_on_recursion() -> None:
    """More sums of squares than Python's limit on recursion are joined."""
    found = graph_of(2 * sys.getrecursionlimit())
    join_squares(found)
    assert targets(found) == ["autoshard.sum_of_all_squares.default"]


def test_one_sum_of_squares_stays() -> None:
    """A graph with one sum of squares is not changed."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    square = graph.call_function(ops.sum_of_squares.default, (x,))
    total = graph.call_function(aten.add.Tensor, (square, x))
    for node in (x, square, total):
        node.meta["val"] = torch.empty(())
    graph.output((total,))
    found = fx.GraphModule({}, graph)
    before = targets(found)
    join_squares(found)
    assert targets(found) == before


def values(dtype: torch.dtype) -> list[Tensor]:
    return [item.to(dtype) for item in X]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_operator_adds_the_squares(dtype: torch.dtype) -> None:
    """The operator equals the sum of single sums of squares, in float32 or, if an operand is float64, in float64."""
    found = ops.sum_of_all_squares(values(dtype))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found, sum(ops.sum_of_squares(x) for x in values(dtype)))
    mixed = [*values(dtype), *values(torch.float64)]
    torch.testing.assert_close(ops.sum_of_all_squares(mixed), sum(ops.sum_of_squares(x).double() for x in mixed))
    for some in (values(dtype), mixed):
        torch.library.opcheck(ops.sum_of_all_squares.default, (some,), test_utils=("test_schema", "test_faketensor"))
