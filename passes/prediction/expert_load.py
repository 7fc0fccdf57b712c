"""Estimate how unevenly a plan loads its expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.kernels import experts
from cost_models.experts import busiest_rows
from passes.planning.build_assignment import PlanningProblem


def expert_load(planning: PlanningProblem, choice: Sequence[int]) -> float | None:
    """Return the rows of the busiest expert-parallel rank, divided by the mean over ranks, in the most uneven layer.

    `cost_models.experts.busiest_rows` assumes how tokens choose experts. The result is None if the plan splits no
    experts over ranks.
    """
    mesh, found = planning.space.mesh, []
    for name, site in planning.space.sites.items():
        if site.node is None or site.node.target is not experts:
            continue
        splits = planning.strategy(name, choice).splits(mesh)
        holders = splits.get("e", ())
        ranks = mesh.shards(holders)
        if ranks > 1:
            apart = mesh.shards(tuple(axis for axis in splits.get("t", ()) if axis not in holders))
            rows = site.node.args[1].meta["val"].numel() / apart  # type: ignore[union-attr]
            found.append(busiest_rows(rows, ranks) * ranks / rows)
    return max(found, default=None)
