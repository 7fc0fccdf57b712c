"""Programs with kernels compute what programs without them do."""

from __future__ import annotations

import torch

from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind
from autoshard.runtime.boundary import shard_all
from autoshard.runtime.simulator import simulate
from autoshard.tracing import trace
from passes.fuse_kernels import FuseKernels, fused_calls
from passes.pipeline import PlanOptions, lower_program, plan_program
from tests.passes.blocks import Blocks, h100s

MESH = Mesh({"x": 2})


def test_norms_become_kernels_and_results_stay() -> None:
    """Each layer norm, forward and backward, is one kernel; loss and gradients stay equal (in the interpreter)."""
    torch.manual_seed(0)
    program = trace(Blocks(8, 2), (torch.randn(2, 3, 8),), {})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(with_baselines=False))
    lowered = lower_program(program, plan).lowered
    fused = FuseKernels()(lowered.graph_module)
    assert fused_calls(fused) == {
        "autoshard.triton_layer_norm.default": 2,
        "autoshard.triton_layer_norm_backward.default": 2,
    }
    assert not fused_calls(lowered.graph_module)
    values = [
        torch.ones(slot.shape) if slot.slot.kind == InputKind.TANGENT else torch.randn(slot.shape)
        for slot in lowered.inputs
    ]
    locals_ = [shard_all(value, slot.spec, MESH) for value, slot in zip(values, lowered.inputs, strict=True)]
    expected = simulate(lowered.graph_module, MESH, locals_)
    torch.testing.assert_close(simulate(fused, MESH, locals_), expected, rtol=1e-4, atol=1e-4)
