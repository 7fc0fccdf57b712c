"""The user's own code beside the compiled programs (`sharded.generate`), where parameters are DTensors.

Such code mixes parameters with plain tensors, which DTensors refuse. While it runs, a parameter that is read from its
module is gathered (`self.weight` is a plain tensor, the whole of it), and freed when the forward that reads it ends: as
FSDP gathers module by module, but also for weights that another module reads. Every rank runs the same code on the same
tensors. Gradients flow back into the shards, and what the code changes in place is changed in the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

LayOut = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def whole_parameters(model: nn.Module, lay_out: LayOut) -> Iterator[None]:
    """Within, code of `model` and its submodules that reads a parameter which is a DTensor gets the whole of it.

    Args:
        model: any module.
        lay_out: `lay_out(tensor, parameter)` is a whole tensor in the shards of a parameter.
    """
    if isinstance(model._parameters, _Lending) or not any(isinstance(item, DTensor) for item in model.parameters()):
        yield
        return
    modules = list(model.modules())
    lender = _Lender(lay_out)
    hooks = [
        register_module_forward_pre_hook(lender.open),
        register_module_forward_hook(lender.close, always_call=True),
    ]
    lender.open()
    held = [_lend_parameters(module, lender) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, give_back in zip(modules, held, strict=True):
            give_back(module)
        lender.close()


def _lend_parameters(module: nn.Module, lender: _Lender) -> Callable[[nn.Module], None]:
    """Have a module read whole parameters; returns what ends that."""
    held = module._parameters
    weights: Any = module._flat_weights if isinstance(module, nn.RNNBase) else None
    module._parameters = _Lending(held, lender)
    if isinstance(module, nn.RNNBase):  # it reads a list of its own
        module._flat_weights = [lender.lend(weight) for weight in module._flat_weights]

    def give_back(module: nn.Module) -> None:
        now = dict(module._parameters.items())  # with parameters that were set meanwhile
        held.clear()
        held.update(now)
        module._parameters = held
        if isinstance(module, nn.RNNBase):
            module._flat_weights = weights

    return give_back


class _Lending(dict[str, Any]):
    """The parameters of a module: whole where one is read by its name, as they are where all are listed."""

    def __init__(self, parameters: dict[str, Any], lender: _Lender) -> None:
        super().__init__(parameters)
        self._lender = lender

    def __getitem__(self, name: str) -> Any:
        return self._lender.lend(super().__getitem__(name))


class _Lender:
    """Whole values of parameters, lent to the module whose forward runs, or to the method where none does."""

    def __init__(self, lay_out: LayOut) -> None:
        self._lay_out = lay_out
        self._scopes: list[dict[tuple[int, bool], tuple[torch.Tensor, DTensor]]] = []

    def open(self, *_: Any) -> None:
        """Begin a scope: a forward, or the whole."""
        self._scopes.append({})

    def close(self, *_: Any) -> None:
        """End a scope and its loans."""
        for full, parameter in self._scopes.pop().values():
            self._take_back(full, parameter)

    def lend(self, parameter: Any) -> Any:
        """The whole of a DTensor, with its gradient where one is wanted; anything else as it is."""
        if not isinstance(parameter, DTensor):
            return parameter
        key = (id(parameter), torch.is_grad_enabled() and parameter.requires_grad)
        known = next((scope[key][0] for scope in self._scopes if key in scope), None)
        if known is not None:
            return known
        full = parameter.full_tensor()
        if key[1]:
            full._is_param = True  # type: ignore[attr-defined]  # so `get_parameter` takes what has a history for one
        else:
            full = nn.Parameter(full.detach(), requires_grad=False)
        self._scopes[-1][key] = (full, parameter)
        return full

    @torch.no_grad()
    def _take_back(self, full: torch.Tensor, parameter: DTensor) -> None:
        """Keep in the shard what the whole has become."""
        laid_out, local = self._lay_out(full, parameter), parameter.to_local()
        assert isinstance(laid_out, DTensor), "what is laid out like a DTensor is one"
        if not torch.equal(laid_out.to_local(), local):
            local.copy_(laid_out.to_local())
