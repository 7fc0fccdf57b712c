"""Names of the operators and collectives of a graph, for profiles."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.graphs.name_ranges import name_ranges, phase_of, range_name

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def graph_of() -> fx.GraphModule:
    """A product, a view and an all-reduce in the module "mlp", and an operator without metadata."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(_aten.mm.default, (x, x))
    flat = graph.call_function(_aten.view.default, (product, [-1]))
    for node in (product, flat):
        node.meta = {"phase": "forward", "module": "mlp"}
    started = graph.call_function(_c10d.all_reduce.default, (flat, "sum", "data,model/gradients"))
    started.meta = {"phase": "forward", "module": "mlp"}
    waited = graph.call_function(_c10d.wait_tensor.default, (started,))
    graph.output(graph.call_function(_aten.add_.Tensor, (waited, 1)))
    return fx.GraphModule({}, graph)


def names_of(module: fx.GraphModule) -> list[str]:
    return [name for node in module.graph.nodes if (name := range_name(node, phase_of(module)))]


def test_nodes_have_the_names_of_modules_and_axes() -> None:
    """Calls are named by phase, module and operator, collectives by axes, waits by their collective, and views
    have no name."""
    assert names_of(graph_of()) == [
        "forward: mlp mm",
        "communication over data, model: all-reduce of mlp",
        "communication over data, model: waiting for the all-reduce of mlp",
        "forward: add",
    ]


def test_a_sum_that_belongs_to_a_collective() -> None:
    """A call with the metadata of a collective is named as part of this collective."""
    module = graph_of()
    *_, last = (node for node in module.graph.nodes if node.op == "call_function")
    last.meta = {"phase": "forward", "collective": "reduce_scatter_tensor", "group": "data/gradients"}
    assert range_name(last) == "communication over data: adding up the reduce-scatter"


def test_named_graphs_compute_the_same() -> None:
    """Each named call runs between the begin and the end of its range, and the result does not change."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(_aten.mm.default, (x, x))
    graph.output(graph.call_function(_aten.neg.default, (product,)))
    module, log = fx.GraphModule({}, graph), list[str]()
    expected = module(torch.ones(2, 2))

    def begin(name: str) -> str:
        log.append(f"begin {name}")
        return name

    name_ranges(module, begin, lambda name: log.append(f"end {name}"))
    assert torch.equal(module(torch.ones(2, 2)), expected)
    names = ("inputs and outputs: mm", "inputs and outputs: neg")
    assert log == [f"{word} {name}" for name in names for word in ("begin", "end")]
