"""The price of a call includes the collectives inside its local rewrite."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Split, Strategy
from autoshard.tracing import trace
from cost_models.hardware import Cluster
from passes.strategies.collective_nodes import collective_of, communicates
from passes.strategies.enumerate_strategies import Site
from passes.strategies.price_nodes import NodePrices
from passes.strategies.scratch import emitted_call
from tests.passes.blocks import h100s, problem_of


def rewrite_collectives(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> list[tuple[str, float]]:
    """Mesh axis and seconds of each collective of a call's local rewrite, in order."""
    if not strategy.splits(mesh):
        return []
    prices = NodePrices(cluster, mesh)
    nodes = filter(communicates, emitted_call(site, strategy, mesh).nodes)
    return [(collective_of(node, mesh).axes[0], prices.sent_s(node)) for node in nodes]


def test_cross_entropy_over_split_classes_pays_for_its_reductions() -> None:
    """A cross-entropy with split classes pays for its reductions, and with split rows it sends nothing."""

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
        sent = sum(seconds for _, seconds in rewrite_collectives(site, strategy, mesh, h100s(mesh)))
        if strategy.choices == (Split(classes),):
            assert sent > 0
            assert planning.prices.call_time(site, strategy) > sent
        elif strategy.choices == (Split(rows),):
            assert sent == 0


def test_halos_and_softmax_over_split_dims_have_a_price() -> None:
    """A convolution with split width pays for its halos, and a softmax over a split dim for its reductions.

    Splits of other dims send nothing.
    """

    class Edges(nn.Module):
        def forward(self, image: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(image, kernel, padding=(0, 1)).softmax(1)

    mesh = Mesh({"x": 2, "y": 2})
    image, kernel = torch.zeros(4, 8, 16, 16, device="meta"), torch.zeros(8, 8, 1, 3, device="meta")
    planning = problem_of(trace(Edges(), (image, kernel), {}, grad=False), mesh)
    for name, talking, silent in (("convolution", "o1", ("n", "o2")), ("_softmax", "d1", ("d0", "d2"))):
        site = next(site for site_name, site in planning.space.sites.items() if site_name.startswith(name))
        sent = {
            s.choices: sum(seconds for _, seconds in rewrite_collectives(site, s, mesh, h100s(mesh)))
            for s in site.strategies
        }
        assert sent[Split(talking), None] > 0
        assert sent[Split(talking), Split(talking)] > sent[Split(talking), None]
        assert all(sent[Split(factor), None] == 0 for factor in silent)
        for strategy in site.strategies:
            assert planning.prices.call_time(site, strategy) > sent[strategy.choices]
            axes = {axis for axis, _ in rewrite_collectives(site, strategy, mesh, h100s(mesh))}
            assert axes == {
                axis for axis, choice in zip("xy", strategy.choices, strict=True) if choice == Split(talking)
            }
