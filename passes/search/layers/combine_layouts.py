"""Specs on a recipe's mesh from the layouts of its single axes."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.spec import PartitionSpec
from passes.search.layers.fold_program import FoldedProgram
from passes.search.layers.propagate_axis import AXIS, AxisLayout


def combined(axes: tuple[str, ...], specs: tuple[PartitionSpec, ...]) -> PartitionSpec:
    """One spec from those of single axes.

    Example:
        >>> combined(("context", "tensor"), (PartitionSpec(None, AXIS), PartitionSpec(None, AXIS)))
        P(None, ('context', 'tensor'))
    """
    ndim = max((len(spec.dims) for spec in specs), default=0)
    dims = [
        tuple(axis for axis, spec in zip(axes, specs, strict=True) if AXIS in spec.axes_of(dim)) for dim in range(ndim)
    ]
    partial = {
        axis: reduction.value
        for axis, spec in zip(axes, specs, strict=True)
        if (reduction := spec.reduction_over(AXIS)) is not None
    }
    return PartitionSpec(*dims, partial=partial)


def combine_layouts(folded: FoldedProgram, layouts: Mapping[str, AxisLayout]) -> dict[str, NodePlan]:
    """Specs of the calls of one block of each kind, and of the ends; batches are split over replicas beforehand."""
    nodes = {}
    for name, section in folded.section_of.items():
        known = {axis: layout for axis, layout in layouts.items() if name in layout.results}
        if section and known:
            inputs = tuple(zip(*(layout.operands.get(name, ()) for layout in known.values()), strict=True))
            outputs = tuple(zip(*(layout.results[name] for layout in known.values()), strict=True))
            axes = tuple(known)
            nodes[name] = NodePlan(
                tuple(combined(axes, specs) for specs in inputs), tuple(combined(axes, specs) for specs in outputs)
            )
    return nodes
