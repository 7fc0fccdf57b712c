"""Which results of a graph may be overwritten, because no other value that is still read shares their memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from autoshard.graphs.owned_results import owned_results

aten = torch.ops.aten
Call = Callable[..., fx.Node]
WHOLE = 4


def _fresh(call: Call, x: fx.Node) -> list[fx.Node]:
    return [call(aten.neg.default, x), call(aten.view.default, call(aten.exp.default, x), [2, 2])]


def _given(call: Call, x: fx.Node) -> list[fx.Node]:
    return [x, call(aten.view.default, x, [2, 2]), call(aten.type_as.default, x, x)]


def _twice(call: Call, x: fx.Node) -> list[fx.Node]:
    made = call(aten.neg.default, x)
    return [made, call(aten.view.default, made, [2, 2])]


def _parts(call: Call, x: fx.Node) -> list[fx.Node]:
    """Two parts of a bucket, which do not overlap."""
    parts = call(aten.split_with_sizes.default, call(aten.neg.default, x), [1, 3])
    return [call(operator.getitem, parts, 0), call(aten.view.default, call(operator.getitem, parts, 1), [3, 1])]


def _part_and_whole(call: Call, x: fx.Node) -> list[fx.Node]:
    made = call(aten.neg.default, x)
    return [made, call(operator.getitem, call(aten.split_with_sizes.default, made, [1, 3]), 0)]


def _two_splits(call: Call, x: fx.Node) -> list[fx.Node]:
    made = call(aten.neg.default, x)
    splits = (call(aten.split_with_sizes.default, made, sizes) for sizes in ([1, 3], [2, 2]))
    return [call(operator.getitem, parts, 0) for parts in splits]


def _parts_of_a_part(call: Call, x: fx.Node) -> list[fx.Node]:
    outer = call(aten.split_with_sizes.default, call(aten.neg.default, x), [1, 3])
    inner = call(aten.split_with_sizes.default, call(operator.getitem, outer, 1), [1, 2])
    return [call(operator.getitem, outer, 0), *(call(operator.getitem, inner, index) for index in (0, 1))]


def _part_of_what_is_given(call: Call, x: fx.Node) -> list[fx.Node]:
    return [call(operator.getitem, call(aten.split_with_sizes.default, x, [1, 3]), 0)]


def _of_several(call: Call, x: fx.Node) -> list[fx.Node]:
    """Two results of one operator, which do not overlap."""
    made = call(aten.topk.default, x, 2)
    return [call(operator.getitem, made, index) for index in (0, 1)]


def _expanded(call: Call, x: fx.Node) -> list[fx.Node]:
    return [call(aten.expand.default, call(aten.sum.default, x), [3])]


def _bucket(call: Call, x: fx.Node) -> list[fx.Node]:
    """The two parts of a value that an all-reduce sums in place."""
    sent = call(torch.ops._c10d_functional.all_reduce.default, call(aten.cat.default, [x, x]), "sum", "data")
    parts = call(aten.split_with_sizes.default, call(torch.ops._c10d_functional.wait_tensor.default, sent), [4, 4])
    return [call(operator.getitem, parts, index) for index in (0, 1)]


CASES: dict[str, tuple[Callable[[Call, fx.Node], list[fx.Node]], list[bool]]] = {
    "fresh": (_fresh, [True, True]),
    "given": (_given, [False] * 3),
    "twice": (_twice, [False, False]),
    "parts": (_parts, [True, True]),
    "part and whole": (_part_and_whole, [False, False]),
    "two splits": (_two_splits, [False, False]),
    "parts of a part": (_parts_of_a_part, [False, False, False]),
    "part of what is given": (_part_of_what_is_given, [False]),
    "of several": (_of_several, [True, True]),
    "expanded": (_expanded, [False]),
    "bucket": (_bucket, [True, True]),
}


def graph_of(build: Callable[[Call, fx.Node], list[fx.Node]]) -> fx.GraphModule:
    """A graph of these calls with fake values, on one input of 4 elements."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def value_of(argument: Any) -> Any:
        return fx.map_arg(argument, lambda node: node.meta["val"])

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            is_sent = "all_reduce" in str(target)
            node.meta["val"] = torch.empty(8) if is_sent else target(*value_of(args))
        return node

    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(WHOLE)
    graph.output(tuple(build(call, x)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("name", CASES)
def test_what_nothing_else_lies_in_is_owned(name: str) -> None:
    """A result is owned unless an input, another result, or several of its own elements share its memory."""
    build, expected = CASES[name]
    assert list(owned_results(graph_of(build).graph)) == expected


@pytest.mark.parametrize("name", [name for name in CASES if name != "bucket"])
def test_writing_over_what_is_owned_changes_nothing_else(name: str) -> None:
    """Overwriting an owned result changes neither inputs nor other results."""
    graph_module = graph_of(CASES[name][0])
    x = torch.rand(WHOLE)
    before = x.clone()
    results = fx.Interpreter(graph_module).run(x)
    owned = owned_results(graph_module.graph)
    for index, is_owned in enumerate(owned):
        if is_owned:
            others: list[Tensor] = [item.clone() for item in results]
            results[index].add_(1)
            assert torch.equal(results[index], others[index] + 1)
            assert all(torch.equal(results[i], others[i]) for i in range(len(results)) if i != index)
    assert torch.equal(x, before)
