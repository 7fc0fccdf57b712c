"""Hypothesis strategies for meshes, shapes and specs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec, Reduction

AXIS_NAMES = ("data", "model", "expert", "stage")


@st.composite
def meshes(draw: st.DrawFn, *, max_axes: int = 3, max_ranks: int = 8) -> Mesh:
    """Meshes with up to `max_axes` axes and `max_ranks` ranks; axes of size one among them.

    Example:
        >>> from hypothesis import find
        >>> str(find(meshes(), lambda mesh: mesh.size > 1))
        'Mesh(data=2)'
    """
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        sizes.append(draw(st.integers(1, max_ranks // math.prod(sizes))))
    return Mesh(dict(zip(AXIS_NAMES, draw(st.permutations(sizes)), strict=False)))


@st.composite
def specs(
    draw: st.DrawFn,
    mesh: Mesh,
    ndim: int,
    *,
    reductions: Sequence[Reduction] = tuple(Reduction),
    mesh_order: bool = False,
) -> PartitionSpec:
    """Specs of tensors with `ndim` dims on `mesh`.

    Args:
        draw: Hypothesis's.
        mesh: the mesh.
        ndim: the number of dims.
        reductions: what the value may be partial in, one of these on all partial axes; none for values that
            are whole.
        mesh_order: whether the axes on one dim come in the order of the mesh, as torch placements need.
    """
    axes = mesh.axis_names if mesh_order else draw(st.permutations(mesh.axis_names))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial: dict[str, Reduction] = {}
    reduction = draw(st.sampled_from(list(reductions))) if reductions else None
    places = [None, *range(ndim), *([reduction] if reduction else [])]
    for axis in axes:
        place = draw(st.sampled_from(places))
        if isinstance(place, Reduction):
            partial[axis] = place
        elif place is not None:
            dims[place].append(axis)
    return PartitionSpec(*dims, partial=partial)


def shapes(
    *, min_dims: int = 0, max_dims: int = 3, min_size: int = 1, max_size: int = 9
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes so small that many dims do not divide by the axes that split them, or are smaller.

    Example:
        >>> from hypothesis import find
        >>> find(shapes(), lambda shape: len(shape) == 2)
        (1, 1)
    """
    sizes = st.integers(min_size, max_size)
    return st.lists(sizes, min_size=min_dims, max_size=max_dims).map(tuple)
