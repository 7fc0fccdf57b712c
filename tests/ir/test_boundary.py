"""Cutting global tensors into local tensors, joining them again, and comparison with DTensor's cuts."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.errors import AutoshardError, InvalidSpecError
from autoshard.ir.boundary import (
    matches_dtensor,
    pad_local,
    shard,
    shard_all,
    unpad_local,
    unpadded_shape,
    unshard,
)
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, PartitionSpec
from autoshard.testing.strategies import meshes, shapes, specs

MESH = Mesh({"data": 2, "model": 2})


@given(st.data())
def test_unshard_is_the_inverse_of_shard(data: st.DataObject) -> None:
    """Joining the local tensors of all ranks gives the value, whatever the padding holds."""
    mesh, shape = data.draw(meshes()), data.draw(shapes(min_size=0))
    spec = data.draw(specs(mesh, len(shape)))
    value = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    locals_ = [shard(value, spec, mesh, rank, padding=math.nan) for rank in range(mesh.size)]
    assert all(local.shape == spec.local_shape(shape, mesh) for local in locals_)
    assert torch.equal(unshard(locals_, spec, mesh, shape), value)
    assert torch.equal(unshard(locals_, spec, mesh, shape, check=True), value)


@given(st.data())
def test_shard_all_agrees_with_shard(data: st.DataObject) -> None:
    """`shard_all` gives each rank the tensor that `shard` gives, and equal pieces are one object."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    spec = data.draw(specs(mesh, len(shape)))
    value = torch.randn(shape)
    locals_ = shard_all(value, spec, mesh)
    assert all(torch.equal(local, shard(value, spec, mesh, rank)) for rank, local in enumerate(locals_))
    assert len(set(map(id, locals_))) <= mesh.shards(spec.axes)


def nested_chunk(value: torch.Tensor, spec: PartitionSpec, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return DTensor's part of a rank: each axis chunks the part of the earlier axes."""
    for axis, index in mesh.coordinates(rank).items():
        dim = spec.dim_of(axis)
        if dim is not None:
            chunks = value.chunk(mesh.axis_size(axis), dim) if value.shape[dim] else ()
            value = chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)
    return value


@given(st.data())
def test_padding_a_chunk_gives_the_shard(data: st.DataObject) -> None:
    """If DTensor cuts a tensor alike, padding its chunk gives our shard, and unpadding our shard gives the chunk."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    spec = data.draw(specs(mesh, len(shape), reductions=(), mesh_order=True))
    value = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    chunks = [nested_chunk(value, spec, mesh, rank) for rank in range(mesh.size)]
    real = [unpadded_shape(spec, mesh, shape, rank) for rank in range(mesh.size)]
    assert matches_dtensor(spec, shape, mesh) == (real == [tuple(chunk.shape) for chunk in chunks])
    if not matches_dtensor(spec, shape, mesh):
        return
    for rank, chunk in enumerate(chunks):
        local = shard(value, spec, mesh, rank)
        assert torch.equal(pad_local(chunk, spec, mesh, shape), local)
        assert torch.equal(unpad_local(local, spec, mesh, shape, rank), chunk)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
@example(9, 2, 2)
def test_two_axes_on_one_dim_may_differ_from_dtensor(size: int, first: int, second: int) -> None:
    """`matches_dtensor` is true exactly if our pieces have the sizes of DTensor's chunks."""
    mesh, spec = Mesh({"data": first, "model": second}), P(("data", "model"))
    value = torch.arange(size)
    chunks = [nested_chunk(value, spec, mesh, rank).shape for rank in range(mesh.size)]
    real = [unpadded_shape(spec, mesh, (size,), rank) for rank in range(mesh.size)]
    assert matches_dtensor(spec, (size,), mesh) == (real == [tuple(shape) for shape in chunks])


def test_nine_on_two_by_two() -> None:
    """Nine elements on 2x2 ranks are cut unlike DTensor's, and the conversions refuse them."""
    spec = P(("data", "model"))
    assert not matches_dtensor(spec, (9,), MESH)
    with pytest.raises(InvalidSpecError, match="into other pieces than DTensor"):
        pad_local(torch.zeros(3), spec, MESH, (9,))
    with pytest.raises(InvalidSpecError, match="into other pieces than DTensor"):
        unpad_local(torch.zeros(3), spec, MESH, (9,), 0)


def test_another_order_than_the_mesh() -> None:
    """Axes that split a dim in another order than the mesh's do not match DTensor, whose placements
    have no such order."""
    assert not matches_dtensor(P(("model", "data")), (8,), MESH)


def test_partial_is_the_value_on_the_first_rank() -> None:
    """For a partial value, the first rank of the axis holds the value, and the other ranks hold the reduction's
    identity."""
    locals_ = shard_all(torch.tensor([1.0, 2.0]), P(partial={"model": "max"}), MESH)
    assert [local.tolist() for local in locals_] == [[1.0, 2.0], [-math.inf, -math.inf]] * 2


def test_copies_are_compared_on_demand() -> None:
    """With `check`, a rank whose copy differs is named."""
    locals_ = [torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0])]
    assert unshard(locals_, P(), MESH, (2,)).tolist() == [0.0, 0.0]
    with pytest.raises(AutoshardError, match=r"rank 3 .* differs from rank 0 in 1 of 2 elements"):
        unshard(locals_, P(), MESH, (2,), check=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_copies_of_any_type_are_compared(dtype: torch.dtype) -> None:
    """A copy that differs is found for complex, float8, bool and integer tensors."""
    locals_ = [torch.ones(2).to(dtype) for _ in range(MESH.size)]
    assert unshard(locals_, P(), MESH, (2,), check=True) is not None
    locals_[1] = torch.tensor([1.0, 0.0]).to(dtype)
    with pytest.raises(AutoshardError, match=r"rank 1 .* differs from rank 0 in 1 of 2 elements"):
        unshard(locals_, P(), MESH, (2,), check=True)


def test_equal_nans_are_copies() -> None:
    """Copies that are NaN at the same place are equal."""
    unshard([torch.tensor([math.nan])] * 4, P(), MESH, (1,), check=True)


def test_wrong_local_shape() -> None:
    """A local tensor of another shape is refused."""
    with pytest.raises(InvalidSpecError, match=r"rank 0 holds shape=\(3,\)"):
        unshard([torch.zeros(3)] * 4, P("data"), MESH, (4,))


def test_wrong_number_of_locals() -> None:
    """A list with fewer tensors than the mesh has ranks is refused."""
    with pytest.raises(InvalidSpecError, match="has 4 ranks, found 1"):
        unshard([torch.zeros(4)], P(), MESH, (4,))
