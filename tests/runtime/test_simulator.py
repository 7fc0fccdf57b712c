"""The simulator runs a program on all ranks of a mesh in one process."""

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from autoshard.errors import AutoshardError, MeshError
from autoshard.ir.local import axis_index
from autoshard.ir.mesh import Mesh
from autoshard.runtime.simulator import simulate
from autoshard.testing.strategies import meshes
from tests.runtime.gloo_reshards import check_reshards
from tests.runtime.processes import report, run_checks

C10D = torch.ops._c10d_functional
ATEN = torch.ops.aten
MESH = Mesh({"data": 2, "model": 2})


def program(build: Callable[[fx.Graph, fx.Node], Any]) -> fx.GraphModule:
    """Return a program of one input, whose outputs `build` makes."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("value")))
    return fx.GraphModule(torch.nn.Module(), graph)


def collective(target: Any, *args: Any) -> fx.GraphModule:
    """Return a program that applies one collective to its input."""

    def build(graph: fx.Graph, value: fx.Node) -> tuple[fx.Node]:
        return (graph.call_function(C10D.wait_tensor.default, (graph.call_function(target, (value, *args)),)),)

    return program(build)


def run(graph_module: fx.GraphModule, values: Sequence[Any], mesh: Mesh = MESH) -> list[Any]:
    """Return each rank's first output, as nested lists."""
    return [value.tolist() for value in simulate(graph_module, mesh, [values])[0]]


RANKS = [torch.tensor([float(rank), 10.0 * rank]) for rank in range(4)]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", [[1, 10], [1, 10], [5, 50], [5, 50]]),
        ("avg", [[0.5, 5], [0.5, 5], [2.5, 25], [2.5, 25]]),
        ("max", [[1, 10], [1, 10], [3, 30], [3, 30]]),
        ("min", [[0, 0], [0, 0], [2, 20], [2, 20]]),
        ("product", [[0, 0], [0, 0], [6, 600], [6, 600]]),
    ],
)
def test_all_reduce(reduction: str, expected: list[list[float]]) -> None:
    """Each rank of a group gets the reduction of the group's operands."""
    assert run(collective(C10D.all_reduce.default, reduction, "model"), RANKS) == expected


def test_all_gather() -> None:
    """Each rank gets the group's operands, concatenated on dim 0 in the order of the group."""
    expected = [[0, 0, 2, 20], [1, 10, 3, 30]] * 2
    assert run(collective(C10D.all_gather_into_tensor.default, 2, "data"), RANKS) == expected


def test_reduce_scatter() -> None:
    """Each rank of a group gets its part of the sum, split along dim 0."""
    assert run(collective(C10D.reduce_scatter_tensor.default, "sum", 2, "data"), RANKS) == [
        [2],
        [4],
        [20],
        [40],
    ]


def test_all_to_all() -> None:
    """Piece j of rank i becomes piece i of rank j."""
    expected = [[0, 1], [0, 10], [2, 3], [20, 30]]
    assert run(collective(C10D.all_to_all_single.default, [1, 1], [1, 1], "model"), RANKS) == expected


def test_joined_axes_are_one_group() -> None:
    """Axes joined by a comma name the group of all their ranks, the last axis fastest."""
    gather = collective(C10D.all_gather_into_tensor.default, 4, "model,data")
    assert run(gather, [torch.tensor([rank]) for rank in range(4)]) == [[0, 2, 1, 3]] * 4


@given(st.data())
def test_reduce_scatter_and_all_gather_are_an_all_reduce(data: st.DataObject) -> None:
    """On any mesh and group, a reduce-scatter followed by an all-gather equals an all-reduce."""
    mesh = data.draw(meshes())
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    name, size = ",".join(axes), mesh.shards(axes)
    values = [torch.randint(9, (size * 2, 3)).float() for _ in range(mesh.size)]

    def build(graph: fx.Graph, value: fx.Node) -> tuple[fx.Node, ...]:
        piece = graph.call_function(C10D.reduce_scatter_tensor.default, (value, "sum", size, name))
        whole = graph.call_function(C10D.all_gather_into_tensor.default, (piece, size, name))
        return whole, graph.call_function(C10D.all_reduce.default, (value, "sum", name))

    halves, whole = simulate(program(build), mesh, [values])
    assert all(torch.equal(left, right) for left, right in zip(halves, whole, strict=True))


def test_axis_index_is_each_ranks_own() -> None:
    """`axis_index`, and a slice that starts at it, are computed for each rank apart."""

    def build(graph: fx.Graph, value: fx.Node) -> tuple[fx.Node, ...]:
        index = graph.call_function(axis_index, ("model",))
        start = graph.call_function(operator.mul, (index, 2))
        return (graph.call_function(ATEN.narrow.default, (value, 0, start, 2)),)

    assert run(program(build), [torch.arange(4)] * 4) == [[0, 1], [2, 3]] * 2


def test_copies_are_computed_once() -> None:
    """Ranks whose operands are the same objects get the same result object."""

    def build(graph: fx.Graph, value: fx.Node) -> tuple[fx.Node, ...]:
        return (graph.call_function(ATEN.exp.default, (value,)),)

    shared, own = torch.ones(2), torch.ones(2)
    (results,) = simulate(program(build), MESH, [[shared, own, shared, own]])
    assert results[0] is results[2]
    assert results[0] is not results[1]


def test_values_are_freed_after_their_last_use() -> None:
    """In a chain of five operators, at most three values exist at once."""

    alive: list[Any] = []
    counts: list[int] = []

    def build(graph: fx.Graph, value: fx.Node) -> tuple[fx.Node, ...]:
        for _ in range(5):
            value = graph.call_function(ATEN.exp.default, (value,))
        return (value,)

    def watch(node: fx.Node, values: Sequence[Tensor]) -> None:
        alive.extend(map(weakref.ref, values))
        counts.append(len({id(ref()) for ref in alive if ref() is not None}))

    simulate(program(build), MESH, [[torch.ones(2)] * 4], on_values=watch)
    assert max(counts) <= 3


def test_modules_methods_and_attributes() -> None:
    """Nodes of fx graphs that call modules or methods, or read attributes, run without gradients."""
    root = torch.nn.Module()
    root.linear = torch.nn.Linear(2, 2)
    root.scale = torch.tensor(2.0)
    graph = fx.Graph()
    value = graph.call_module("linear", (graph.placeholder("value"),))
    scaled = graph.call_method("mul", (value, graph.get_attr("scale")))
    graph.output((scaled, 3))
    x = torch.randn(1, 2)
    results, constant = simulate(fx.GraphModule(root, graph), MESH, [[x] * 4])
    assert torch.equal(results[0], root.linear(x) * 2)
    assert not results[0].requires_grad
    assert constant == [3, 3, 3, 3]


def test_wrong_number_of_inputs() -> None:
    """Fewer inputs than placeholders raise an error."""
    with pytest.raises(AutoshardError, match="has 1 placeholders"):
        simulate(collective(C10D.all_reduce.default, "sum", "model"), MESH, [])


def test_wrong_number_of_ranks() -> None:
    """An input with fewer values than ranks raises an error."""
    with pytest.raises(AutoshardError, match="a value per rank"):
        simulate(collective(C10D.all_reduce.default, "sum", "model"), MESH, [RANKS[:2]])


@pytest.mark.parametrize(
    ("graph_module", "match"),
    [
        (collective(C10D.all_reduce_.default, "sum", "model"), "does not know"),
        (collective(C10D.all_reduce.default, "premul_sum", "model"), "unknown reduce_op='premul_sum'"),
        (collective(C10D.all_reduce.default, "sum", 3), "group_name=3"),
        (collective(C10D.all_gather_into_tensor.default, 4, "model"), "a group of 4 ranks, but the group has 2"),
        (collective(C10D.reduce_scatter_tensor.default, "sum", 4, "data,model"), "4 does not divide dim 0"),
        (collective(C10D.all_to_all_single.default, [1, 1], [1, 2], "model"), "do not add up"),
        (collective(C10D.all_to_all_single.default, [2, 1], [1, 1], "model"), "differ from the sent sizes"),
    ],
)
def test_what_does_not_fit_is_refused(graph_module: fx.GraphModule, match: str) -> None:
    """A collective that is unknown, or does not fit the mesh or its operand, raises an error that says why."""
    with pytest.raises(AutoshardError, match=match):
        simulate(graph_module, MESH, [RANKS])


def test_unknown_axis() -> None:
    """A group of an axis that the mesh lacks raises an error that names the axis."""
    with pytest.raises(MeshError, match="has no axis 'stage'"):
        simulate(collective(C10D.all_reduce.default, "sum", "stage"), MESH, [RANKS])


def test_program_without_output() -> None:
    """A program without an output node raises an error."""
    graph = fx.Graph()
    graph.call_function(ATEN.exp.default, (graph.placeholder("value"),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(AutoshardError, match="has no output node"):
        simulate(module, MESH, [RANKS])


def test_emitted_reshards_agree_with_gloo() -> None:
    """Reshards on two Gloo processes equal the simulator bit by bit, for every pair of specs and type."""
    report(run_checks({"reshards": check_reshards}, ranks=2), "reshards")
