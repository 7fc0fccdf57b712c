"""Graphs that write their inputs are accepted if right, and refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.graphs.write_in_place import write_in_place
from passes.verification.verify_in_place import verify_in_place
from tests.graphs.test_write_in_place import BUILDERS, HYPER, _graph
from tests.passes.in_place import written_of
from tests.passes.layouts import phased_of
from tests.passes.mutations import copy_of

aten = torch.ops.aten
WRITTEN = {0: 0, 1: 2}
"""The first result is written over p, the second over m."""


def in_place(kind: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A functional graph of a kind, and the graph that writes two of its results over inputs."""
    functional = _graph("p g m hyper", BUILDERS[kind])
    return functional, write_in_place(functional, WRITTEN)


@pytest.mark.parametrize("kind", BUILDERS)
def test_graphs_that_write_in_place_are_proven(kind: str) -> None:
    """Right graphs are accepted, with both results written in place and with only one written in place."""
    functional, writing = in_place(kind)
    verify_in_place(functional, writing, WRITTEN)
    verify_in_place(functional, write_in_place(functional, {1: 2}), {1: 2})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "layout"), [("lstm", "ZeRO-1"), ("recommender", "ZeRO-3"), ("graph", "two axes")])
def test_updates_of_lowered_programs_are_proven(family: str, layout: str) -> None:
    """Updates of lowered programs, rewritten to write in place, are accepted."""
    phased = phased_of(family, layout)
    assert phased.update is not None
    written = written_of(phased)
    verify_in_place(phased.update, write_in_place(phased.update, written), written)


# What may go wrong.


def without_copies(graph: fx.Graph) -> list[Callable[[], None]]:
    """Changes that each remove a copy of a value that is read later, or a copy into an overwritten input."""

    def drop(node: Any) -> None:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    copies = (aten.clone.default, aten.copy_.default)
    return [lambda node=node: drop(node) for node in graph.nodes if node.target in copies]


def moved_up(graph: fx.Graph) -> list[Callable[[], None]]:
    """Changes that each move a writing call one place earlier."""

    def writes(node: fx.Node) -> bool:
        return node.op == "call_function" and str(node.target).partition(".default")[0].endswith("_")

    def may_move(node: fx.Node) -> bool:
        return writes(node) and node.prev.op == "call_function" and node.prev not in node.all_input_nodes

    return [lambda node=node: node.prev.prepend(node) for node in graph.nodes if may_move(node)]


def with_other_operands(graph: fx.Graph) -> list[Callable[[], None]]:
    """Changes that each replace an operand of a call by another earlier value or input."""
    found: list[Callable[[], None]] = []
    nodes = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    for index, node in enumerate(nodes):
        for operand, other in product(node.all_input_nodes, nodes[:index]):
            if other is not operand and other.name != "hyper" and operand.name != "hyper" and node.op != "output":
                found.append(lambda node=node, a=operand, b=other: node.replace_input_with(a, b))
    return found


def with_other_results(graph: fx.Graph) -> list[Callable[[], None]]:
    """Changes that each return an input in place of a result."""
    output = graph.output_node()
    nodes = [node for node in graph.nodes if node.op == "placeholder" and node.name != "hyper"]
    return [
        lambda result=result, node=node: output.replace_input_with(result, node)
        for result, node in product(output.all_input_nodes, nodes)
        if result is not node
    ]


@pytest.mark.parametrize("change", [without_copies, moved_up, with_other_operands, with_other_results])
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_wrong_graph_that_writes_is_refused(kind: str, change: Callable[..., list[Callable[[], None]]]) -> None:
    """Every change after which the results or the inputs hold other numbers is refused."""
    functional, writing = in_place(kind)
    expected = observe(writing, kind)
    for number in range(len(change(copy_of(writing).graph))):
        wrong = copy_of(writing)
        change(wrong.graph)[number]()
        try:
            verify_in_place(functional, wrong, WRITTEN)
        except VerificationError:
            continue
        assert observe(wrong, kind) == expected, f"{number}: {wrong.graph}"


def test_a_value_read_after_it_was_written_over_is_named() -> None:
    """A graph that reads a value after its memory was written over is refused."""
    functional, writing = in_place("read later")
    wrong = copy_of(writing)
    without_copies(wrong.graph)[0]()
    with pytest.raises(VerificationError, match="after its memory was written over"):
        verify_in_place(functional, wrong, WRITTEN)


def observe(graph_module: fx.GraphModule, kind: str) -> list[list[float]] | str:
    """Return a graph's results and its inputs after the run as numbers, or the error of a failing graph."""
    torch.manual_seed(0)
    values: list[Tensor] = [torch.randn(4, 3) for _ in range(3)]
    if kind == "slice":
        values[1:] = [value[:2].clone() for value in values[1:]]
    values.append(HYPER.clone())
    try:
        results = fx.Interpreter(fx.GraphModule(graph_module, graph_module.graph)).run(*values)
    except (RuntimeError, IndexError) as error:
        return str(error)
    return [item.flatten().tolist() for item in (*results, *values)]


_C10D = torch.ops._c10d_functional
_SENDING = {
    "gathered": (_C10D.all_gather_into_tensor.default, 2, "data"),
    "reduced": (_C10D.all_reduce.default, "sum", "data"),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("sending", _SENDING)
def test_what_is_sent_is_not_written_over_before_it_arrived(sending: str, is_late: bool) -> None:
    """A parameter that a collective sends may be written over only after the collective's wait.

    An all-reduce waits too, although torch sends a copy, because three Gloo ranks or more use an all-to-all of views.
    """
    target, *rest = _SENDING[sending]

    def build(writes: bool) -> fx.GraphModule:
        graph = fx.Graph()
        p, g = (graph.placeholder(name) for name in "pg")
        sent = graph.call_function(target, (p, *rest))
        if not is_late:
            found = graph.call_function(_C10D.wait_tensor.default, (sent,))
        result = graph.call_function(aten.add.Tensor, (p, g))
        if writes:
            graph.call_function(aten.copy_.default, (p, result))
        if is_late:
            found = graph.call_function(_C10D.wait_tensor.default, (sent,))
        graph.output((p if writes else result, found))
        return fx.GraphModule({}, graph)

    if is_late:
        with pytest.raises(VerificationError, match=r"waits for .* was written over meanwhile"):
            verify_in_place(build(writes=False), build(writes=True), {0: 0})
    else:
        verify_in_place(build(writes=False), build(writes=True), {0: 0})


def test_a_value_read_before_it_is_computed_is_named() -> None:
    """A graph that reads a value before it is computed is refused."""
    functional, writing = in_place("read later")
    wrong = copy_of(writing)
    call = next(node for node in wrong.graph.nodes if node.op == "call_function" and node.users)
    next(iter(call.users)).append(call)
    with pytest.raises(VerificationError, match="before it is computed"):
        verify_in_place(functional, wrong, WRITTEN)
