"""Keep track of weights that have memory but no values yet, in a model that was built on the meta device.

The first program's placement gives these weights memory with zeros. They are unset until they are written in place, by
`init_weights`, `load_weights`, `load_state_dict`, `torch.distributed.checkpoint`, or the user. Torch counts the write
in a tensor's version. A call of the model raises an error until all weights are written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autoshard.errors import NotAvailableError, TraceError
from autoshard.runtime.engine import Engine
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from autoshard.runtime.versions import Version, version_of

_SHOWN = 4
_Unset = tuple[torch.Tensor, Version]


class UnsetWeights:
    """Parameters and buffers that have not been written since they got memory.

    Each rank knows its own unset weights. All ranks agree on whether there may be any.
    """

    def __init__(self) -> None:
        self._found: dict[str, _Unset] = {}
        self._may_be_some = False

    def __deepcopy__(self, memo: dict[int, object]) -> UnsetWeights:
        """Return the unset weights of a copied model, whose tensors have versions of their own."""
        result = UnsetWeights()
        result._may_be_some = self._may_be_some
        for name, (tensor, version) in self._found.items():
            if version_of(tensor) == version:
                copied = copy.deepcopy(tensor, memo)
                result._found[name] = copied, version_of(copied)
        return result

    @contextmanager
    def getting_memory(self, model: nn.Module) -> Iterator[None]:
        """Record as unset the weights of `model` that are on meta before the context, and have memory after it."""
        names = on_meta(model)
        yield
        if names:
            tensors = dict(_named(model))
            held = [name for name in names if not is_elsewhere(tensors[name])]
            self._found.update((name, (tensors[name], version_of(tensors[name]))) for name in held)
            self._may_be_some = True

    def names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters and buffers of `model` that are unset on this rank."""
        if self._found:
            tensors = dict(_named(model))
            self._found = {
                name: (tensor, version)
                for name, (tensor, version) in self._found.items()
                if tensors.get(name) is tensor and version_of(tensor) == version
            }
        return list(self._found)

    def names_everywhere(self, model: nn.Module, engine: Engine) -> list[str]:
        """Return the names of the weights of `model` that are unset on any rank. All ranks must call this."""
        if not self._may_be_some:
            return []
        mine = self.names(model)
        everyone = [mine] if engine.control is None else engine.control.gather(mine, "run on weights")
        return list(dict.fromkeys(name for theirs in everyone for name in theirs))

    def refuse_use(self, model: nn.Module, engine: Engine, make: Callable[[Collection[str]], None]) -> None:
        """Raise `TraceError`, on every rank, if a weight of `model` is unset on any rank.

        If only non-persistent buffers are unset, call `make` with their names instead, which initialises them.
        """
        if not self._may_be_some:
            return
        unset = self.names_everywhere(model, engine)
        names = [name for name in unset if not _is_without_state(model, name)]
        if names:
            raise TraceError(
                f"The model was built on the meta device, and some weights have no values yet: {_listed(names)}. Call "
                "init_weights(seed), load_weights(path) or load_state_dict on the compiled model before you call it."
            )
        if unset:
            make(unset)
        self._found, self._may_be_some = {}, False


def on_meta(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of `model` on the meta device."""
    return [name for name, tensor in _named(model) if tensor.is_meta]


def check_is_placed(model: nn.Module, action: str) -> None:
    """Raise `NotAvailableError` if a weight that `action` would write is still on the meta device."""
    names = on_meta(model)
    if names:
        raise NotAvailableError(
            f"{action} would write weights that have no memory yet: {_listed(names)}. The model was built on the meta "
            "device, and no program of it is compiled. Pass compile(..., example_inputs=), or call compile_for "
            "with the inputs of a call."
        )


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_without_state(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._non_persistent_buffers_set


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return f"{', '.join(map(repr, names[:_SHOWN]))}{f' and {more} more' if more > 0 else ''}"
