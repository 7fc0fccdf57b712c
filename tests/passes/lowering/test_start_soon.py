"""A collective of a value, that is, of no parameter or weight gradient, starts once its input exists.

Independent calls compute meanwhile.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoshard.ir.collectives import is_collective
from autoshard.ir.communicators import Purpose
from passes.lowering.overlap import overlapped
from passes.lowering.start_soon import StartSoon, _order
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes
from passes.verification.verify_phases import verify_phases
from tests.passes.lowering.overlapped import calls, differ, plain


def products_beside(graph_module: fx.GraphModule) -> int:
    """Count the products between the start and the wait of each collective of values."""
    nodes = list(graph_module.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    products = [place for place, node in enumerate(nodes) if "mm" in str(node.target)]
    starts = [node for node in nodes if is_collective(node) and "/" not in str(node.args[-1])]
    spans = [(places[start], min(places[user] for user in start.users)) for start in starts]
    return sum(first < product < last for first, last in spans for product in products)


@pytest.mark.parametrize(("family", "layout"), [("gpt", "tensor"), ("llama", "tensor and sequence")])
def test_gradients_of_weights_are_computed_beside_those_of_inputs(family: str, layout: str) -> None:
    """Under tensor parallelism, more gradients of weights are computed during collectives, and all bits stay."""
    late = WaitLate()(plain(family, layout))
    made = StartSoon()(late)
    verify_phases(made)
    assert differ(family, layout, made) == []
    assert products_beside(made.backward) > products_beside(late.backward)
    for before, after in ((late.forward, made.forward), (late.backward, made.backward)):
        assert sorted(calls(before)) == sorted(calls(after))


def test_one_value_at_the_end_does_not_bring_the_chain_ahead_of_reductions() -> None:
    """If only the last value of a chain is sent, the chain is not computed ahead of the reductions beside it."""
    graph, functional = fx.Graph(), torch.ops._c10d_functional
    value = graph.placeholder("dy")
    for _ in range(20):
        weight = graph.call_function(torch.ops.aten.mm.default, (value, value))
        graph.call_function(functional.all_reduce.default, (weight, "sum", f"data/{Purpose.GRADIENTS}"))
        value = graph.call_function(torch.ops.aten.relu.default, (value,))
    start = graph.call_function(functional.all_reduce.default, (value, "sum", "data"))
    graph.output(graph.call_function(functional.wait_tensor.default, (start,)))
    kinds = [str(node.target).split(".")[1] for node in _order(graph) if node.op == "call_function"]
    reductions = [place for place, kind in enumerate(kinds) if kind == "all_reduce"]
    assert [kinds[:place].count("relu") for place in reductions[:12]] == [*range(12)]  # as they stood
    assert kinds.index("wait_tensor") - reductions[-9] > 8  # the last few are beside the value's own


def test_inputs_of_a_phase_keep_their_order() -> None:
    """The pass keeps the order of the inputs of each phase."""
    phased = WaitLate()(plain("gpt", "tensor"))
    for before, after in ((item, getattr(StartSoon()(phased), name)) for name, item in phased.phases.items()):
        names = [[node.name for node in phase.graph.find_nodes(op="placeholder")] for phase in (before, after)]
        assert names[0] == names[1]


def test_memory_stays() -> None:
    """The overlap passes do not raise the peak memory."""
    phased = plain("gpt", "tensor")
    assert peak_bytes(overlapped(phased)) <= peak_bytes(phased)
