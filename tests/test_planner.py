"""The planner between `compile` and the passes."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn

import autoshard
from autoshard.ir.mesh import Mesh
from autoshard.planner import Planner
from autoshard.tracing import trace


def test_the_log_says_how_long_a_compile_took(caplog: pytest.LogCaptureFixture) -> None:
    """Seconds of the compile alone: no more than pass around it."""
    model, x, start = nn.Linear(4, 4), torch.randn(2, 4), time.perf_counter()
    with caplog.at_level(logging.INFO, logger="autoshard.planner"):
        autoshard.compile(model, Mesh({"data": 2}), example_inputs=(x,))(x)
    (record,) = (record for record in caplog.records if record.message.startswith("compiled"))
    assert isinstance(record.args, tuple)
    assert 0 < record.args[2] <= time.perf_counter() - start  # type: ignore[operator]


def test_an_axis_of_one_device_leaves_the_memory_as_it_is() -> None:
    """Only axes along which devices talk have communicators, which take memory."""
    program = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    planner = Planner(cluster=autoshard.Cluster.of("h100_sxm", 8, devices_per_node=8))
    alone, beside, both = (
        planner._options(program, Mesh(sizes), {}).memory_budget
        for sizes in ({"data": 8}, {"data": 8, "model": 1}, {"data": 4, "model": 2})
    )
    assert alone == beside > both
