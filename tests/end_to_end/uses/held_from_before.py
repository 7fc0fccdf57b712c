"""Uses in which optimizers, lists or averages hold parameters from before `compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import autoshard
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, train

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _model() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)), torch.randn(8, 8)


def _loss(compiled: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return compiled(inputs).square().mean()


_SPLIT = {"*.weight": autoshard.P("data")}


def optimizer_from_before(
    make: Make, *, compiles_first: bool = False, keeps_a_graph: bool = False, **options: Any
) -> Callable:
    """Return a script that trains with an optimizer made before `compile`."""

    def script(compile: Compile) -> Numbers:
        model, inputs = _model()
        optimizer = make(model.parameters())
        kept = model(inputs) if keeps_a_graph else None
        compiled = compile(model, **({"example_inputs": (inputs,)} if compiles_first else {}), **options)
        found = train(optimizer, lambda: _loss(compiled, inputs))
        return numbers(*found, *compiled.parameters(), *([] if kept is None else [kept]))

    return script


def average_from_before(compile: Compile) -> Numbers:
    """Average parameters that the script listed before `compile`, as many training scripts do."""
    model, inputs = _model()
    held = dict(model.named_parameters())
    compiled = compile(model)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
    averages = {}
    for _ in range(3):
        optimizer.zero_grad()
        _loss(compiled, inputs).backward()
        nn.utils.clip_grad_norm_(held.values(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in held.items():
                averages[name] = parameter.clone() if name not in averages else averages[name].lerp(parameter, 0.1)
    return numbers(*averages.values())


def written_from_before(compile: Compile) -> Numbers:
    """Freeze, and write in place, parameters that the script listed before `compile`."""
    model, inputs = _model()
    held = list(model.parameters())
    compiled = compile(model, example_inputs=(inputs,))
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(0.5)
    held[0].requires_grad_(False)
    _loss(compiled, inputs).backward()
    return numbers(_loss(compiled, inputs), *(float(item.grad is None) for item in compiled.parameters()), held[2].grad)


def groups_and_schedule(compile: Compile) -> Numbers:
    """Train tied weights with an optimizer of two groups and a schedule made before `compile`."""
    model, inputs = _model()
    model.append(nn.Linear(2, 16, bias=False))
    model[3].weight = nn.Parameter(model[0].weight[:, :2].detach().clone())
    model.append(nn.Linear(16, 2))
    model[4].weight = model[2].weight
    optimizer = torch.optim.AdamW([{"params": [model[2].weight], "lr": 0.1}, {"params": model[0].parameters()}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    compiled = compile(model)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(compiled, inputs).backward()
        optimizer.step()
        schedule.step()
    return numbers(_loss(compiled, inputs), *compiled.parameters())


def recurrent(compile: Compile) -> Numbers:
    """Train a GRU, to whose parameters torch holds weak references, with an optimizer from before `compile`."""
    torch.manual_seed(0)
    model, inputs = nn.GRU(4, 6, batch_first=True), torch.randn(4, 3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compiled = compile(model)
    return numbers(*train(optimizer, lambda: compiled(inputs)[0].square().mean()))


def marked_parameters(compile: Compile) -> Numbers:
    """Make parameter groups after `compile` from marks that the script set before."""
    model, inputs = _model()
    for parameter in model.parameters():
        parameter.scale = 1.0 if parameter.dim() == 1 else 2.0  # type: ignore[attr-defined]
    compiled = compile(model, example_inputs=(inputs,))
    groups = [{"params": [item], "lr": 0.1 * item.scale} for item in compiled.parameters()]
    optimizer = torch.optim.SGD(groups)
    _loss(compiled, inputs).backward()
    optimizer.step()
    return numbers(_loss(compiled, inputs))


def stepped_before(compile: Compile) -> Numbers:
    """Compile a step with an optimizer that has already taken a step on one device."""
    model, inputs = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _loss(model, inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    step = compile(model, optimizer=optimizer, loss_fn=lambda outputs, inputs: outputs.square().mean())
    return numbers(step(inputs, inputs), step(inputs, inputs))


def loop_goes_on(make: Make, *, loads: bool = False, **options: Any) -> Callable[[Compile], Numbers]:
    """Return a script that compiles its model after two steps, and takes two more.

    With `loads`, a new optimizer takes over the state of the old one.
    """

    def script(compile: Compile) -> Numbers:
        model, inputs = _model()
        optimizer = make(model.parameters())
        found = train(optimizer, lambda: _loss(model, inputs), 2)
        state = optimizer.state_dict()
        compiled = compile(model, **options)
        if loads:
            optimizer = make(compiled.parameters())
            optimizer.load_state_dict(state)
        found += train(optimizer, lambda: _loss(compiled, inputs), 2)
        return numbers(*found, *compiled.parameters())

    return script


def two_models(compile: Compile) -> Numbers:
    """Train two models by one optimizer, and compile the second model later."""
    first, inputs = _model()
    second = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad([*first.parameters(), *second.parameters()], lr=0.1)
    compiled, other, found = compile(first), second, []
    for index in range(4):
        if index == 2:
            other = compile(second)
        optimizer.zero_grad()
        loss = _loss(compiled, inputs) + other(inputs[:, :2]).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss)
    return numbers(*found)


def called_from_before(compile: Compile) -> Numbers:
    """Call the original model, with whole parameters, after it was compiled, and take its gradients."""
    model, inputs = _model()
    compiled = compile(model, example_inputs=(inputs,), constraints=_SPLIT)
    _loss(compiled, inputs).backward()
    with nullcontext() if compiled is model else compiled.whole_parameters():
        loss = _loss(model, 2 * inputs)
        loss.backward()
    return numbers(loss, *(parameter.grad for parameter in compiled.parameters()))


_OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW of a foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "Adagrad of a foreach": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, foreach=True),
}

_SCRIPTS: dict[str, Callable[[Compile], Numbers]] = {
    **{f"{name} from before": optimizer_from_before(make) for name, make in _OPTIMIZERS.items()},
    "SGD from before, example inputs": optimizer_from_before(_OPTIMIZERS["SGD"], compiles_first=True),
    "SGD from before, a kept graph": optimizer_from_before(_OPTIMIZERS["SGD"], keeps_a_graph=True),
    "Adagrad from before, example inputs": optimizer_from_before(_OPTIMIZERS["Adagrad"], compiles_first=True),
    "a loop that goes on with AdamW": loop_goes_on(_OPTIMIZERS["AdamW"]),
    "a loop that goes on with Adagrad": loop_goes_on(_OPTIMIZERS["Adagrad"]),
    "a loop that loads AdamW's state": loop_goes_on(_OPTIMIZERS["AdamW"], loads=True),
    "Adagrad from before, split weights": optimizer_from_before(_OPTIMIZERS["Adagrad"], constraints=_SPLIT),
    "a loop that goes on with AdamW, split weights": loop_goes_on(_OPTIMIZERS["AdamW"], constraints=_SPLIT),
    "a loop that loads AdamW's state, split weights": loop_goes_on(
        _OPTIMIZERS["AdamW"], loads=True, constraints=_SPLIT
    ),
    "one optimizer of two models": two_models,
    "an average from before": average_from_before,
    "parameters written from before": written_from_before,
    "groups and a schedule from before": groups_and_schedule,
    "a recurrent layer's optimizer from before": recurrent,
    "parameters marked before": marked_parameters,
    "the model from before, called": called_from_before,
}

USES = (
    *(
        Use(
            f"a fused Adagrad {when}, on two ranks",
            script(lambda parameters: torch.optim.Adagrad(parameters, fused=True)),
            refused="optimizer=Adagrad has fused=True, a kernel that torch does not run on DTensors",
            processes=True,
        )
        for when, script in (("from before", optimizer_from_before), ("that goes on", loop_goes_on))
    ),
    *(Use(name, script, processes=True) for name, script in _SCRIPTS.items()),
    Use("an optimizer that stepped before", stepped_before, processes=True, refused="has already taken steps"),
    Use("SGD from before, simulated", _SCRIPTS["SGD from before"]),
)
