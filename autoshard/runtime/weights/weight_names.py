"""Match the names of tensors in files to the names of tensors in models.

Files hold parameters and persistent buffers under the names of `state_dict`. A tied parameter can be stored under one
or several of its names. transformers models have rules of their own (`transformers_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from autoshard.runtime.weights import transformers_weights
from autoshard.runtime.weights.unread import Unread


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors in files that match tensors of a model.

    Args:
        sources: name in the model → tensor in files.
        unexpected: names in files that the model lacks.
        optional: names in the model that files may lack.
    """

    sources: dict[str, Unread] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    optional: frozenset[str] = frozenset()


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that files can have, by name: parameters, under each of their names; persistent buffers."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                named[f"{path}.{name}" if path else name] = buffer
    return named


def names_by_tensor(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Return all names of each distinct tensor. Tensors and names are in the order of `tensors`."""
    found: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), []).append(name)
    return [tuple(names) for names in found.values()]


def match(model: nn.Module, names: Iterable[str], stored: Mapping[str, Unread]) -> Matched:
    """Return the tensor in files for each of the model's `names`.

    Equal names match. For a transformers model, the files' tensors are first converted to tensors of the model.
    """
    names = frozenset(names)
    if transformers_weights.applies_to(model):
        sources, unexpected = transformers_weights.converted(model, names, stored)
        unexpected = transformers_weights.without_obsolete(model, unexpected)
        return Matched(sources, unexpected, transformers_weights.optional_among(model, names))
    sources = {name: tensor for name, tensor in stored.items() if name in names}
    return Matched(sources, [name for name in stored if name not in names])


def to_write(model: nn.Module, tensors: Mapping[str, Unread], tied: Iterable[tuple[str, ...]]) -> Mapping[str, Unread]:
    """Return the tensors to write into files, by their names in files.

    A tied tensor is written once, under a name from which loading finds its other names. `tied` has all names of each
    tensor.
    """
    if transformers_weights.applies_to(model):
        return transformers_weights.reverted(model, tensors, tied)
    return {names[0]: tensors[names[0]] for names in tied}
