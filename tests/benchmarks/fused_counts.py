"""Launches and bytes of a Llama block's forward and backward, with and without kernels, counted on its program.

    python -m tests.benchmarks.fused_counts

The block is a decoder layer of Llama 3 8B on a sequence of 2,048 tokens in bfloat16, on one device. The device is meta,
so any machine can count. `passes.lowering.count_launches` defines launches and bytes; attention is one launch on both
sides.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.tracing import trace
from cost_models.device import device
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.count_launches import Traffic, traffic_of
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.generate_kernels import GenerateKernels
from passes.lowering.lower_program import lower_program
from passes.lowering.split_phases import SplitPhases
from tests.passes.blocks import h100s
from tests.passes.launches import count_launches

_MATRIX_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


class Block(nn.Module):
    """A decoder layer with its rotary embedding, whose output is summed to a loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.layer(x, position_embeddings=self.rotary(x, position), position_ids=position).sum()


def llama_block_program(hidden: int = 4096, length: int = 2048, dtype: torch.dtype = torch.bfloat16) -> Program:
    """Return the traced program of one Llama 3 block. Other hidden sizes keep the ratios of the block's sizes."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512), max_position_embeddings=length, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        block = Block(config).to(dtype)
        inputs = (torch.zeros(1, length, hidden, dtype=dtype, requires_grad=True), torch.arange(length)[None])
        return trace(block, inputs, {})


def llama_block(hidden: int = 4096, length: int = 2048, dtype: torch.dtype = torch.bfloat16) -> LoweredProgram:
    """Return the lowered program of one Llama 3 block for one device."""
    program, mesh = llama_block_program(hidden, length, dtype), Mesh({"x": 1})
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(with_baselines=False))
    return lower_program(program, plan).lowered


def count_both(lowered: LoweredProgram) -> tuple[Traffic, Traffic]:
    """Count a program's launches and bytes on one device without kernels, and with hand-written kernels."""
    return count_launches(lowered.graph_module), count_launches(FuseKernels()(lowered).graph_module)


def count_generated(lowered: LoweredProgram) -> Traffic:
    """Count a program's launches and bytes with both hand-written and generated kernels."""
    phased = SplitPhases()(FuseKernels()(lowered))
    generated = GenerateKernels(device("h100_sxm"))(phased)
    return count_launches(generated.forward) + count_launches(generated.backward)


def _products(lowered: LoweredProgram) -> Traffic:
    nodes = [node for node in lowered.graph_module.graph.nodes if str(node.target) in _MATRIX_PRODUCTS]
    return sum(map(traffic_of, nodes), Traffic())


def main() -> None:
    """Print the table."""
    lowered = llama_block()
    before, after = count_both(lowered)
    generated, products = count_generated(lowered), _products(lowered)
    table = Table("", "launches", "GB read and written", title="Llama 3 8B block, forward and backward, 2,048 tokens")
    for name, traffic in (
        ("without kernels", before),
        ("with hand-written kernels", after),
        ("with generated ones too", generated),
        ("of these, matrix products", products),
    ):
        table.add_row(name, str(traffic.launches), f"{traffic.memory_bytes / 1e9:.3f}")
    for name, traffic in (("hand-written beside none", after), ("all beside none", generated)):
        ratios = (traffic.launches / before.launches, traffic.memory_bytes / before.memory_bytes)
        table.add_row(name, *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
