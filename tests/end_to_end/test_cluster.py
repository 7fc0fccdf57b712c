"""With a cluster instead of a mesh, the planner picks the axes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
import passes.pipeline
from autoshard.cluster import candidate_meshes


def test_each_mesh_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan by which the mesh was chosen is the one that runs; it is not made again."""
    planned = []

    def plan_program(*args: object) -> autoshard.Plan:
        planned.append(original(*args))  # type: ignore[arg-type]
        return planned[-1]

    original = passes.pipeline.plan_program
    monkeypatch.setattr(passes.pipeline, "plan_program", plan_program)
    cluster = autoshard.Cluster("cpu_laptop", 1, 4)
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    sharded = autoshard.compile(model, cluster, example_inputs=(x,))
    assert len(planned) == len(candidate_meshes(cluster)) > 1
    assert sharded.plan in planned
    torch.testing.assert_close(sharded(x), nn.functional.linear(x, model.weight, model.bias))
    assert len(planned) == len(candidate_meshes(cluster))
