"""Collectives are waited for where their results are first read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.collectives import ALL_GATHER, WAIT, is_collective, is_wait
from passes.lowering.rewrite_phases import only_moves, only_returned
from passes.lowering.wait_late import WaitLate
from passes.verification.verify_phases import verify_phases
from tests.passes.lowering.overlapped import calls, differ, plain
from tests.passes.mutations import copy_of

PROGRAMS = [("gpt", "tensor"), ("llama", "ZeRO-3"), ("mixture", "two axes")]


@pytest.mark.parametrize(("family", "layout"), PROGRAMS)
def test_only_the_order_of_calls_changes(family: str, layout: str) -> None:
    """The pass keeps all calls and bits, and the order of collectives.

    Returned collectives that send the result of another collective may move.
    """
    phased = plain(family, layout)
    made = WaitLate()(phased)
    verify_phases(made)
    for before, after in ((phased.forward, made.forward), (phased.backward, made.backward)):
        assert sorted(calls(before)) == sorted(calls(after))
        assert _starts(before) == _starts(after)
    assert differ(family, layout, made) == []


def test_gradients_are_waited_for_when_the_backward_has_computed_them_all() -> None:
    """Behind the first wait for a returned gradient, the backward has no collective and no matrix product."""
    nodes = list(WaitLate()(plain("gpt", "tensor")).backward.graph.nodes)
    returned = [node for node in nodes if is_wait(node) and all(user.op == "output" for user in node.users)]
    assert len(returned) > 5
    behind = nodes[nodes.index(returned[0]) : -1]
    assert not [node for node in behind if is_collective(node) or "mm" in str(node.target)]


def test_a_product_of_two_gathered_values_stays_where_it_is() -> None:
    """A product of two gathered values keeps its place, since a later product would hold both values longer."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first, second = (graph.call_function(ALL_GATHER, (value, 2, "model")) for value in (x, y))
    waits = [graph.call_function(WAIT, (start,)) for start in (first, second)]
    product = graph.call_function(torch.ops.aten.mm.default, tuple(waits))
    cast = graph.call_function(torch.ops.aten._to_copy.default, (product,), {"dtype": torch.float32})
    other = graph.call_function(torch.ops.aten.exp.default, (x,))
    graph.output((cast, other))
    phased = plain("gpt", "tensor")
    made = WaitLate()(replace(phased, backward=fx.GraphModule({}, graph))).backward
    names = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
    assert names.index("aten.mm.default") < names.index("aten.exp.default")


def test_a_wait_behind_its_reader_is_refused() -> None:
    """A wait that stands behind a reader of its result is refused by `verify_phases`."""
    made = WaitLate()(plain("gpt", "tensor"))
    graph_module = copy_of(made.backward)
    wait = next(node for node in graph_module.graph.nodes if is_wait(node) and _reader(node).op != "output")
    _reader(wait).append(wait)
    with pytest.raises(VerificationError, match="before it is computed"):
        verify_phases(replace(made, backward=graph_module))


def _starts(graph_module: fx.GraphModule) -> list[tuple[str, object]]:
    nodes = [node for node in graph_module.graph.nodes if is_collective(node)]
    last = only_returned(graph_module.graph)
    return [(str(node.target), node.args[1:]) for node in nodes if not (node in last and _is_of_another(node))]


def _is_of_another(node: fx.Node) -> bool:
    """Whether a collective sends the result of another collective."""
    (operand,) = node.all_input_nodes
    while only_moves(operand) and not is_wait(operand):
        operand = operand.all_input_nodes[0]
    return is_wait(operand)


def _reader(node: fx.Node) -> fx.Node:
    return next(iter(node.users))
