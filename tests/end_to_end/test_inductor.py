"""Each rank's program can be compiled by Inductor."""

from __future__ import annotations

import torch
from torch import nn

import autoshard
from autoshard import Mesh, P
from tests.passes.launches import fused_calls
from tests.runtime.processes import on_processes


def check_inductor() -> None:
    """With `backend="inductor"`, gradients equal one device, and no fused kernel of autoshard is called."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)))
    plain, model = models
    constraints = {"input:0": P("data"), "0.weight": P("data")}
    sharded = autoshard.compile(model, Mesh({"data": 2}), backend="inductor", constraints=constraints)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for network in (plain, sharded):
        network(x).square().sum().backward()
    (program,) = sharded.programs
    assert not fused_calls(program.phased.forward)
    saved = [program.phased.forward.graph.output_node().args[0][-len(program.phased.saved) :]]
    assert torch.ops.aten.gelu.default not in [node.target for node in saved[0]]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), parameter.grad)


test_inductor_gives_the_same_gradients = on_processes({"inductor": check_inductor}, ranks=2, slow=["inductor"])
