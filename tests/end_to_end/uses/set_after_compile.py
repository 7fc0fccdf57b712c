"""Uses that set attributes of a compiled step, model or optimizer after `compile`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale, self.mode = 1.0, "plain"

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.body(inputs)) * self.scale
        return F.cross_entropy(self.head(hidden.relu() if self.mode == "relu" else hidden), targets)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


def group_added(optimizer_class: type[torch.optim.Optimizer], *, held: bool = False, freezes: bool = False) -> Callable:
    """Return a script that adds the head's parameters to the optimizer after two steps.

    With `held`, the parameters were listed before `compile`; with `freezes`, the head is frozen until then.
    """

    def script(compile: Compile) -> Numbers:
        model, batch = _Net(), _batch()
        model.head.requires_grad_(not freezes)
        head = list(model.head.parameters())
        optimizer = optimizer_class(model.body.parameters(), lr=0.1)  # type: ignore[call-arg]
        step = compile(model, optimizer=optimizer)
        found = []
        for number in range(4):
            if number == 2:
                added = head if held else list(model.head.parameters())
                for parameter in added:
                    parameter.requires_grad_(True)
                    parameter.grad = None
                optimizer.add_param_group({"params": added, "lr": 0.05})
            found.append(step(*batch))
        return numbers(*found, *model.parameters())

    return script


def group_taken_out(compile: Compile) -> Numbers:
    """Remove a parameter group from the optimizer after two steps."""
    model, batch = _Net(), _batch()
    groups = [{"params": [*model.body.parameters()]}, {"params": [*model.head.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    step = compile(model, optimizer=optimizer)
    found = []
    for number in range(4):
        if number == 2:
            del optimizer.param_groups[1]
            model.head.requires_grad_(False)
        found.append(step(*batch))
    return numbers(*found)


def norm_set(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[Compile], Numbers]:
    """Return a script that changes `max_grad_norm` between steps, also to None."""

    def script(compile: Compile) -> Numbers:
        model, batch = _Net(), _batch()
        optimizer = optimizer_class(model.parameters(), lr=0.5)  # type: ignore[call-arg]
        step = compile(model, optimizer=optimizer, max_grad_norm=1.0)
        found = []
        for norm in (1.0, 0.1, 0.1, None, 1.0):
            step.max_grad_norm = norm
            found.append(step(*batch))
        return numbers(*found)

    return script


def set_on_step(name: str, value: object) -> Callable[[Compile], Numbers]:
    """Return a script that sets an attribute of a compiled step."""

    def script(compile: Compile) -> Numbers:
        model, batch = _Net(), _batch()
        step = compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
        setattr(step, name, value)
        return numbers(step(*batch))

    return script


def attributes_set(compile: Compile) -> Numbers:
    """Set a number, a word, a new attribute and `training` of a model through its compiled module."""
    model, batch = _Net(), _batch()
    compiled = compile(model)
    found = [compiled(*batch)]
    compiled.scale = 2.0
    found.append(compiled(*batch))
    compiled.mode = "relu"
    found += [compiled(*batch), float(model.mode == "relu")]
    compiled.note = 3
    found.append(float(model.note))
    del compiled.note
    found.append(float(hasattr(model, "note")))
    compiled.training = False
    return numbers(*found, float(model.training))


def module_set(compile: Compile) -> Numbers:
    """Replace a submodule through the compiled module."""
    model, batch = _Net(), _batch()
    compiled = compile(model)
    first = compiled(*batch)
    torch.manual_seed(3)
    compiled.head = nn.Linear(16, 4)
    return numbers(first, compiled(*batch), float(model.head is compiled.head))


USES = (
    Use("a group added", group_added(torch.optim.SGD)),
    Use("a group added to AdamW, on two ranks", group_added(torch.optim.AdamW), processes=True),
    Use("a group added of parameters from before", group_added(torch.optim.AdamW, held=True), processes=True),
    Use("a group added to RMSprop, from before", group_added(torch.optim.RMSprop, held=True), processes=True),
    Use("a frozen group added", group_added(torch.optim.Adam, freezes=True)),
    Use("a group taken out", group_taken_out),
    Use("another norm", norm_set(torch.optim.SGD)),
    Use("another norm, on two ranks", norm_set(torch.optim.AdamW), processes=True),
    Use("another norm of RMSprop", norm_set(torch.optim.RMSprop)),
    Use("a norm of 0", set_on_step("max_grad_norm", 0), refused="must be a positive number"),
    Use(
        "micro-batches set on a step",
        set_on_step("micro_batches", 2),
        refused="only max_grad_norm of",
    ),
    Use(
        "a word misspelt on a step",
        set_on_step("max_gradient_norm", 2),
        refused="only max_grad_norm of",
    ),
    *on_both("attributes set", attributes_set),
    Use("a module set", module_set),
)
