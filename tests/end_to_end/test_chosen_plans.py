"""Plans that the search chooses, of small versions of the models that it is measured on, run and equal one device.

Whole steps of AdamW on two meshes, with plenty of memory and with so little that values are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, DoesNotFitError, Mesh, Plan
from autoshard.testing import check_plan
from autoshard.testing.whole_step import WholeStep
from cost_models.device import HostLink
from cost_models.hardware import node_type
from tests.benchmarks.decoder import Decoder, DecoderShape, Experts, Latent
from tests.benchmarks.deep_models import DEEPSEEK_V3, LLAMA_8B
from tests.zoo.table import ARCHITECTURES

Inputs = dict[str, Any]

MESHES = {"2x2": Mesh({"data": 2, "model": 2}), "4x1": Mesh({"data": 4})}
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
SHARES = (0.9, 0.8, 0.65)
"""Shares of the fastest plan's memory. The test tries them in order and takes the first that recomputes values."""
FIT_WITHOUT = {("mixtral", "4x1"), ("mixtral", "2x2"), ("vit", "4x1")}
"""Models whose plans within 0.9 and 0.8 keep all, at 0.03 to 3 % more. Within 0.65 nothing fits; in what would do, some
keep all too, one as the time that the search has allows."""

_SMALL = {"hidden": 32, "heads": 4, "ffn": 48, "vocab": 48, "sequence": 8, "layers": 2}
LLAMA = replace(LLAMA_8B, **_SMALL, kv_heads=2, head_size=8)
DEEPSEEK = replace(
    DEEPSEEK_V3, **_SMALL, kv_heads=4, head_size=12,
    experts=Experts(count=4, active=2, ffn=24, shared_ffn=24, dense_layers=1),
    latent=Latent(q_rank=16, kv_rank=12, nope_size=8, rope_size=4, value_size=8),
)  # fmt: skip


def decoder(shape: DecoderShape, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """A decoder with drawn weights, and a batch of eight."""
    model, generator = Decoder(shape), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    tokens, targets = torch.randint(0, shape.vocab, (2, 8, shape.sequence), generator=generator)
    return model, {"tokens": tokens, "targets": targets}


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its batch, and how it is trained.

    Args:
        build: makes both.
        precision: what is computed in.
        precise: whether one device can run it in float64, which tells rounding from faults.
        steps: of the optimizer.
    """

    build: Callable[[], tuple[nn.Module, Inputs]]
    precision: str | None = None
    precise: bool = True
    steps: int = 2


CASES = {
    "vit": Case(ARCHITECTURES["vit"].build),
    "mixtral": Case(ARCHITECTURES["mixtral"].build, precise=False),  # grouped products have no float64
    "llama": Case(partial(decoder, LLAMA)),
    "llama in bf16": Case(partial(decoder, LLAMA), "bf16"),
    "deepseek": Case(partial(decoder, DEEPSEEK)),
    # of these weights no rounding sends a token to another expert in the first step
    "deepseek in bf16": Case(partial(decoder, DEEPSEEK, 5), "bf16", steps=1),
}
_QUICK = ("vit", "4x1")
CHECKS = [
    pytest.param(name, mesh, marks=() if (name, mesh) == _QUICK else pytest.mark.slow)
    for name in CASES
    for mesh in MESHES
]


def slow_h100s(times: float = 1e5) -> Cluster:
    """Four H100s that are slower than they are by as much as our models are smaller: else all is best left whole."""
    node = node_type("h100_sxm")
    link = node.device.host_link
    assert link is not None
    slow = replace(
        node.device,
        peak_flops={name: peak / times for name, peak in node.device.peak_flops.items()},
        memory_bandwidth_bytes_per_s=node.device.memory_bandwidth_bytes_per_s / times,
        host_link=HostLink(link.to_host_bytes_per_s / times, link.from_host_bytes_per_s / times),
    )
    return Cluster(node.with_device(slow), nodes=1, devices_per_node=4)


def check(case: Case, plan: Plan) -> None:
    """A plan computes the numbers of one device, and the check would have noticed half of any value missing."""
    model, inputs = case.build()
    precise = torch.float64 if case.precise and case.precision is None else None
    found = check_plan(
        model, plan.mesh, inputs, plan=plan, steps=case.steps, precise=precise, whole_step=WholeStep(ADAMW)
    )
    found.raise_if_different()
    for item in found.comparisons:
        wrong = replace(item, difference=0.5 * item.scale)
        assert item.scale < 1e-4 or not wrong.is_close(found.tolerance), item


def within(choose: Callable[..., Plan], budget: int) -> Plan:
    """The fastest plan within so many bytes, or, where none is found, within as many as the error says would do."""
    enough = budget
    try:
        plan = choose(memory_budget=budget)
    except DoesNotFitError as error:
        enough = error.smallest_bytes
        plan = choose(memory_budget=enough)
    assert budget <= enough
    assert plan.predicted.peak_memory_bytes <= enough
    return plan


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize(("name", "mesh"), CHECKS)
def test_chosen_plans_equal_one_device(name: str, mesh: str) -> None:
    """Loss, parameters, buffers and optimizer state; the fastest plan, and the fastest within less memory."""
    case = CASES[name]
    model, inputs = case.build()
    choose = partial(
        autoshard.plan, model, slow_h100s().mesh(MESHES[mesh]), example_inputs=inputs,
        optimizer=ADAMW(model.parameters()), precision=case.precision, time_budget_s=20.0,
    )  # fmt: skip
    fastest = choose()
    assert not all(layout.startswith("copied") for layout in fastest.layouts)
    check(case, fastest)
    for share in SHARES:
        budget = int(share * fastest.predicted.peak_memory_bytes)
        tight = within(choose, budget)
        if tight.recompute.nodes:
            break
    assert tight.recompute.nodes or (name, mesh) in FIT_WITHOUT
    check(case, tight)
