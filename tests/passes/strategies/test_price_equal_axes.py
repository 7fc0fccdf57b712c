"""Strategies that differ only by a swap of equal axes are emitted once, and share the price."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.ir.mesh import Mesh
from cost_models.hardware import Cluster
from passes.lowering.lower_program import prepare
from passes.strategies import price
from passes.strategies.enumerate_strategies import EnumerateStrategies, Site
from passes.strategies.price import Prices
from tests.passes.blocks import blocks_program, h100s, two_nodes

CUBE = Mesh({"a": 2, "b": 2, "c": 2})


def rewritten_sites(mesh: Mesh) -> list[Site]:
    space = EnumerateStrategies(mesh)(prepare(blocks_program()))
    return [site for site in space.sites.values() if site.rule is not None and site.rule.local is not None]


def priced(mesh: Mesh, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[np.ndarray]]:
    """Return the number of emitted strategies, and the seconds of all strategies."""
    emitted, rewritten_time = [0], price.rewritten_time

    def counting(*arguments: object) -> float:
        emitted[0] += 1
        return rewritten_time(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(price, "rewritten_time", counting)
    prices = Prices(cluster, mesh)
    times = [prices.call_times(site, site.strategies) for site in rewritten_sites(mesh)]
    monkeypatch.setattr(price, "rewritten_time", rewritten_time)
    return emitted[0], times


def test_equal_axes_are_emitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three equal axes, less than half of the calls are emitted, and all strategies keep their prices."""
    few, times = priced(CUBE, h100s(CUBE), monkeypatch)
    monkeypatch.setattr(price, "_FEW_AXES", 3)
    many, expected = priced(CUBE, h100s(CUBE), monkeypatch)
    assert few < 0.5 * many
    for found, wanted in zip(times, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("mesh", [Mesh({"a": 2, "b": 2}), CUBE], ids=["two axes", "two nodes"])
def test_axes_that_are_not_equal_are_priced_one_by_one(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two axes, or with axes on unequal links, as many calls are emitted as without sharing."""
    cluster = h100s(mesh) if mesh is not CUBE else two_nodes(mesh)
    found = priced(mesh, cluster, monkeypatch)[0]
    monkeypatch.setattr(price, "_FEW_AXES", 3)
    assert found == priced(mesh, cluster, monkeypatch)[0]
