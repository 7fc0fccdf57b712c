"""Run as a script, without TRITON_INTERPRET: compile the generated kernels of models and write their resources as JSON.

    python tests/kernels/generated/compile_generated.py sm_80,sm_90,gfx942 gpt,llama,mixture,vit,encoder-decoder,block

The families of `tests.passes.families` as they are trained in bfloat16, on two ranks; "block" is one of Llama 3 8B in
its own size.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from torch import fx

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.kernels.generated.define import GeneratedKernel, generated_kernel
from autoshard.tracing import trace
from cost_models.device import device
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.generate_kernels import GenerateKernels
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.split_phases import SplitPhases
from tests.benchmarks.fused_counts import llama_block
from tests.kernels.ahead import compile_ahead
from tests.passes.blocks import h100s
from tests.passes.families import FAMILIES

MESH = Mesh({"x": 2})


def phases_of(family: str) -> PhasedProgram:
    """A model's phases with kernels."""
    if family == "block":
        return GenerateKernels(device("h100_sxm"))(SplitPhases()(FuseKernels()(llama_block())))
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    single = tuple(item.float() if item.is_floating_point() else item for item in inputs)
    program = trace(model.float(), single, {}, compute_dtype=torch.bfloat16)
    cluster = h100s(MESH)
    plan = plan_program(program, MESH, cluster, PlanOptions(with_baselines=False))
    return lower_program(program, plan, cluster, LoweringOptions(with_kernels=True))


def kernels_in(graph_module: fx.GraphModule) -> list[GeneratedKernel]:
    """The generated kernels that a graph calls, each once."""
    found = dict.fromkeys(node.target for node in graph_module.graph.nodes)
    return [kernel for kernel in map(generated_kernel, found) if kernel is not None]


def main(architectures: str, families: str) -> None:
    """Write a list of {kernel, size, architecture, registers, shared_bytes, spilled_bytes}; `size` is the model."""
    rows = []
    for family in families.split(","):
        phased = phases_of(family)
        kernels = {kernel.name: kernel for phase in (phased.forward, phased.backward) for kernel in kernels_in(phase)}
        for name, kernel in kernels.items():
            for architecture in architectures.split(","):
                resources = dataclasses.asdict(compile_ahead(kernel.specimen(), architecture))
                short = name.removeprefix("autoshard::triton_")
                rows.append({"kernel": short, "size": family, "architecture": architecture} | resources)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
