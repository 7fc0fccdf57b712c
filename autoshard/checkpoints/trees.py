"""Split states into named tensors and the rest, so that each tensor is saved and loaded by its shards."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.checkpoints.values import Slot, has_known_factory


def split(keyword: str, state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a state into its tensors, by names that begin with `keyword`, and the rest.

    The rest is the state with a placeholder (`Slot`) in the place of each tensor.

    Example:
        >>> tensors, rest = split("ema", {"decay": 0.9, "weights": [torch.zeros(2)]})
        >>> list(tensors), rest["decay"], rest["weights"][0].name
        (['ema.weights.0'], 0.9, 'ema.weights.0')
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _is_dense(value):
            name = _unused(name, tensors) if name in tensors else name
            tensors[name] = value
            return Slot(name, isinstance(value, DTensor))
        if isinstance(value, dict) and not isinstance(value, Counter):
            items = {key: walk(f"{name}.{key}", item) for key, item in value.items()}
            if isinstance(value, defaultdict) and has_known_factory(value):
                return defaultdict(value.default_factory, items)
            return OrderedDict(items) if isinstance(value, OrderedDict) else items
        if type(value) in (list, tuple):
            return type(value)(walk(f"{name}.{number}", item) for number, item in enumerate(value))
        return value

    return tensors, walk(keyword, state)


def slots_in(rest: Any) -> list[Slot]:
    """Return the placeholders of tensors in a state without tensors (the rest that `split` returned)."""
    return [leaf for leaf in pytree.tree_leaves(rest) if isinstance(leaf, Slot)]


def join(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `split`: return `rest` with each placeholder replaced by the tensor of its name."""
    return pytree.tree_map(lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf, rest)


def own_slots(rest: Any, suffix: str) -> Any:
    """Return `rest` with `suffix` appended to the names of unsharded tensors, which each rank saved for itself."""

    def own(leaf: Any) -> Any:
        is_own = isinstance(leaf, Slot) and not leaf.is_sharded
        return Slot(leaf.name + suffix, is_sharded=False) if is_own else leaf

    return pytree.tree_map(own, rest)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be saved as the bytes of its elements.

    Sparse, quantized and nested tensors are saved with the rest of the state.
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    found = name
    while found in taken:
        number += 1
        found = f"{name}~{number}"
    return found
