"""Run as a script, without TRITON_INTERPRET: compile kernels for GPUs and write their resources as JSON.

    python -m tests.kernels.compiled_kernels sm_80,sm_90,gfx942 typical gpt,llama

compiles the hand-written kernels at the usual sizes and the kernels that are generated for these models. In place of
"typical": "all" sizes; "ones", with every size and stride 1, which Triton makes constants. Or the "candidates" of
tuning; a "sample" of these; "none". Models are the families of `tests.passes.families`, trained in bfloat16 on two
ranks, and "block", one of Llama 3 8B in its own size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoshard.kernels.candidates import TUNABLE, choice_of, neighbours
from tests.kernels.ahead import TYPICAL_SIZES, ExampleCompilation, compile_ahead, examples, launched

ROOT = Path(__file__).parents[2]
MODELS = ("gpt", "llama", "mixture", "vit", "encoder-decoder", "block")


def compiled(architectures: str, which: str, models: str = "") -> list[dict[str, Any]]:
    """The rows that the script writes, from a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "tests.kernels.compiled_kernels", architectures, which, models]
    result = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def _generated(model: str) -> Iterator[tuple[ExampleCompilation, tuple[str, ...]]]:
    """The generated kernels of a model, each once, and their tunable blocks."""
    import torch

    from autoshard.ir.mesh import Mesh
    from autoshard.kernels.generated.define import generated_kernel
    from autoshard.kernels.library import implementation_of
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
    from tests.passes.blocks import h100s
    from tests.passes.families import FAMILIES

    mesh = Mesh({"x": 2})
    if model == "block":
        phased = GenerateKernels(device("h100_sxm"))(SplitPhases()(FuseKernels()(llama_block())))
    else:
        torch.manual_seed(0)
        module, inputs = FAMILIES[model]()
        single = tuple(item.float() if item.is_floating_point() else item for item in inputs)
        program = trace(module.float(), single, {}, compute_dtype=torch.bfloat16)
        plan = plan_program(program, mesh, h100s(mesh), PlanOptions(with_baselines=False))
        phased = lower_program(program, plan, h100s(mesh), LoweringOptions(with_kernels=True))
    nodes = [node for phase in (phased.forward, phased.backward) for node in phase.graph.nodes]
    for kernel in map(generated_kernel, dict.fromkeys(node.target for node in nodes)):
        if kernel is not None:
            operands = [value.empty(torch.device("meta")) for value in kernel.group.operands]
            implementation = implementation_of(kernel.operator)
            for item in launched(lambda run=implementation, given=operands: run(*given), model):
                yield item, tuple(kernel.layout.tunable)


def _chosen(which: str, models: str) -> Iterator[tuple[str, str, ExampleCompilation]]:
    """For each kernel to compile: its row size or model, a text that names the choice of blocks, and
    the compilation."""
    typical = [(str(item.size), item, TUNABLE.get(item.name, ())) for item in examples() if item.size in TYPICAL_SIZES]
    generated = [(model, *found) for model in models.split(",") if model for found in _generated(model)]
    match which:
        case "candidates":
            for size, example, tunable in (*typical, *generated):
                yield from ((size, choice, item) for choice, item in _alternatives(example, tunable))
            return
        case "sample":  # of every third kernel, another candidate from kernel to kernel
            of_kernel = {item.name: list(_alternatives(item, tunable)) for _, item, tunable in typical}
            for index, choices in enumerate([found for found in of_kernel.values() if found][::3]):
                yield "", *choices[(3 * index) % len(choices)]
        case "ones":
            for example in {item.name: item for item in examples()}.values():
                integers = dict.fromkeys([name for name, kind in example.signature.items() if kind[0] == "i"], 1)
                signature = {**example.signature, **dict.fromkeys(integers, "constexpr")}
                constants = {**example.constants, **integers}
                yield "", "", dataclasses.replace(example, signature=signature, constants=constants)
        case "all":
            yield from ((str(item.size), "", item) for item in examples())
        case "typical":
            yield from ((size, "", item) for size, item, _ in typical)
    yield from ((model, "", item) for model, item, _ in generated)


def _alternatives(example: ExampleCompilation, tunable: tuple[str, ...]) -> Iterator[tuple[str, ExampleCompilation]]:
    """The other choices of blocks for a kernel: each as a text and as the compilation with these blocks."""
    heuristic, fixed = choice_of(example.constants, tunable, example.num_warps)
    for choice in neighbours(heuristic, fixed)[1:]:
        constants = {**example.constants, **dict(choice.blocks)}
        yield str(choice), dataclasses.replace(example, constants=constants, num_warps=choice.num_warps)


def main(architectures: str, which: str, models: str = "") -> None:
    """Write a list of {kernel, size, choice, architecture, registers, shared_bytes, spilled_bytes}."""
    rows = []
    for size, choice, example in _chosen(which, models):
        for architecture in architectures.split(","):
            row = {"kernel": example.name, "size": size, "choice": choice, "architecture": architecture}
            rows.append(row | dataclasses.asdict(compile_ahead(example, architecture)))
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
