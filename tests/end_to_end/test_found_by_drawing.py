"""Programs and plans that once failed in drawn tests, each reduced to a small program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard import Mesh
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan, traced_call
from autoshard.testing.decided_plans import greedy_plan
from autoshard.testing.programs import run_source
from autoshard.tracing import trace
from passes.strategies.enumerate_strategies import Site
from tests.end_to_end.drawn_pairs import runs_in
from tests.passes.greedy_plans import most_split_plan

_HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

"""

_BATCH_NORM = """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8, eps=0.01, track_running_stats=False)

    def forward(self, x):
        return self.batch_norm(x.flatten(0, 1)).unflatten(0, (4, 4)).mean()

torch.manual_seed(0)
model = Drawn()
inputs = (torch.randn(4, 4, 8),)
"""

_COMPLEX_PRODUCT = """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)))
        return (h.prod(0) * h.square().prod(0)).abs().sum()

torch.manual_seed(0)
model = Drawn()
inputs = (torch.randn(4, 2, 8),)
"""

_MEAN_NEAR_ZERO = """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.tied_1 = nn.Linear(8, 8, bias=True)
        self.linear_2 = nn.Linear(8, 8, bias=False)
        self.linear_3 = nn.Linear(8, 8, bias=False)
        self.weight_4 = nn.Parameter(torch.randn(8, 8) / 8 ** 0.5)

    def forward(self, x):
        h = torch.tanh(self.tied_1(x)) @ self.tied_1.weight
        return (self.linear_3(self.linear_2(h)) @ self.weight_4).mean()

torch.manual_seed(0)
model = Drawn()
inputs = (torch.randn(4, 4, 8),)
"""

_WIDENED = """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))
        self.layer = nn.{layer}

    def forward(self, x):
        return self.layer(x + self.table)

torch.manual_seed(0)
model = Drawn()
inputs = (torch.randn(4, 8),)
"""


_SHARP_ATTENTION = """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale_1 = nn.Parameter(torch.randn(16))
        self.shift_2 = nn.Parameter(torch.randn(16))
        self.router_3 = nn.Linear(16, 4, bias=False)
        self.up_4 = nn.Parameter(torch.randn(4, 16, 6) / 16 ** 0.5)
        self.down_5 = nn.Parameter(torch.randn(4, 6, 16) / 6 ** 0.5)
        self.q_6 = nn.Linear(16, 16, bias=False)
        self.k_7 = nn.Linear(16, 4, bias=True)
        self.v_8 = nn.Linear(16, 4, bias=False)
        self.o_9 = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        h = x
        h = h * self.scale_1 + self.shift_2
        shares = self.router_3(h).softmax(-1)
        best, chosen = shares.topk(2)
        best = best - best[..., -1:]
        best = torch.zeros_like(shares).scatter(-1, chosen, best)
        inner = F.silu(torch.einsum('btd,edh->bteh', h, self.up_4))
        done = torch.einsum('bteh,ehd->bted', inner, self.down_5)
        h = h + (best.unsqueeze(-1) * done).sum(2)
        h = h + h.sum(dim=0).unsqueeze(0) * 0.1
        q = self.q_6(h).view(8, 8, 4, 4).transpose(1, 2)
        k = self.k_7(h).view(8, 8, 1, 4).transpose(1, 2)
        v = self.v_8(h).view(8, 8, 1, 4).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + self.o_9(o.transpose(1, 2).reshape(8, 8, 16))
        return h.sum() * 0.1

torch.manual_seed(2)
model = Drawn()
inputs = (torch.randn(8, 8, 16),)

from functools import partial
from autoshard.testing import WholeStep

whole_step = WholeStep(partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01))
"""


@pytest.mark.parametrize("mesh", [Mesh({"data": 4}), Mesh({"data": 2, "model": 2})], ids=str)
def test_a_batch_norm_whose_input_needs_no_gradient(mesh: Mesh) -> None:
    """A batch norm of an input without gradient equals one device, under the chosen plan and the most split plan."""
    program = run_source(_HEAD + _BATCH_NORM)
    split = most_split_plan(trace(program.model, program.inputs), mesh)
    for plan in (None, split):
        check_plan(program.model, mesh, program.inputs, plan=plan, precise=torch.float64).raise_if_different()


def test_the_rounding_of_a_mean_near_zero_is_no_difference() -> None:
    """In bfloat16, `check_plan` accepts a mean near zero that differs by the rounding of one bias."""
    program = run_source(_HEAD + _MEAN_NEAR_ZERO)
    check_plan(program.model, Mesh({"data": 1}), program.inputs, precision="bf16").raise_if_different()


def test_a_batch_norm_whose_weights_are_cast_runs_over_a_split_batch() -> None:
    """In bfloat16, a batch norm whose weights and input are both cast equals one device, with the batch split."""
    mesh, program = Mesh({"data": 4}), run_source(_HEAD + _BATCH_NORM)
    traced = traced_call(program, "bf16")
    plan = replace(greedy_plan(traced, mesh, _rows_split), precision="bf16")
    assert any(node.inputs[0].axes_of(0) for name, node in plan.nodes.items() if "batch_norm_legit" in name)
    check_plan(program.model, mesh, program.inputs, plan=plan, traced=traced).raise_if_different()


def test_products_of_complex_numbers_are_not_pending() -> None:
    """Under the plan with most partial sums, products of complex numbers over a split dim equal one device."""
    program = run_source(_HEAD + _COMPLEX_PRODUCT)
    mesh = Mesh({"data": 2, "model": 2})
    plan = greedy_plan(trace(program.model, program.inputs), mesh, _pending)
    check_plan(program.model, mesh, program.inputs, plan=plan, precise=torch.float64).raise_if_different()


def _pending(_: Site, strategy: Strategy) -> int:
    return sum(bool(spec.partial) for spec in (*strategy.inputs, *strategy.outputs))


def _rows_split(_: Site, strategy: Strategy) -> int:
    return sum(bool(spec.dims and spec.axes_of(0)) for spec in (*strategy.inputs[:1], *strategy.outputs[:1]))


@pytest.mark.slow
def test_gradients_of_sharp_attention_are_settled_in_float64() -> None:
    """Attention with scores in the hundreds, whose gradients amplify rounding, passes if compared in float64."""
    mesh, program = Mesh({"data": 2, "model": 2}), run_source(_HEAD + _SHARP_ATTENTION)
    traced = traced_call(program, None)
    options = {"plan": most_split_plan(traced, mesh), "traced": traced, "precise": torch.float64}
    check_plan(
        program.model, mesh, program.inputs, whole_step=program.whole_step, steps=2, **options
    ).raise_if_different()


@pytest.mark.parametrize(
    "layer", ["BatchNorm1d(8, track_running_stats=False)", "LSTM(8, 4, bias=False)", "LayerNorm(8)"]
)
def test_what_one_device_cannot_run_in_bfloat16_is_not_drawn(layer: str) -> None:
    """`runs_in` is false for a batch norm and an LSTM with bfloat16 weights, whose input a buffer makes float32."""
    program = run_source(_HEAD + _WIDENED.format(layer=layer))
    assert runs_in(torch.bfloat16, program) == layer.startswith("LayerNorm")
