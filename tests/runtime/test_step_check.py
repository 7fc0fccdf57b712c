"""A step reports its gradient norm, and stops at a loss or norm that is not finite."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, NonFiniteError, NotAvailableError, Options
from autoshard.runtime.step_check import StepCheck

ONE, NAN, INF = torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(math.inf)


def compiled(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: object) -> autoshard.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    step = autoshard.compile(
        nn.Sequential(model, nn.Flatten(0)),
        Mesh({"data": 2}),
        optimizer=optimizer(model.parameters(), lr=0.1),  # type: ignore[call-arg]
        loss_fn=lambda outputs: outputs.square().mean(),
        **options,  # type: ignore[arg-type]
    )
    assert isinstance(step, autoshard.TrainStep)
    return step


def test_finite_numbers_pass() -> None:
    """Under each action, a step with a finite loss and norm passes, also if one of them is None."""
    for action in (None, "raise", "skip"):
        check = StepCheck(None, action)
        assert check.passes(ONE, ONE)
        assert check.passes(None, ONE)
        assert check.passes(ONE, None)
        assert check.skipped_steps == 0


@pytest.mark.parametrize(("loss", "norm"), [(NAN, ONE), (ONE, INF), (INF, NAN), (None, NAN), (NAN, None)])
def test_each_number_is_checked(loss: torch.Tensor | None, norm: torch.Tensor | None) -> None:
    """A non-finite loss or norm stops the step under "skip", and passes without an action."""
    check = StepCheck(None, "skip")
    assert not check.passes(loss, norm)
    assert check.skipped_steps == 1
    assert check.norm is norm
    assert StepCheck(None, None).passes(loss, norm)


def test_the_error_names_loss_norm_and_step() -> None:
    """The error names the step's number, loss and norm, and says that nothing was updated."""
    check = StepCheck(None, "raise")
    for _ in range(2):
        check.begin()
        check.end()
    check.begin()
    said = (
        "Step 3 has loss=inf and a gradient norm of nan, and on_nonfinite='raise' stops it. No rank updated a "
        "parameter or its optimizer state."
    )
    with pytest.raises(NonFiniteError, match=re.escape(said)):
        check.passes(INF, NAN)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("limit", [None, 0.01])
def test_the_norm_is_that_before_clipping(optimizer: type[torch.optim.Optimizer], limit: float | None) -> None:
    """`last_grad_norm` is the norm before clipping, as `clip_grad_norm_` returns it on one device."""
    step, x = compiled(optimizer, max_grad_norm=limit, options=Options(grad_norm=limit is None)), torch.rand(6, 4)
    assert step.last_grad_norm is None
    norms = []
    for _ in range(2):
        weight, bias = (item.detach().clone().requires_grad_() for item in step.sharded.parameters())
        (x @ weight.T + bias).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_([weight, bias], limit or 1e9))
        step(x)
        torch.testing.assert_close(step.last_grad_norm, norms[-1])
    assert norms[0] != norms[1]


def test_a_limit_that_is_set_later_brings_the_norm() -> None:
    """Without a limit, `last_grad_norm` raises; after a limit is set, the next step has it."""
    step, x = compiled(), torch.rand(6, 4)
    step(x)
    with pytest.raises(NotAvailableError, match=r"options=autoshard\.Options"):
        _ = step.last_grad_norm
    step.max_grad_norm = 0.5
    assert step.last_grad_norm is None
    step(x)
    assert step.last_grad_norm is not None
