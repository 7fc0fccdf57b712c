"""`Members`: the modules, parameters and buffers of a model, collected once, compared by identity at later calls."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import NotAvailableError
from autoshard.runtime.transforms import refuse_transforms

_FLAGS = attrgetter("training", "_parameters", "_buffers", "_modules")
_TRAITS = attrgetter("dtype", "shape", "requires_grad")
_SPEC_TRAITS = attrgetter("_spec", "requires_grad")
"""Function that reads the compared traits of a DTensor. Torch replaces `_spec` if dtype or shape changes."""


@dataclass(frozen=True)
class MembersSignature:
    """The properties of a model that must be equal for two calls to share a program. Its hash is computed once.

    `content` has the modes of modules, and the names, ties, dtypes and shapes of tensors. For calls with gradients, it
    also says which parameters are frozen.
    """

    content: tuple[Any, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.content)

    def __hash__(self) -> int:
        return self._hash


class Members:
    """The modules, parameters and buffers that `model` has when this object is made. A shared module counts once."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = _modules_of(model)
        self._flags = _flat(map(_FLAGS, self._modules))
        self._dicts = [held for module in self._modules for held in _FLAGS(module)[1:]]
        self._sizes = [*map(len, self._dicts)]
        self._names = _flat(self._dicts)
        self._values = _flat(map(_VALUES, self._dicts))
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._dtensors = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._spec_traits = _flat(map(_SPEC_TRAITS, self._dtensors))
        self._shards = [ref(tensor._local_tensor) for tensor in self._dtensors]  # weak, so that placing frees them
        self._storages = [*map(_STORAGE, self._dtensors)]
        self._tensors = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        self._traits = [*map(_TRAITS, self._tensors)]
        refuse_transforms(self._tensors)
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Members:
        """Return the members of the model's copy, because storages of DTensors cannot be copied."""
        return Members(copy.deepcopy(self._model, memo))

    def are_unchanged(self) -> bool:
        """Whether the model still has the same module, parameter and buffer objects in the same places.

        Their dtypes and shapes must be the same too.
        """
        return (
            all(map(is_, _chained(map(_FLAGS, self._modules)), self._flags))
            and [*map(len, self._dicts)] == self._sizes
            and _flat(self._dicts) == self._names
            and all(map(is_, _chained(map(_VALUES, self._dicts)), self._values))
            and all(map(is_, _chained(map(_SPEC_TRAITS, self._dtensors)), self._spec_traits))
            and [*map(_TRAITS, self._tensors)] == self._traits
            and all(map(is_, map(_STORAGE, self._dtensors), self._storages))
        )

    def refuse_assigned_data(self) -> None:
        """Raise `NotAvailableError` if the user set `.data` of a DTensor, because this changes no shards."""
        for tensor, shard, storage in zip(self._dtensors, self._shards, self._storages, strict=True):
            if tensor._local_tensor is shard() and tensor.untyped_storage() is not storage:
                name = self.names.get(id(tensor), "a parameter that was taken out of the model")
                raise NotAvailableError(
                    f".data of {name} was set, which does not change its shards on processes. Write in place instead, "
                    "under torch.no_grad(): parameter.copy_(value), or parameter.mul_(m).add_(other, alpha=1 - m)."
                )

    @cached_property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by qualified name. A tied parameter is listed under each of its names."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    @cached_property
    def names(self) -> Mapping[int, str]:
        """The first qualified name of each parameter, by the parameter's `id`."""
        return {id(parameter): name for name, parameter in reversed([*self.parameters.items()])}

    @cached_property
    def has_trainable(self) -> bool:
        """Whether at least one parameter requires a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters.values())

    @cached_property
    def with_gradients(self) -> MembersSignature:
        """The signature of the model for calls with gradients, which says which parameters are frozen."""
        return MembersSignature(tuple(self._signature(grad=True)))

    @cached_property
    def without_gradients(self) -> MembersSignature:
        """The signature of the model for calls without gradients."""
        return MembersSignature(tuple(self._signature(grad=False)))

    def _signature(self, *, grad: bool) -> Iterable[Hashable]:
        numbers: dict[int, int] = {}
        for module in self._modules:
            yield module.training
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    yield name
                    continue
                number = numbers.setdefault(id(tensor), len(numbers))
                yield name, number, tensor.dtype, tensor.shape, grad and tensor.requires_grad


_VALUES = methodcaller("values")
_STORAGE = methodcaller("untyped_storage")
_chained = chain.from_iterable


def _flat(items: Iterable[Iterable[Any]]) -> list[Any]:
    return [*_chained(items)]


def _modules_of(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        found.append(module)
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found
