"""A program without inner blocks has the memory of the whole model's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard import tracing
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.ir.spec import P, PartitionSpec
from cost_models.hardware import Cluster
from passes.driver.expand_plan import expand_plan
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_prepared, prepare, prepare_for
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import step_memory
from tests.benchmarks.decoder import Decoder, DecoderShape, Experts
from tests.benchmarks.deep_models import LLAMA_8B
from tests.passes.deep import WIDTH, adamw, alike, in_turn

_TOLERANCE = 0.01

MESHES = (Mesh({"data": 4}), Mesh({"data": 2, "model": 2}))
SHARDED = {"input:*": P("data"), "*.weight": P("data")}
SMALL = replace(LLAMA_8B, hidden=64, heads=4, ffn=128, vocab=128, sequence=32, layers=8, kv_heads=2, head_size=16)


@dataclass(frozen=True, slots=True)
class _Step:
    """A model and a batch."""

    model: nn.Module
    args: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, torch.Tensor] | None = None


def _perceptron(make: Callable[[int], nn.Module], depth: int) -> Callable[[], _Step]:
    return lambda: _Step(make(depth), (torch.empty(64, 4, WIDTH),))


def _decoder(shape: DecoderShape) -> Callable[[], _Step]:
    tokens = torch.empty(8, shape.sequence, dtype=torch.int64)
    return lambda: _Step(Decoder(shape), (), {"tokens": tokens, "targets": tokens})


class Encoder(nn.Module):
    """Layers of bidirectional attention, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


KINDS: Mapping[str, Callable[[], _Step]] = {
    "alike": _perceptron(alike, 8),
    "in turn": _perceptron(in_turn, 7),
    "encoder": lambda: _Step(Encoder(), (torch.empty(8, 16, 32),)),
    "decoder": _decoder(SMALL),
    "experts": _decoder(
        replace(SMALL, layers=7, experts=Experts(count=4, active=2, ffn=64, shared_ffn=0, dense_layers=0))
    ),
}


@cache
def programs(kind: str) -> tuple[Program, Program]:
    """Return the training step without inner blocks, and with all blocks."""
    with torch.device("meta"):
        step = KINDS[kind]()
    left_out = tracing.leave_out_blocks(step.model, 2, least=1)
    assert left_out is not None
    short, whole = (
        tracing.trace(model, step.args, dict(step.kwargs or {}), update=adamw(step.model))
        for model in (left_out.model, step.model)
    )
    return replace(short, repeats=left_out.repeats), whole


def check_alike(kind: str, mesh: Mesh, options: PlanOptions, share: float, cluster: Cluster) -> None:
    """Check that a plan has the same peak and parts of memory without inner blocks and with all blocks.

    The plan has `share` of the memory of the fastest plan.
    """
    short, whole = programs(kind)
    plan = plan_program(short, mesh, cluster, options)
    if share < 1:
        within = replace(options, memory_budget=share * plan.predicted.peak_memory_bytes)
        plan = plan_program(short, mesh, cluster, within)
    expanded = expand_plan(plan, prepare(short), prepare(whole))
    lowering = LoweringOptions(micro_batches=options.micro_batches)
    folded, unfolded = (
        step_memory(lower_prepared(prepare_for(*pair), pair[1], cluster, lowering), options.micro_batches)
        for pair in ((short, plan), (whole, expanded))
    )
    assert folded.peak_bytes == pytest.approx(unfolded.peak_bytes, rel=_TOLERANCE)
    for part, size in unfolded.parts.items():
        assert folded.parts[part] == pytest.approx(size, abs=_TOLERANCE * unfolded.peak_bytes)


@settings(max_examples=4)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(MESHES),
    st.sampled_from([1, 4]),
    st.sampled_from([0.85, 1.0]),
    st.sampled_from([{}, SHARDED]),
    st.sampled_from(["h100_sxm", "cpu_laptop"]),
)
def test_the_memory_of_left_out_blocks_is_that_of_the_whole_model(
    kind: str, mesh: Mesh, micro_batches: int, share: float, constraints: dict[str, PartitionSpec], hardware: str
) -> None:
    """Without inner blocks, each part of the memory is within 1 % of the whole model's peak, also in little memory."""
    options = PlanOptions(
        memory_budget=2.0**40, constraints=constraints, micro_batches=micro_batches, with_baselines=False
    )
    check_alike(kind, mesh, options, share, Cluster(hardware, nodes=1, devices_per_node=mesh.size))
