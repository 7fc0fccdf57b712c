"""Drawn clusters and schedules keep to the given sizes, and every drawn cluster can be planned for."""

from __future__ import annotations

import torch
from hypothesis import given, settings

import autoshard
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.testing import clusters, schedules


@given(clusters(max_nodes=3, max_devices=6))
def test_clusters_are_as_small_as_asked_for(cluster: autoshard.Cluster) -> None:
    """Drawn clusters have at most the given nodes and devices, and one node if the type has no network."""
    assert 1 <= cluster.size <= 6
    assert cluster.nodes <= (3 if cluster.node.inter is not None else 1)


@given(clusters(max_devices=4))
@settings(max_examples=5)
def test_any_cluster_can_be_planned_for(cluster: autoshard.Cluster) -> None:
    """A plan for a drawn cluster uses all of its devices and fits their memory."""
    plan = autoshard.plan(torch.nn.Linear(8, 8), cluster, example_inputs=(torch.ones(8, 8),))
    assert plan.mesh.size == cluster.size
    assert 0 < plan.predicted.step_time_s < 1
    assert plan.predicted.peak_memory_bytes < cluster.device.memory_bytes


@given(schedules(max_ranks=3, max_micro_batches=4))
def test_schedules_are_as_small_as_asked_for(order: PipelineOrder) -> None:
    """Drawn schedules have at most the given ranks and micro-batches, and a stage on every rank."""
    assert set(order.stage_ranks) == set(range(len(order.ranks)))
    assert len(order.ranks) <= 3
    assert order.micro_batches <= 4
