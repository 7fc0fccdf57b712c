"""Uses of a backward from only some of a model's outputs."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both


class _TwoLosses(nn.Module):
    """A model with two heads, which returns a loss of each and its hidden values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.main, self.aux = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).tanh()
        return {"main": self.main(h).square().mean(), "aux": self.aux(h).square().mean(), "h": h}


class _Infinite(_TwoLosses):
    """A model whose auxiliary loss has an infinite derivative."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).tanh()
        return {"main": self.main(h).square().mean(), "aux": ((h - h.detach()) * self.aux.weight[0]).sum().sqrt()}


class _Steps(_TwoLosses):
    """A model whose auxiliary loss has zero derivatives, so that gradients are zeros, not None."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).tanh()
        return {"main": self.main(h).square().mean(), "aux": self.aux(h).round().mean()}


def _inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 8)


def _gradients(model: nn.Module) -> list[float]:
    """Return for each parameter whether it has a gradient, and then all entries of the gradients."""
    found = [parameter.grad for parameter in model.parameters()]
    return [*(float(grad is not None) for grad in found), *numbers(*(grad for grad in found if grad is not None))]


def _train(compile: Compile, order: str) -> Numbers:
    model = compile(_TwoLosses(), example_inputs=(_inputs(),))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    for name in order.split():
        optimizer.zero_grad()
        model(_inputs())[name].sum().backward()
        optimizer.step()
    return numbers(*model.parameters())


def alternating_losses(compile: Compile) -> Numbers:
    """Train two heads in turn; AdamW leaves the unused head unchanged."""
    return _train(compile, "main main aux main main aux")


def one_head_alone(compile: Compile) -> Numbers:
    """Train on the main loss alone; AdamW must not decay the auxiliary head."""
    return _train(compile, "main main main")


def hidden_result(compile: Compile) -> Numbers:
    """Train in turn on the hidden values and on a loss."""
    return _train(compile, "h main h")


def gradients_of_each(compile: Compile) -> Numbers:
    """Return gradients, or None, after a backward from each output and from all outputs."""
    model, found = compile(_TwoLosses()), []
    for names in (("main",), ("aux",), ("h",), ("main", "h"), ("main", "aux", "h")):
        model.zero_grad()
        outputs = model(_inputs())
        torch.stack([outputs[name].sum() for name in names]).sum().backward()
        found += _gradients(model)
    return found


def infinite_derivative_beside(compile: Compile) -> Numbers:
    """Return the main loss's gradients, beside an auxiliary loss with an infinite derivative."""
    model = compile(_Infinite())
    model(_inputs())["main"].backward()
    return _gradients(model)


def zeros_are_not_none(compile: Compile) -> Numbers:
    """Return gradients of a loss whose derivative is zero, which are zeros and not None."""
    model, found = compile(_Steps()), []
    for name in ("main", "aux"):
        model.zero_grad()
        model(_inputs())[name].backward()
        found += _gradients(model)
    return found


def two_backwards_in_turn(compile: Compile) -> Numbers:
    """Run a backward from each loss of one call, and return the summed gradients after each."""
    model = compile(_TwoLosses())
    outputs = model(_inputs())
    outputs["aux"].backward(retain_graph=True)
    found = _gradients(model)
    outputs["main"].backward()
    return found + _gradients(model)


def penalty_of_one_loss(compile: Compile) -> Numbers:
    """Return the gradients of a gradient penalty of one loss; those of the auxiliary head are None."""
    model, x = compile(_TwoLosses()), _inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)["main"], x, create_graph=True)
    gradient.square().sum().backward()
    return _gradients(model)


USES = (
    *on_both("alternating losses under AdamW", alternating_losses),
    Use("an auxiliary head that is not trained", one_head_alone),
    Use("a loss of a hidden result now and then", hidden_result),
    *on_both("gradients of each of three outputs", gradients_of_each),
    Use("an infinite derivative of the other loss", infinite_derivative_beside),
    Use("zeros are no None", zeros_are_not_none),
    Use("two backwards in turn", two_backwards_in_turn),
    Use("a gradient penalty of one of two losses", penalty_of_one_loss),
)
