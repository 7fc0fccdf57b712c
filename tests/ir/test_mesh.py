"""Meshes: coordinates of ranks, groups along axes, and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import MeshError
from autoshard.ir.mesh import Mesh
from autoshard.testing.strategies import meshes


@given(meshes())
def test_coordinates_and_ranks_round_trip(mesh: Mesh) -> None:
    """`rank_at` is the inverse of `coordinates`, and ranks are numbered with the last axis fastest."""
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank_at(place) for place in places] == list(range(mesh.size))
    assert [tuple(place.values()) for place in places] == sorted(tuple(place.values()) for place in places)


@pytest.mark.parametrize("place", [{"data": 0.5, "model": 0}, {"data": 0}, {"data": 0, "model": 1, "other": 0}])
def test_there_is_no_rank_elsewhere(place: dict[str, int]) -> None:
    """`rank_at` refuses a fraction, a missing axis and an unknown axis."""
    with pytest.raises(MeshError):
        Mesh({"data": 2, "model": 2}).rank_at(place)


@given(st.data())
def test_groups_partition_the_ranks(data: st.DataObject) -> None:
    """The groups along some axes hold each rank once, in the order of their coordinates along these axes."""
    mesh = data.draw(meshes())
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.shards(axes)
        keys = [tuple(mesh.coordinates(rank)[axis] for axis in axes) for rank in group]
        assert keys == sorted(keys)


@pytest.mark.parametrize("axes", [{}, {"a b": 2}, {"data": 0}, {"data": True}])
def test_malformed(axes: dict[str, int]) -> None:
    """A mesh without axes, with a name that is no identifier, or with a size that is no positive number is refused."""
    with pytest.raises(MeshError):
        Mesh(axes)


def test_a_mesh_larger_than_any_cluster() -> None:
    """A mesh of more than 2^20 ranks is refused."""
    assert Mesh({"data": 2**10, "model": 2**10}).size == 2**20
    with pytest.raises(MeshError, match=r"has 1000000000000 ranks; the largest mesh has 1048576"):
        Mesh({"data": 10**6, "model": 10**6})


def test_unknown_axis() -> None:
    """An unknown axis is refused with the names of the mesh's axes."""
    with pytest.raises(MeshError, match="its axes are 'data'"):
        Mesh({"data": 2}).axis_size("model")


def test_rank_out_of_range() -> None:
    """A rank beyond the last is refused, with the range from zero."""
    with pytest.raises(MeshError, match="has ranks 0 to 1"):
        Mesh({"data": 2}).coordinates(2)
