"""Give the user's own code, such as `sharded.generate`, whole tensors when it reads parameters that are DTensors.

Within `whole_parameters`, reading a parameter from its module gathers it, because DTensors refuse plain tensors. The
whole tensor is freed when the forward that reads it ends. Every rank runs the same code on the same tensors. Gradients
flow back into the shards, and in-place changes reach the shards.
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
    """Within the context, code of `model` that reads a DTensor parameter gets a whole tensor.

    `lay_out` is `Engine.lay_out_like`.
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
    """Make reads of a module's parameters return whole tensors. Return a function that undoes this."""
    held = module._parameters
    weights: Any = module._flat_weights if isinstance(module, nn.RNNBase) else None
    module._parameters = _Lending(held, lender)
    if isinstance(module, nn.RNNBase):  # it reads weights from a list of its own
        module._flat_weights = [lender.lend(weight) for weight in module._flat_weights]

    def give_back(module: nn.Module) -> None:
        now = dict(module._parameters.items())  # includes parameters that were set meanwhile
        held.clear()
        held.update(now)
        module._parameters = held
        if isinstance(module, nn.RNNBase):
            module._flat_weights = weights

    return give_back


class _Lending(dict[str, Any]):
    """The `_parameters` of a module within `whole_parameters`.

    Reading by name gives the whole tensor, and iterating gives the DTensors.
    """

    def __init__(self, parameters: dict[str, Any], lender: _Lender) -> None:
        super().__init__(parameters)
        self._lender = lender

    def __getitem__(self, name: str) -> Any:
        return self._lender.lend(super().__getitem__(name))


class _Lender:
    """Gathers parameters, and keeps each whole tensor until the running forward ends.

    Outside a forward, it keeps them until the context of `whole_parameters` ends.
    """

    def __init__(self, lay_out: LayOut) -> None:
        self._lay_out = lay_out
        self._scopes: list[dict[tuple[int, bool], tuple[torch.Tensor, DTensor]]] = []

    def open(self, *_: Any) -> None:
        self._scopes.append({})

    def close(self, *_: Any) -> None:
        """Copy in-place changes of the ending forward's whole tensors into the shards, and drop these tensors."""
        for full, parameter in self._scopes.pop().values():
            self._take_back(full, parameter)

    def lend(self, parameter: Any) -> Any:
        """Return a DTensor parameter as a whole tensor, with gradients into the DTensor; any other value as it is."""
        if not isinstance(parameter, DTensor):
            return parameter
        key = (id(parameter), torch.is_grad_enabled() and parameter.requires_grad)
        known = next((scope[key][0] for scope in self._scopes if key in scope), None)
        if known is not None:
            return known
        full = parameter.full_tensor()
        if key[1]:
            full._is_param = True  # type: ignore[attr-defined]  # so that `get_parameter` accepts a non-leaf tensor
        else:
            full = nn.Parameter(full.detach(), requires_grad=False)
        self._scopes[-1][key] = (full, parameter)
        return full

    @torch.no_grad()
    def _take_back(self, full: torch.Tensor, parameter: DTensor) -> None:
        laid_out, local = self._lay_out(full, parameter), parameter.to_local()
        assert isinstance(laid_out, DTensor), "`lay_out` returns a DTensor for a DTensor"
        if not torch.equal(laid_out.to_local(), local):
            local.copy_(laid_out.to_local())
