"""The failing part of a wrong plan is shrunk to code that runs by itself and fails alike."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, P, PlanMismatchError, VerificationError
from autoshard.testing import WholeStep, check_calls, check_plan
from autoshard.testing.source import run_code
from autoshard.tracing import trace
from tests.passes.greedy_plans import most_split_plan

MESH = Mesh({"data": 2})


@torch.library.custom_op("autoshard_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


turned.register_fake(lambda x: torch.empty_like(x))
turned.register_autograd(lambda context, grad: torch.ops.autoshard_tests.turned(grad))


@autoshard.sharding_rule(torch.ops.autoshard_tests.turned.default)
def turned_rule(x: torch.Tensor) -> str:
    """A wrong rule: the operator flips the whole tensor, not each piece."""
    return "n c -> n c"


class Model(nn.Module):
    """A model with the wrongly ruled operator among others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.ops.autoshard_tests.turned(torch.tanh(self.first(x)))
        return (self.second(h) * x).square().mean()


def test_a_wrong_rule_is_found_among_roundings_to_bfloat16() -> None:
    """In bfloat16 a wrong rule is found, although one device's own results vary."""
    model, inputs = Model(), (torch.randn(4, 8),)
    split = most_split_plan(trace(model, inputs, compute_dtype=torch.bfloat16), MESH)
    plan = dataclasses.replace(split, precision="bf16")
    report = check_plan(model, MESH, inputs, plan=plan)
    calls = [line for line in report.small_failure.splitlines() if "torch.ops." in line]
    assert not report.is_equal
    assert "turned" in "".join(calls)


class Normed(nn.Module):
    """A model with the wrongly ruled operator after a batch norm whose result has other strides than in the trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2)).flatten(0, 1)
        return (torch.ops.autoshard_tests.turned(h) * h.cumsum(0)).mean()


def test_a_failure_among_views_is_printed() -> None:
    """The shrunk code has the wrong operator, although some views of the trace are impossible for the
    kernel's result."""
    model, inputs = Normed(), (torch.randn(4, 4, 8),)
    report = check_plan(model, MESH, inputs, plan=most_split_plan(trace(model, inputs), MESH))
    assert not report.is_equal
    assert "turned" in report.small_failure


def test_a_failure_is_printed_as_a_few_calls(tmp_path: Path) -> None:
    """The shrunk code has one call, that of the wrong rule, and as a script it ends in the same error."""
    model, inputs = Model(), (torch.randn(4, 8),)
    plan = most_split_plan(trace(model, inputs), MESH)
    report = check_plan(model, MESH, inputs, plan=plan)
    assert not report.is_equal
    code = report.small_failure
    calls = [line.strip() for line in code.splitlines() if "torch.ops." in line]
    assert len(calls) == 1
    assert "torch.ops.autoshard_tests.turned.default(" in calls[0]
    assert "# import the module" not in code
    with pytest.raises(VerificationError, match="A part of the program that differs by itself"):
        report.raise_if_different()
    (tmp_path / "small.py").write_text(code)
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, tmp_path / "small.py"], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert "VerificationError: values on Mesh(data=2) that differ from one device:" in ran.stderr


def test_a_failure_of_micro_batches_is_shrunk_on_the_first() -> None:
    """A failure of a step with micro-batches is shrunk on the first micro-batch."""
    whole = WholeStep(partial(torch.optim.SGD, lr=0.1), micro_batches=2)
    model, inputs = Model(), (torch.randn(8, 8),)
    first = whole.cut(inputs, {})[0][0]
    plan = most_split_plan(trace(model, first, update=whole.update(model)), MESH)
    report = check_plan(model, MESH, inputs, plan=plan, whole_step=whole)
    assert "torch.ops.autoshard_tests.turned.default(" in report.small_failure


def test_what_is_equal_is_not_shrunk() -> None:
    """The report of a right plan has no shrunk code."""
    model, inputs = nn.Linear(8, 4), (torch.randn(4, 8),)
    assert check_plan(model, MESH, inputs).small_failure == ""


def test_calls_run_under_the_specs_that_are_given() -> None:
    """`check_calls` runs a product split over its summed dim and a call on its partial result. Other specs or
    numbers of calls are refused."""
    scope = run_code(
        """
import torch
from torch import nn
from autoshard import P

class Small(nn.Module):
    def forward(self, x, w):
        product = torch.ops.aten.mm.default(x, w)
        return torch.ops.aten.neg.default(product), product

model = Small()
inputs = (torch.randn(4, 8), torch.randn(8, 6))
partial = P(partial={"data": "sum"})
calls = (((P(None, "data"), P("data")), (partial,)), ((partial,), (partial,)))
"""
    )
    report = check_calls(scope["model"], MESH, scope["inputs"], (P(), P("data")), scope["calls"])
    assert report.is_equal
    assert report.plan.nodes["mm"].outputs == (P(partial={"data": "sum"}),)
    with pytest.raises(PlanMismatchError, match=r"the model makes 2 calls \(mm, neg\), not 1."):
        check_calls(scope["model"], MESH, scope["inputs"], (P(), P("data")), scope["calls"][:1])
    wrong = (((P("data"), P("data")), (P(),)), scope["calls"][1])
    with pytest.raises(PlanMismatchError, match=r"mm has no strategy with inputs .* in its rule"):
        check_calls(scope["model"], MESH, scope["inputs"], (P(), P("data")), wrong)
