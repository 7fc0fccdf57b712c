"""The graph of specs, whose edges are single collectives."""

from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, Reduction
from autoshard.ir.spec_graph import moves_from, spec_graph, state_of
from autoshard.testing.strategies import meshes, shapes, specs


@given(st.data())
def test_graph_holds_every_spec(data: st.DataObject) -> None:
    """The graph has a node for every spec, and gives the spec for the node."""
    mesh, ndim = data.draw(meshes()), data.draw(st.integers(0, 3))
    spec = data.draw(specs(mesh, ndim, reductions=(Reduction.SUM, Reduction.MAX)))
    graph = spec_graph(mesh, ndim, (Reduction.MAX, Reduction.SUM))
    assert graph.specs[graph.node_of(spec)] == spec


@given(st.data())
def test_local_bytes(data: st.DataObject) -> None:
    """The graph's table of bytes agrees with the specs' local shapes."""
    mesh, shape = data.draw(meshes(max_axes=2)), data.draw(shapes())
    graph = spec_graph(mesh, len(shape), ())
    for node, size in enumerate(graph.local_bytes(shape, 1)):
        local = 1
        for extent in graph.specs[node].local_shape(shape, mesh):
            local *= extent
        assert size == local


def test_moves_change_the_minor_most_axis() -> None:
    """Only the minor-most axis of a dim can leave the dim, and an axis that arrives becomes the minor-most."""
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    moves = {str(move): state for move, state in moves_from(state_of(P(("a", "b")), 2), mesh, ())}
    assert sorted(moves) == [
        "all_gather(b, dim=0)",
        "all_to_all(b, dim=0, to_dim=1)",
        "slice(c, to_dim=0)",
        "slice(c, to_dim=1)",
    ]
    assert moves["slice(c, to_dim=0)"] == state_of(P(("a", "b", "c")), 2)


def test_moves_of_a_partial_axis() -> None:
    """A partial axis can be all-reduced or reduce-scattered with its own reduction, and nothing else."""
    mesh = Mesh({"a": 2})
    moves = list(moves_from(state_of(P(partial={"a": "sum"}), 1), mesh, tuple(Reduction)))
    assert [str(move) for move, _ in moves] == [
        "all_reduce(a, reduction=sum)",
        "reduce_scatter(a, to_dim=0, reduction=sum)",
    ]


def test_equal_moves_are_one_object() -> None:
    """Equal moves are one object: a graph of four axes has 30,784 edges and 104 moves."""
    graph = spec_graph(Mesh({"a": 2, "b": 2, "c": 2, "d": 2}), 4, (Reduction.SUM,))
    assert len(graph.moves) == 30_784
    assert len({id(move) for move in graph.moves}) == len(set(graph.moves)) == 104
