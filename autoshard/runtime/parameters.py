"""Replace, swap or lend the parameters of a model. Their qualified names and ties stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import TraceError
from autoshard.runtime.replaced_parameter import ReplacedParameter, stand_for


def replace_parameters(model: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `replace(parameter)` in the place of each parameter, under all of its names.

    `replace` may return the parameter itself.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner, leaf, parameter in list(_places(model)):
        if parameter not in made:
            made[parameter] = _as_parameter(replace(parameter), parameter)
        if made[parameter] is not parameter:
            setattr(owner, leaf, made[parameter])


def take_over_parameters(model: nn.Module, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `take(parameter)` in the place of each parameter for good, with its hooks and attributes.

    Its gradient becomes `take(gradient)`. The old parameter objects forward to the new ones (`ReplacedParameter`), so
    that optimizers which hold the old ones keep working.
    """
    before = [parameter for _, _, parameter in _places(model)]
    replace_parameters(model, take)
    for old, (_, _, new) in zip(before, list(_places(model)), strict=True):
        if new is not old:
            if isinstance(old, ReplacedParameter):
                continue  # it has several names, and was taken over under another one
            _Hooks.of(old).put_on(new)
            new.grad = None if old.grad is None else take(old.grad)
            vars(new).update(vars(old))
            stand_for(old, new)


def swap_parameter(parameter: torch.Tensor, lay_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give `parameter` the sharding and memory of `lay_out(parameter)`, and its gradient those of `lay_out(gradient)`.

    The parameter object and its hooks stay, so that optimizers which hold it keep working.
    """
    grad, hooks = parameter.grad, _Hooks.of(parameter)
    _Hooks().put_on(parameter)
    laid_out = nn.Parameter(lay_out(parameter), requires_grad=parameter.requires_grad)
    vars(laid_out).update(vars(parameter))
    torch.utils.swap_tensors(parameter, laid_out)
    hooks.put_on(parameter)
    parameter.grad = None if grad is None else lay_out(grad)


@dataclass(frozen=True, slots=True)
class _Hooks:
    """The two dicts in which torch keeps a parameter's hooks.

    A hook's handle can remove the hook only from these dicts.
    """

    on_gradient: Any = None
    after_accumulation: Any = None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Hooks:
        return cls(parameter._backward_hooks, parameter._post_accumulate_grad_hooks)

    def put_on(self, parameter: torch.Tensor) -> None:
        parameter._backward_hooks = self.on_gradient
        parameter._post_accumulate_grad_hooks = self.after_accumulation


@torch.no_grad()
def memory_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of `tensor` in new memory on `device`; zeros if it is on the meta device."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.device == device:  # `to` would initialise the device, which fails for fake CUDA tensors
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def give_buffers_memory(model: nn.Module, device: torch.device) -> None:
    """Replace each buffer on the meta device by zeros on `device`, under all of its names."""
    _replace_buffers(model, lambda buffer: memory_of(buffer, device) if buffer.is_meta else buffer)


@torch.no_grad()
def gather_buffers(model: nn.Module) -> None:
    """Replace each buffer that is a DTensor by its whole value, for example a buffer of `spectral_norm`."""
    _replace_buffers(model, lambda buffer: buffer.full_tensor().clone() if isinstance(buffer, DTensor) else buffer)


def _replace_buffers(model: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `replace(buffer)` in the place of each buffer, under all of its names, unless it is the buffer itself."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer not in made:
            made[buffer] = replace(buffer)
        if made[buffer] is not buffer:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, made[buffer])


@contextmanager
def lent_parameters(model: nn.Module, lend: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the context, `model` has `lend(parameter)` in the place of each parameter."""
    before = list(_places(model))
    replace_parameters(model, lambda parameter: lend(parameter))
    try:
        yield
    finally:
        for owner, leaf, parameter in before:
            if isinstance(parameter, nn.Parameter):
                setattr(owner, leaf, parameter)
            else:  # `torch.func.functional_call` puts plain tensors there
                owner._parameters[leaf] = parameter


@contextmanager
def outlined_parameters(model: nn.Module) -> Iterator[Mapping[torch.Tensor, nn.Parameter]]:
    """Within the context, `model` has meta tensors of global shape (outlines) in the place of its parameters.

    Yield a dict from each outline to its parameter.
    """
    own = [parameter for _, _, parameter in _places(model)]
    with lent_parameters(model, _outline):
        yield dict(zip((outline for _, _, outline in _places(model)), own, strict=True))


def _outline(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def refuse_new_parameters(model: nn.Module, has_adopted: Callable[[torch.Tensor], bool]) -> None:
    """Raise `TraceError` if the model has a parameter that the engine did not take over in `compile`.

    A new parameter would have to become a DTensor, and optimizers that exist already do not hold it.
    """
    new = [name for name, parameter in model.named_parameters() if not has_adopted(parameter)]
    if new:
        raise TraceError(
            f"{type(model).__qualname__} was given parameters after it was compiled, and with processes they cannot "
            f"take part: {', '.join(new[:4])}{', ...' * (len(new) > 4)}. Compile the model a second time, and make its "
            "optimizer after that."
        )


def _as_parameter(value: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    if value is like:
        return like
    return nn.Parameter(value, requires_grad=like.requires_grad)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (module, name in the module, parameter) for each place of each parameter. A tied parameter has several."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        yield model.get_submodule(path), leaf, parameter
