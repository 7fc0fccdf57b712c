"""Hypothesis strategies for meshes, shapes and specs, clusters, and schedules of pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.ir.mesh import Mesh
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.spec import PartitionSpec, Reduction
from cost_models.hardware import node_type
from cost_models.schedule_orders import SCHEDULES, admits
from passes.lowering.order_pipeline import order_pipeline

AXIS_NAMES = ("data", "model", "expert", "stage")


@st.composite
def meshes(draw: st.DrawFn, *, max_axes: int = 3, max_ranks: int = 8) -> Mesh:
    """Generate meshes of at most `max_axes` axes and `max_ranks` ranks. An axis may have size one.

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
    mesh: Mesh | None = None,
    ndim: int | None = None,
    *,
    reductions: Sequence[Reduction] = tuple(Reduction),
    mesh_order: bool = False,
) -> PartitionSpec:
    """Generate partition specs of tensors with `ndim` dims on `mesh`.

    Args:
        mesh: the mesh; None: any of `meshes()`.
        ndim: the number of dims; None: 0 to 3.
        reductions: the reductions of partial values. All partial axes of a spec have the same reduction. Empty: no axis
            is partial.
        mesh_order: whether the axes of a dim are in the order of the mesh, which torch placements require.
    """
    mesh = draw(meshes()) if mesh is None else mesh
    ndim = draw(st.integers(0, 3)) if ndim is None else ndim
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
    """Generate small shapes. Many of their dims are smaller than a mesh axis, or not divisible by its size.

    Args:
        min_dims, max_dims: smallest and largest number of dims.
        min_size, max_size: smallest and largest size of a dim.

    Example:
        >>> from hypothesis import find
        >>> find(shapes(), lambda shape: len(shape) == 2)
        (1, 1)
    """
    sizes = st.integers(min_size, max_size)
    return st.lists(sizes, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def clusters(draw: st.DrawFn, *, max_nodes: int = 4, max_devices: int = 8) -> Cluster:
    """Generate clusters of at most `max_nodes` nodes and `max_devices` equal devices. Their networks are fast or slow.

    Example:
        >>> from hypothesis import find
        >>> find(clusters(), lambda cluster: cluster.nodes > 1).size
        2
    """
    node = node_type(draw(st.sampled_from(_NODES)))
    nodes = draw(st.integers(1, 1 if node.inter is None else min(max_nodes, max_devices)))
    if node.inter is not None:
        node = node.with_network(bytes_per_s_per_device=draw(st.sampled_from((25e9, 1e9, 1e8))))
    return Cluster(node, nodes, draw(st.integers(1, min(node.devices_per_node, max_devices // nodes))))


_NODES = ("h100_sxm", "a100_sxm_80gb", "a100_pcie_40gb", "mi300x", "l4", "cpu_laptop")


@st.composite
def schedules(
    draw: st.DrawFn, *, max_ranks: int = 4, max_micro_batches: int = 9, max_virtual_stages: int = 3
) -> PipelineOrder:
    """Generate pipeline schedules: each pipeline rank's tasks in a step, in order, including sends and receives.

    A schedule has a name of `Recipe.schedule`, and numbers of ranks, micro-batches and virtual stages that the schedule
    allows.

    Args:
        max_ranks: largest number of pipeline ranks.
        max_micro_batches: largest number of micro-batches in a step.
        max_virtual_stages: largest number of stages on each rank.

    Example:
        >>> from hypothesis import find
        >>> print(find(schedules(), lambda order: len(order.stage_ranks) > 1))
        rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
    """
    ranks, micro_batches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_micro_batches))
    admitted = [
        (schedule, virtual_stages)
        for schedule in SCHEDULES
        for virtual_stages in range(1, max_virtual_stages + 1)
        if admits(schedule, ranks, micro_batches, virtual_stages)
    ]
    schedule, virtual_stages = draw(st.sampled_from(admitted))
    return order_pipeline(schedule, ranks, micro_batches, virtual_stages)
