"""Uses of compiled modules in wrappers, captures and other modules, on inputs on meta, and after a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, one_device, train


class Outer(nn.Module):
    """A module that returns the mean square of another module's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs).square().mean()


def _model() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)), torch.randn(8, 8)


def _trained(called: Any, model: nn.Module, inputs: torch.Tensor) -> Numbers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return numbers(*train(optimizer, lambda: called(inputs).square().mean()))


def torch_compile(compile: Compile) -> Numbers:
    """Pass the result of `compile` to `torch.compile`."""
    model, inputs = _model()
    compiled = compile(model)
    return _trained(torch.compile(compiled, backend="eager"), compiled, inputs)


def torch_compile_in_place(compile: Compile) -> Numbers:
    """Call `compiled.compile()` after a first call, and train."""
    model, inputs = _model()
    compiled = compile(model)
    compiled(inputs)
    compiled.compile(backend="eager")
    return _trained(compiled, compiled, inputs)


def torch_compile_around(compile: Compile) -> Numbers:
    """Use `torch.compile` on a function that calls the compiled module."""
    model, inputs = _model()
    compiled = compile(model)

    @torch.compile(backend="eager")
    def called(inputs: torch.Tensor) -> torch.Tensor:
        return compiled(inputs + 1)

    return _trained(called, compiled, inputs)


def torch_compile_of_a_step(compile: Compile) -> Numbers:
    """Use `torch.compile` on a training step."""
    model, inputs = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(Outer(model), optimizer=optimizer)
    if compile is not one_device:
        step = torch.compile(step, backend="eager")
    return numbers(*(step(inputs) for _ in range(3)))


def compiled_part(compile: Compile) -> Numbers:
    """Compile a model that contains a compiled module."""
    model, inputs = _model()
    return numbers(compile(Outer(compile(model)))(inputs))


def compiled_later(compile: Compile) -> Numbers:
    """Compile a part of a model after the whole model, and call the whole again."""
    model, inputs = _model()
    outer = Outer(model)
    whole = compile(outer)
    found = whole(inputs)
    outer.inner = compile(model)
    return numbers(found, whole(inputs))


def compiled_in_loss(compile: Compile) -> Numbers:
    """Use a loss function that calls another compiled module."""
    model, inputs = _model()
    judge = compile(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(model, optimizer=optimizer, loss_fn=lambda made, wanted: (judge(made) - wanted).square().mean())
    return numbers(step(inputs, torch.ones(8, 1)))


def part_of_eager(compile: Compile) -> Numbers:
    """Run and differentiate a compiled module inside a plain module."""
    model, inputs = _model()
    outer = Outer(compile(model))
    outer(inputs).backward()
    return numbers(outer(inputs), *(parameter.grad for parameter in outer.parameters()))


def distributed_before(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Compile], Numbers]:
    """Return a script that compiles a model after `wrap` has wrapped it, in part or whole."""

    def script(compile: Compile) -> Numbers:
        model, inputs = _model()
        if compile is not one_device:
            model = wrap(model)
        return _trained(compiled := compile(model), compiled, inputs)

    return script


def _wrap_a_part(model: nn.Module) -> nn.Module:
    model[0] = DistributedDataParallel(model[0])  # type: ignore[index]
    return model


def input_on_meta(compile: Compile) -> Numbers:
    """Call a model with an input on meta."""
    model, inputs = _model()
    compiled = compile(model)
    compiled(inputs)
    return numbers(compiled(inputs.to("meta") if compile is not one_device else inputs))


def target_on_meta(compile: Compile) -> Numbers:
    """Call a step with a target on meta."""
    model, inputs = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(model, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    return numbers(step(inputs, torch.ones(8, 2, device="cpu" if compile is one_device else "meta")))


@contextmanager
def _deprecated() -> Iterator[None]:
    """Ignore the deprecation warnings of `torch.jit`, which is still used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def captured(capture: Callable[[nn.Module, torch.Tensor], Any]) -> Callable[[Compile], Numbers]:
    """Return a script that captures a compiled module by a function of torch after a call."""

    def script(compile: Compile) -> Numbers:
        model, inputs = _model()
        compiled = compile(model)
        compiled(inputs)
        with _deprecated():
            return numbers(capture(compiled, inputs))

    return script


def scripted_step(compile: Compile) -> Numbers:
    """Use `torch.jit.script` on a training step."""
    model, inputs = _model()
    step = compile(Outer(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with _deprecated():
        return numbers((step if compile is one_device else torch.jit.script(step))(inputs))


def captured_before(capture: Callable[[nn.Module, torch.Tensor], nn.Module]) -> Callable[[Compile], Numbers]:
    """Return a script that compiles a model whose first layer torch's JIT has captured."""

    def script(compile: Compile) -> Numbers:
        model, inputs = _model()
        with _deprecated():
            model[0] = capture(model[0], inputs)
        return numbers(compile(model)(inputs))

    return script


def backward_of_a_step(compile: Compile) -> Numbers:
    """Call `backward` on the loss of a whole step, which has already run the backward."""
    model, inputs = _model()
    loss = compile(Outer(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(inputs)
    if compile is not one_device:
        (loss / 4).backward()
    return numbers(loss)


USES = (
    *on_both("an input on meta", input_on_meta, refused=r"input:0 .* is on device='meta'"),
    *on_both("a target on meta", target_on_meta, refused=r"input:1 .* is on device='meta'"),
    *on_both("backward of a step's loss", backward_of_a_step, refused="the step has already run the backward"),
    Use(
        "torch.jit.script of the compiled",
        captured(lambda compiled, inputs: torch.jit.script(compiled)(inputs)),
        refused=r"cannot capture a ShardedModule \(the compiled Sequential\)",
    ),
    Use(
        "torch.jit.trace of the compiled",
        captured(lambda compiled, inputs: torch.jit.trace(compiled, (inputs,))(inputs)),
        refused=r"cannot capture a ShardedModule \(the compiled Sequential\)",
    ),
    Use(
        "torch.export of the compiled",
        captured(lambda compiled, inputs: torch.export.export(compiled, (inputs,)).module()(inputs)),
        refused=r"cannot capture a ShardedModule \(the compiled Sequential\)",
    ),
    Use("torch.jit.script of a step", scripted_step, refused="cannot capture a TrainStep"),
    Use(
        "a part compiled by torch.jit.script",
        captured_before(lambda layer, inputs: torch.jit.script(layer)),
        refused=r"model\.0 is a RecursiveScriptModule, .* from before torch.jit.script",
    ),
    Use(
        "a part recorded by torch.jit.trace",
        captured_before(lambda layer, inputs: torch.jit.trace(layer, (inputs,))),
        refused=r"model\.0 is a TopLevelTracedModule, .* from before torch.jit.script",
    ),
    *on_both("torch.compile of the compiled", torch_compile),
    *on_both("compiled.compile()", torch_compile_in_place),
    *on_both("torch.compile around the compiled", torch_compile_around),
    *on_both("torch.compile of a step", torch_compile_of_a_step),
    Use("a compiled part", compiled_part, refused="model.inner is a ShardedModule, compiled already"),
    Use("a part compiled later", compiled_later, refused="calls a ShardedModule, the compiled Sequential"),
    Use("a compiled module in the loss", compiled_in_loss, refused="calls a ShardedModule, the compiled Linear"),
    *on_both("a compiled part of an eager module", part_of_eager),
    Use(
        "DistributedDataParallel given to compile",
        distributed_before(DistributedDataParallel),
        refused="model is a DistributedDataParallel, .* Pass the module from before",
        processes=True,
    ),
    Use(
        "DistributedDataParallel in what is given to compile",
        distributed_before(_wrap_a_part),
        refused=r"model\.0 is a DistributedDataParallel",
        processes=True,
    ),
    Use(
        "fully_shard before compile",
        distributed_before(fully_shard),
        refused=r"model is a FSDPSequential, .* Pass the module from before",
        processes=True,
    ),
)
