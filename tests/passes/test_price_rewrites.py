"""Collectives inside local rewrites have their price."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Split
from autoshard.tracing import trace
from passes.price_rewrites import rewrite_time
from tests.passes.blocks import h100s, problem_of


def test_cross_entropy_over_split_classes_pays_for_its_reductions() -> None:
    """Split over classes, the loss sends the maximum and the sum of each row; split over rows it sends nothing."""

    class Classifier(nn.Module):
        def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(logits, target)

    mesh = Mesh({"x": 2})
    logits, target = torch.zeros(8, 64, device="meta"), torch.zeros(8, dtype=torch.int64, device="meta")
    planning = problem_of(trace(Classifier(), (logits, target), {}, grad=False), mesh)
    site = next(site for name, site in planning.space.sites.items() if name.startswith("cross_entropy"))
    assert site.rule is not None
    rows, classes = (site.rule.inputs[0][dim][0] for dim in (0, 1))
    for strategy in site.strategies:
        sent = rewrite_time(site, strategy, mesh, h100s(mesh))
        if strategy.choices == (Split(classes),):
            assert sent > 0
            assert planning.prices.call_time(site, strategy) > sent
        elif strategy.choices == (Split(rows),):
            assert sent == 0
