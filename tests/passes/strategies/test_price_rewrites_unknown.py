"""A collective without a formula is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from cost_models.errors import UnknownOperatorError
from cost_models.hardware import Cluster
from passes.strategies import price_rewrites


def test_an_unknown_collective_inside_a_rewrite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective without a formula inside a rewrite is refused by name, and the error says to add a formula."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["val"] = torch.zeros(4, device="meta")
    graph.call_function(torch.ops._c10d_functional.broadcast.default, (value, 0, "data"))
    monkeypatch.setattr(price_rewrites, "emitted_call", lambda *_: graph)
    site: Any = None
    with pytest.raises(UnknownOperatorError, match=r"_c10d_functional\.broadcast.*no cost formula; add one"):
        price_rewrites.rewritten_time(site, site, Mesh({"data": 2}), Cluster("h100_sxm", devices_per_node=2))
