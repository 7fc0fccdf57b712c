"""Partition specs: text, placements, local shapes, and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from autoshard.errors import InvalidSpecError
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, PartitionSpec, Reduction
from autoshard.testing.strategies import meshes, shapes, specs


@given(st.data())
def test_repr_and_parse_round_trip(data: st.DataObject) -> None:
    """`parse` reads the text that `repr` prints."""
    spec = data.draw(specs(data.draw(meshes()), data.draw(st.integers(0, 4))))
    assert PartitionSpec.parse(repr(spec)) == spec


@given(st.data())
def test_placements_round_trip(data: st.DataObject) -> None:
    """Specs whose axes are in the mesh's order, converted to placements and back, are equal."""
    mesh = data.draw(meshes())
    spec = data.draw(specs(mesh, data.draw(st.integers(0, 4)), mesh_order=True))
    assert PartitionSpec.from_placements(spec.to_placements(mesh), mesh) == spec


@given(st.data())
def test_local_shapes_cover_the_tensor(data: st.DataObject) -> None:
    """Local sizes times shards are at least each dim's size, and equal to it if the spec is even."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    spec = data.draw(specs(mesh, len(shape)))
    for dim, (size, local) in enumerate(zip(shape, spec.local_shape(shape, mesh), strict=True)):
        assert local * mesh.shards(spec.axes_of(dim)) >= size
    if spec.is_even(shape, mesh):
        covered = (n * mesh.shards(spec.axes_of(d)) for d, n in enumerate(spec.local_shape(shape, mesh)))
        assert tuple(covered) == shape


def test_trailing_none_is_dropped() -> None:
    """Specs that differ in a trailing None, or write one axis as a tuple, are equal and have equal hashes."""
    assert P("data", None) == P("data")
    assert hash(P("data", None)) == hash(P(("data",)))


def test_properties() -> None:
    """A spec gives the dim and the reduction of each axis."""
    spec = P(("data", "model"), None, partial={"expert": "max"})
    assert spec.axes == ("data", "model", "expert")
    assert (spec.dim_of("model"), spec.dim_of("expert")) == (0, None)
    assert spec.reduction_over("expert") is Reduction.MAX
    assert spec.is_partial
    assert not spec.is_fully_replicated


def test_to_placements() -> None:
    """A spec converts to one placement for each axis of the mesh."""
    mesh = Mesh({"data": 2, "model": 2, "expert": 2})
    expected = (Shard(1), Replicate(), Partial("sum"))
    assert P(None, "data", partial={"expert": "sum"}).to_placements(mesh) == expected


def test_to_placements_refuses_another_order() -> None:
    """A spec whose axes split a dim in another order than the mesh's is refused in a conversion to placements."""
    with pytest.raises(InvalidSpecError, match="in an order other than"):
        P(("model", "data")).to_placements(Mesh({"data": 2, "model": 2}))


@pytest.mark.parametrize("spec", [P("other"), P(("other", "data")), P(partial={"other": "sum"})])
def test_placements_need_the_axes_of_a_spec(spec: P) -> None:
    """A spec with an axis that the mesh lacks is refused in a conversion to placements."""
    with pytest.raises(InvalidSpecError, match="names mesh axis 'other'"):
        spec.to_placements(Mesh({"data": 2, "model": 2}))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_is_one_placement_for_each_axis(count: int) -> None:
    """Too few or too many placements are refused by their number."""
    with pytest.raises(InvalidSpecError, match=f"There are {count} placements for the 2 axes"):
        P.from_placements([Replicate()] * count, Mesh({"data": 2, "model": 2}))


def test_axis_used_twice() -> None:
    """An axis that splits a dim and is also partial is refused."""
    with pytest.raises(InvalidSpecError, match="'data' twice"):
        P("data", partial={"data": "sum"})


def test_unknown_reduction() -> None:
    """A reduction other than sum, product, minimum and maximum is refused."""
    with pytest.raises(InvalidSpecError, match="unknown reduction"):
        P(partial={"data": "mean"})


def test_partial_over_no_axis() -> None:
    """A key of `partial` that is no name is refused."""
    with pytest.raises(InvalidSpecError, match=r"names axis 1; an axis is a name such as 'data'"):
        P(partial={"data": "sum", 1: "sum"})  # type: ignore[dict-item]


def test_dim_that_is_no_axis() -> None:
    """A dim that is a number within a tuple, or a set of names, is refused."""
    for wrong in ((1,), {"data", "model"}, frozenset(["data"])):
        with pytest.raises(InvalidSpecError, match="a dim is an axis name"):
            P(wrong)  # type: ignore[arg-type]


def test_unknown_axis() -> None:
    """`check` names the axis that the mesh lacks."""
    with pytest.raises(InvalidSpecError, match="names mesh axis 'model'"):
        P("model").check(Mesh({"data": 2}), 1)


def test_too_many_dims() -> None:
    """`check` refuses a spec with more dims than the tensor."""
    with pytest.raises(InvalidSpecError, match="splits 2 dims"):
        P(None, "data").check(Mesh({"data": 2}), 1)


@pytest.mark.parametrize(
    "text", ["P(", "Q()", "P(x)", "3", "P(other=1)", "P(" + "(" * 4000 + ")" * 4001, "P(" + "-" * 9000]
)
def test_unreadable_text(text: str) -> None:
    """Text that is no spec is refused, also with deep nesting."""
    with pytest.raises(InvalidSpecError, match="cannot be read"):
        PartitionSpec.parse(text)


def test_a_text_without_end() -> None:
    """A text of a million characters is refused by its length."""
    with pytest.raises(InvalidSpecError, match="has 1000003 characters; write at most 10000"):
        PartitionSpec.parse("P(" + "(" * 1_000_000 + ")")


@pytest.mark.parametrize("placement", [_StridedShard(0, split_factor=2), _MaskPartial("sum")])
def test_placements_that_no_spec_describes_are_refused(placement: Placement) -> None:
    """A strided shard and a masked partial sum are refused in a conversion to a spec."""
    with pytest.raises(InvalidSpecError, match=r"on mesh axis 'data', which no spec describes\. Redistribute"):
        PartitionSpec.from_placements([placement], Mesh({"data": 4}))
