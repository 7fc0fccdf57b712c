"""Register dataclasses with torch's pytree, so that their fields are leaves of a call's arguments or results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree


def register_dataclasses(value: Any) -> None:
    """Register the types of all dataclasses nested in `value` as pytree nodes, so that their fields become leaves."""
    for leaf in pytree.tree_leaves(value):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        _register_dataclass(type(leaf))
        register_dataclasses([getattr(leaf, item.name) for item in dataclasses.fields(leaf)])


def _register_dataclass(kind: type) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    names = [item.name for item in dataclasses.fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, name) for name in names], None

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in names], None

    def unflatten(children: Iterable[Any], _: Any) -> Any:
        value = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
