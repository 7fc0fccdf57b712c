"""Gradients in 16 bits are converted to float32 before they are reduced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.spec import P
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.kernels.optimizers import SGD_HYPER
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.strategies.narrow_gradients import without_sums
from tests.passes.blocks import h100s

MESH = Mesh({"data": 4})
REDUCTIONS = ("reduce_scatter_tensor", "all_reduce")


class Tied(nn.Module):
    """A tied weight, whose gradient has two addends, and a bias, whose gradient is a sum of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 512)
        self.norm, self.product = nn.LayerNorm(512), nn.Linear(512, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.product(self.norm(self.embed(tokens)))
        return torch.nn.functional.linear(hidden, self.embed.weight).square().mean()


def planned(constraints: dict[str, P], dtype: torch.dtype | None = torch.bfloat16) -> tuple[Plan, list[torch.dtype]]:
    """Return a step's plan, and the dtypes of non-scalar reductions in its lowered program."""
    with torch.device("meta"):
        model = Tied()
    rule = UpdateRule("sgd_update", (), (False,), SGD_HYPER)
    update = Update("SGD", (UpdateGroup(rule, tuple(name for name, _ in model.named_parameters())),))
    tokens = torch.empty(256, 512, dtype=torch.int64, device="meta")
    program = trace(model, (tokens,), update=update, compute_dtype=dtype)
    options = PlanOptions(constraints={"input:*": P("data"), **constraints}, with_baselines=False)
    plan = plan_program(program, MESH, h100s(MESH), options)
    graph = lower_program(program, plan).lowered.graph_module.graph
    values = [node.args[0].meta["val"] for node in graph.nodes if any(name in str(node.target) for name in REDUCTIONS)]
    return plan, [value.dtype for value in values if value.ndim]


@pytest.mark.parametrize("constraints", [{"*weight": P(), "*bias": P()}, {"*weight": P("data"), "*bias": P("data")}])
def test_gradients_are_reduced_in_float32(constraints: dict[str, P]) -> None:
    """Gradients of weights, biases and norms are reduced in float32, whether parameters are copied or split."""
    _, found = planned(constraints)
    assert len(found) >= 4
    assert set(found) == {torch.float32}


def test_weights_are_gathered_in_16_bits() -> None:
    """The plan casts split weights to 16 bits before they are gathered, for half the bytes."""
    plan, _ = planned({"*weight": P("data"), "*bias": P("data")})
    assert plan.parameters["product.weight"].layout == "ZeRO-3 over data"
    casts = [node for name, node in plan.nodes.items() if name.startswith("_to_copy") and node.inputs == (P("data"),)]
    assert len(casts) >= 5


def test_sums_are_forbidden_and_nothing_else() -> None:
    """`without_sums` forbids exactly the reshards that reduce a partial sum, and allows those that reduce a maximum."""
    specs = (P(), P("data"), P(partial={"data": "sum"}), P(partial={"data": "max"}))
    table = without_sums(np.zeros((4, 4)), specs, specs)
    assert np.isinf(table).tolist() == [[False] * 4, [False] * 4, [True, True, False, True], [False] * 4]
